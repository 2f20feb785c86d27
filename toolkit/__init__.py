"""MoE-MADV toolkit: patch, build and measure llama.cpp for Mixture-of-Experts models larger than memory."""

__version__ = "0.1.0"
