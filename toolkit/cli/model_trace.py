"""`moe-madv model trace`: what a recorded routing is like."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from toolkit.console import note


@click.command("trace")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--to", type=click.Path(path_type=Path, dir_okay=False), help="Write it in the other form: .npz or not.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def trace(file: Path, to: Path | None, force: bool, as_json: bool) -> None:
    """Show how an expert trace re-uses experts; convert it.

    FILE is what `bench run --trace` wrote, or a recorded routing (.npz). All figures are of decoded tokens: how alike
    neighbouring tokens are, which share of the experts was used in the last 8 tokens, which is among the 1/8 most
    used of the first half, and how often a cache of 20 or 30 % of all experts would have them.

    \b
    Example:
      moe-madv model trace run.moetrace
      moe-madv model trace run.moetrace --to replay.npz
      moe-madv model trace replay.npz --json
    """
    from toolkit.errors import ModelError
    from toolkit.model import trace as traces
    from toolkit.model.routing import WINDOW, statistics
    from toolkit.model.text import shown

    if to is not None and to.exists() and not force:
        raise ModelError("the file exists", where=to, hint="add --force, or give another name")
    recording = traces.read(file)
    if recording.cut_bytes:
        note(f"{shown(file)}: the last record is unfinished and left out")
    found = recording.workload().trace
    n_decode = len(found.experts) - found.n_prompt
    stats = statistics(found.experts, found.n_prompt, found.n_expert) if n_decode > WINDOW else None
    if to is not None:
        traces.write(recording, to)
        note(f"wrote {shown(to)}")
    header = recording.header
    if as_json:
        report = {
            "file": str(file),
            **asdict(header),
            "prompt_tokens": found.n_prompt,
            "decode_tokens": n_decode,
            "rows_not_recorded": found.n_filled,
            "routing": None if stats is None else asdict(stats),
        }
        click.echo(json.dumps(report, indent=2))
        return
    lines = [
        ("model", shown(header.model)),
        ("layers, experts, top k", f"{header.layers}, {header.experts}, {header.top_k}"),
        ("prompt + decoded tokens", f"{found.n_prompt} + {n_decode}"),
        ("rows not recorded", str(found.n_filled)),
    ]
    if stats is not None:
        lines += [
            ("adjacent Jaccard", f"{stats.adjacent_jaccard:.3f}"),
            (f"seen in the last {WINDOW} tokens", f"{stats.recent_reuse:.3f}"),
            ("static top 1/8", f"{stats.static_coverage:.3f}"),
            *((f"LRU hits at {p} %", f"{stats.lru_hits[p]:.3f}") for p in (20, 30)),
        ]
    else:
        note(f"statistics need more than {WINDOW} decoded tokens")
    click.echo("\n".join(f"{name:<26} {value}" for name, value in lines))
