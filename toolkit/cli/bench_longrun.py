"""`moe-madv bench longrun` and `stalls`: measure for hours, and what took far longer than its like."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.bench_request import MeasuringCommand, make_request, what_to_measure
from toolkit.console import note

if TYPE_CHECKING:
    from toolkit.bench.longrun import Summary

_ABOVE_0 = click.FloatRange(min=0, min_open=True)


@click.command("longrun", cls=MeasuringCommand)
@what_to_measure
@click.option("--hours", type=_ABOVE_0, help="Time to spend, over all calls of the command.")
@click.option("--minutes", type=_ABOVE_0, help="The same in minutes.")
@click.option("--pause", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS", help="Rest between two runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def longrun(
    hours: float | None, minutes: float | None, pause: float, dry_run: bool, as_json: bool, **given: Any
) -> None:
    """Measure arms of MODEL in turn for hours; tell every token, chunk and layer that took far longer than its like.

    As `bench run`, but by the clock: past the time no other block starts, and 3 are always made. Every finished
    run is on disk at once; after a kill or a reboot the same command continues, and other bench commands read the
    file at any time. Layers need --timeline.

    \b
    Example:
      moe-madv bench longrun big.gguf --arms stock,cache --budget 48GiB --hours 8 --pause 30 --out night.jsonl
      moe-madv bench longrun demo.gguf --oversubscribe 2.7 --minutes 30 --timeline
      moe-madv bench compare night.jsonl
      moe-madv bench stalls night.jsonl
    """
    from toolkit import results
    from toolkit.bench import longrun as running

    if (hours is None) == (minutes is None):
        raise click.UsageError("say how long: --hours H or --minutes M")
    request = make_request(given, blocks=None)
    spend = hours if hours is not None else (minutes or 0) / 60
    path = running.longrun(request, hours=spend, pause_s=pause, dry_run=dry_run)
    if path is not None:
        summary = running.summarize(results.read([path])[0])
        click.echo(json.dumps(dataclasses.asdict(summary), indent=2) if as_json else _text(summary))
        note(f"next: moe-madv bench report {path} --out report.html")


def _text(summary: Summary) -> str:
    from toolkit.bench.stalls import count, sentence

    lines = [f"{summary.hours:.2f} hours"]
    for case in summary.cases:
        speed = "no run without failure"
        if case.ts_mean is not None:
            sd = "" if case.ts_sd is None else f" ± {case.ts_sd:.2f}"
            speed = f"{case.ts_mean:.2f}{sd} t/s, {case.ts_min:.2f} to {case.ts_max:.2f}"
        failed = f", {case.failed} failed" if case.failed else ""
        lines.append(f"{case.arm} {case.test}: {speed}, {case.runs} runs{failed}")
    return "\n".join([*lines, *map(sentence, summary.stalls), count(summary.stalls)])


@click.command("stalls")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--factor", type=click.FloatRange(min=1, min_open=True), help="So many times the median.  [default: 5]")
@click.option("--least", type=click.FloatRange(min=0), metavar="MS", help="And so much beyond it.  [default: 50]")
@click.option("--json", "as_json", is_flag=True, help="Print the stalls as JSON.")
def stalls(files: tuple[Path, ...], factor: float | None, least: float | None, as_json: bool) -> None:
    """Name every token, chunk and layer that took many times its median, with the cause and its evidence.

    The cause is storage, memory pressure, software wait, compute or unknown: what held at least half of the time
    beyond the median. Nothing is left out of other figures for it.

    \b
    Example:
      moe-madv bench stalls night.jsonl
      moe-madv bench stalls monday.jsonl tuesday.jsonl --factor 3 --least 20 --json
    """
    from toolkit import results
    from toolkit.bench import stalls as finding
    from toolkit.bench.stalls import count, sentence

    limits = {
        "factor": finding.FACTOR if factor is None else factor,
        "least_ms": finding.LEAST_MS if least is None else least,
    }
    found = [(run.path, stall) for run in results.read(files) for stall in finding.find(run.samples, **limits)]
    if as_json:
        rows = [{"file": str(path), **dataclasses.asdict(stall)} for path, stall in found]
        click.echo(json.dumps({"stalls": rows}, indent=2))
    else:
        lines = [(f"{path}: " if len(files) > 1 else "") + sentence(stall) for path, stall in found]
        click.echo("\n".join([*lines, count([stall for _, stall in found])]))
