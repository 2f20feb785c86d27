"""A run by the clock: block after block for hours, stalls told as they come, and what has come together so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit import results, stats
from toolkit.bench import stalls
from toolkit.bench.request import Request, measure
from toolkit.bench.stalls import Stall
from toolkit.console import note


@dataclass(frozen=True, kw_only=True)
class Case:
    """One arm in one test, over all runs so far."""

    arm: str
    test: str
    runs: int
    failed: int
    ts_mean: float | None  # of the runs that did not fail, t/s
    ts_sd: float | None  # n - 1
    ts_min: float | None
    ts_max: float | None


@dataclass(frozen=True, kw_only=True)
class Summary:
    hours: float  # spent, pauses included, over all calls of the command
    cases: tuple[Case, ...]
    stalls: tuple[Stall, ...]


def longrun(request: Request, *, hours: float, pause_s: float, dry_run: bool) -> Path | None:
    """Measure block after block until the hours are used up, counting those of earlier calls.

    Returns the results file, None after a dry run; raises what `request.measure` raises.
    """
    conditions = dataclasses.replace(request.conditions, blocks=None, minutes=60 * hours, pause_s=pause_s)
    return measure(dataclasses.replace(request, conditions=conditions), dry_run=dry_run, on_run=tell_stalls)


def tell_stalls(samples: Sequence[results.Row], rows: Sequence[results.Row]) -> None:
    """Note the stalls of the run that has just ended, beside the earlier ones of its arm."""
    (arm,), (position,) = {row["arm"] for row in rows}, {row["position"] for row in rows}
    for stall in stalls.find(row for row in samples if row["arm"] == arm):
        if stall.position == position:
            note(f"stall  {stalls.sentence(stall)}")


def summarize(run: results.RunData) -> Summary:
    """Of a file at any time, also while it grows."""
    cases = []
    for arm, test in dict.fromkeys((row["arm"], row["test"]) for row in run.samples):
        rows = [row for row in run.samples if (row["arm"], row["test"]) == (arm, test)]
        ts = [float(row["avg_ts"]) for row in rows if row["status"] == "ok"]
        cases.append(
            Case(
                arm=arm,
                test=test,
                runs=len(rows),
                failed=len(rows) - len(ts),
                ts_mean=stats.mean(ts) if ts else None,
                ts_sd=stats.sample_sd(ts),
                ts_min=min(ts, default=None),
                ts_max=max(ts, default=None),
            )
        )
    spent_s = max((row.get("elapsed_s") or 0.0 for row in run.samples), default=0.0)
    return Summary(hours=spent_s / 3600, cases=tuple(cases), stalls=tuple(stalls.find(run.samples)))
