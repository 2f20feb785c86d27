"""`moe-madv model predict`: which experts could be read before their layer runs, on recorded routing."""

from __future__ import annotations

import json
from pathlib import Path

import click

from toolkit.cli.model_evict import shares
from toolkit.console import note


@click.command("predict")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TRACE...")
@click.option("--capacity", default="20%,30%", show_default=True, callback=shares, help="Shares of all experts.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="JSON file; its tables go beside it as .md."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def predict(files: tuple[Path, ...], capacity: tuple[int, ...], out: Path | None, as_json: bool) -> None:
    """Guess the next layer's experts from past routing: what would be read early, and what for nothing.

    Only experts outside of the cache count. Rules are recent, frequent, and what followed the experts just chosen;
    beside them, modelled, the next layer's router run early. TRACE is a trace file of a run or a recorded routing
    (.npz).

    \b
    Example:
      moe-madv model predict run.moetrace
      moe-madv model predict qwen3.npz gemma.npz --capacity 10%,20%,30% --json
      moe-madv model predict *.npz --out results/prediction.json
    """
    from toolkit.files import write_text
    from toolkit.model import prediction_report, trace

    found = prediction_report.study([trace.read(file) for file in files], capacity, progress=note)
    text = json.dumps(prediction_report.as_json(found), indent=2)
    page = prediction_report.as_markdown(found)
    if out is not None:
        write_text(out, text + "\n")
        write_text(out.with_suffix(".md"), page)
        note(f"wrote {out} and {out.with_suffix('.md')}")
    click.echo(text if as_json else page, nl=as_json)
