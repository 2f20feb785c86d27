"""`moe-madv model evict`: compare eviction policies on recorded routing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from toolkit.console import note


def shares(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, ...]:
    """Percentages of an option such as `20%,30%`, each once."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,3})\s*%?", part.strip())
        if match is None or not 1 <= int(match[1]) <= 100:
            raise click.BadParameter(f"{part.strip()!r} is not a share such as 20%")
        found.append(int(match[1]))
    return tuple(dict.fromkeys(found))


@click.command("evict")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TRACE...")
@click.option("--capacity", default="20%,30%", show_default=True, callback=shares, help="Shares of all experts.")
@click.option("--validate", is_flag=True, help="Choose constants on one part, test them on the others (a minute).")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="JSON file; its tables go beside it as .md."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def evict(files: tuple[Path, ...], capacity: tuple[int, ...], validate: bool, out: Path | None, as_json: bool) -> None:
    """Simulate a cache of experts under many eviction policies; misses as a share of LRU's.

    One cache holds experts of all layers. The prompt warms it; misses of decoded tokens count. TRACE is a trace
    file of a run or a recorded routing (.npz).

    \b
    Example:
      moe-madv model evict run.moetrace
      moe-madv model evict qwen3.npz gemma.npz --capacity 10%,20%,30% --json
      moe-madv model evict *.npz --validate --out results/eviction.json
    """
    from toolkit.model import eviction_report, trace

    workloads = [trace.read(file).workload() for file in files]
    compared = eviction_report.compare(workloads, capacity, validate=validate, progress=note)
    hand_out(eviction_report.as_json(compared), eviction_report.as_markdown(compared), out, as_json)


def hand_out(found: dict[str, Any], page: str, out: Path | None, as_json: bool) -> None:
    """Print a study as JSON or as its page, and write both beside each other when there is a file for it."""
    from toolkit.files import write_text

    text = json.dumps(found, indent=2)
    if out is not None:
        write_text(out, text + "\n")
        write_text(out.with_suffix(".md"), page)
        note(f"wrote {out} and {out.with_suffix('.md')}")
    click.echo(text if as_json else page, nl=as_json)
