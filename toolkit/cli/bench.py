"""`moe-madv bench`: measure arms against each other and compare the rows."""

from __future__ import annotations

import click


@click.group()
def bench() -> None:
    """Run and compare A/B measurements.

    \b
    Example:
      moe-madv bench run demo.gguf --oversubscribe 2.7 --out demo.jsonl
      moe-madv bench compare demo.jsonl
    """
