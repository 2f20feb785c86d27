"""`moe-madv model`: look at, and make, Mixture-of-Experts GGUF files."""

from __future__ import annotations

import click


@click.group()
def model() -> None:
    """Inspect and make MoE GGUF files.

    \b
    Example:
      moe-madv model synth demo.gguf --preset demo
      moe-madv model info demo.gguf --json
    """
