"""Patch: pin, verified tree, series, patched tree."""
