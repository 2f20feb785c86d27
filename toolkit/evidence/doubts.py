"""What a reader should know before believing rows: one sentence each."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit import stats
from toolkit.evidence.findings import Sample, Trend
from toolkit.results import RunData, facts, finished

# The kernel rounds a memory limit down to whole pages; more than this is another budget.
_BUDGET_TOLERANCE = 0.01
# Long reads may beat the measured random ones by some; far above it a count or the measurement is wrong.
_BANDWIDTH_TOLERANCE = 1.5

_POWER = {"governor": "the CPU governor", "profile": "the firmware's power profile", "on_battery": "being on battery"}


def of_run(run: RunData) -> list[str]:
    """What is missing in a file, and what its checks said."""
    found = []
    if run.unfinished:
        found.append(f"{run.path.name} ends in an unfinished row (a killed run); it is left out")
    plan = run.header["plan"]
    in_order = sum(len(block) for block in plan.get("order", ()))
    planned = in_order or plan.get("blocks", 0) * len(plan.get("arms", ()))
    if (done := len(finished(run))) < planned:
        found.append(f"{run.path.name} is incomplete: {done} of {planned} planned runs are done")
    for check in run.checks:
        if check.get("experts_match") is False:
            found.append(f"{check['arm']}: the model did not choose the experts it was made to choose")
    return found + list(run.header.get("warnings", ()))


def of_runs(runs: Sequence[RunData]) -> list[str]:
    """Another program's files tell a model by its name only."""
    names = list(dict.fromkeys(str(run.header["model"].get("filename", "-")) for run in runs))
    if len(names) > 1 and any(run.header.get("source") for run in runs):
        return [f"the files name different models: {', '.join(names)}"]
    return []


def planned_state(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample], list[str]]:
    """Samples with the planned cache state, those apart from them, and notes on both.

    The first warm run after the cache was dropped is a quantity of its own; pooled it pulls the mean down.
    When no sample is as planned, all are kept.
    """
    words = {True: "cold", False: "warm", None: "of unknown cache state"}
    kept = [s for s in samples if s.as_planned]
    if not kept and samples:
        state = words[samples[0].cold]
        note = f"{samples[0].row['arm']} {samples[0].row['test']}: every run was {state}, not as planned"
        return list(samples), [], [note]
    apart = [s for s in samples if not s.as_planned]
    notes = [f"{s.label} was {words[s.cold]}: {s.row['avg_ts']:.3g} t/s, shown apart" for s in apart]
    return kept, apart, notes


def of_failed(samples: Sequence[Sample]) -> list[str]:
    return [f"{s.label} failed: {s.row.get('reason') or 'no reason given'}" for s in samples]


def of_samples(samples: Sequence[Sample]) -> list[str]:
    """Outliers, refused hints, missed budgets and impossible reads of one arm and test."""
    found = []
    for i in stats.outliers([s.row["avg_ts"] for s in samples]):
        found.append(f"{samples[i].label} is an outlier: {samples[i].row['avg_ts']:.3g} t/s, kept")
    refused = sum((s.row.get("hints") or {}).get("errors", 0) for s in samples)
    if refused:
        found.append(f"{samples[0].row['arm']} {samples[0].row['test']}: {refused} hints were refused by the system")
    for s in samples:
        wanted, got = facts(s.run, s.row).get("budget_bytes"), s.row.get("effective_budget_bytes")
        if wanted and got is None:
            found.append(f"{s.label}: no memory limit was in force, the budget was {wanted / 2**30:.2f} GiB")
        elif wanted and got and abs(got - wanted) > _BUDGET_TOLERANCE * wanted:
            found.append(f"{s.row['arm']}: the memory budget was {got / 2**30:.2f} GiB, not {wanted / 2**30:.2f} GiB")
        before, after = s.row.get("power_before") or {}, s.row.get("power_after") or {}
        for name, words in _POWER.items():
            if before.get(name) != after.get(name):
                found.append(f"{s.label}: {words} changed from {before.get(name)} to {after.get(name)} meanwhile")
        disk, mib = s.row.get("disk_mib_s"), s.row.get("mib_per_token")
        if disk and mib and mib * s.row["avg_ts"] > _BANDWIDTH_TOLERANCE * disk:
            found.append(f"{s.row['arm']} {s.row['test']}: read faster than the measured disk, measure it again")
    return found


def of_trend(trend: Trend) -> list[str]:
    if not trend.drift.significant:
        return []
    low, high = (100 * x for x in trend.drift.ci95)
    return [
        f"{trend.test}: drift of {100 * trend.drift.slope:+.2g} % per run over the order "
        f"(95 % interval {low:+.2g} to {high:+.2g} %); let the machine rest between runs"
    ]
