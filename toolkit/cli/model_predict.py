"""`moe-madv model predict`: which experts could be read before their layer runs, on recorded routing."""

from __future__ import annotations

from pathlib import Path

import click

from toolkit.cli.model_evict import hand_out, shares
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
    from toolkit.model import prediction_report, trace

    found = prediction_report.study([trace.read(file) for file in files], capacity, progress=note)
    hand_out(prediction_report.as_json(found), prediction_report.as_markdown(found), out, as_json)
