"""From rows to findings: every candidate arm against the baseline, for every test.

Conclusions come from time alone; bytes, faults and amplification stand beside them as explanation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit import stats
from toolkit.errors import ResultsError
from toolkit.results import Row, RunData, facts, finished, require_same_facts
from toolkit.stats import Verdict

# The kernel rounds a memory limit down to whole pages; more than this is another budget.
_BUDGET_TOLERANCE = 0.01
# Long reads may beat the measured random ones by some; far above it a count or the measurement is wrong.
_BANDWIDTH_TOLERANCE = 1.5


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One arm in one test; means over its samples, None where no sample has the value."""

    arm: str
    test: str
    ts: tuple[float, ...]  # throughput of each sample in run order, t/s
    ts_mean: float | None
    ts_sd: float | None  # n - 1
    ts_ci95: tuple[float, float] | None  # t interval of the mean over blocks
    n_failed: int
    p50_ms: float | None
    p95_ms: float | None
    mib_per_token: float | None
    mib_per_token_samples: tuple[float, ...]
    read_amplification: float | None
    major_faults_per_token: float | None
    limit_fraction: float | None  # max(compute, read) time per token over the measured one


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One candidate against the baseline in one test; field names are those of `compare --json`."""

    test: str
    baseline: str
    candidate: str
    ratio: float | None  # candidate over baseline, of mean throughputs
    ci95: tuple[float, float] | None
    n_blocks: int  # blocks in which both arms have a sample
    verdict: Verdict
    outputs_equal: bool | None
    baseline_mib_per_token: float | None
    candidate_mib_per_token: float | None
    candidate_read_amplification: float | None
    candidate_limit_fraction: float | None
    method: str
    drift_per_run: float | None  # only when significant
    output_difference: str | None  # what the check said
    void: str | None  # why the candidate is not a measurement of itself


@dataclass(frozen=True, kw_only=True)
class Findings:
    runs: tuple[RunData, ...]
    baseline: str
    summaries: tuple[Summary, ...]
    comparisons: tuple[Comparison, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Sample:
    run: RunData
    row: Row

    @property
    def block(self) -> tuple[str, int]:
        return (self.run.run_id, self.row["block"])

    @property
    def label(self) -> str:
        return f"{self.run.path.name}: {self.row['arm']} {self.row['test']} run {self.row['position']}"

    @property
    def cold(self) -> bool | None:
        return facts(self.run, self.row).get("cold")


def compare(runs: Sequence[RunData], baseline: str | None = None) -> Findings:
    """Compare every arm with `baseline` (default: the first arm of the plan); several runs are pooled.

    Raises ResultsError when rows to be compared differ in a checked fact, when a pooled arm is not the
    same build in all runs, or when there is nothing to compare.
    """
    _require_poolable(runs)
    arms = _ordered([*_planned(runs, "arms"), *(row["arm"] for run in runs for row in run.samples)])
    tests = _ordered([*_planned(runs, "tests"), *(row["test"] for run in runs for row in run.samples)])
    baseline = baseline or (arms[0] if arms else "")
    if baseline not in arms:
        raise ResultsError(f"no arm is called {baseline!r}", where=_places(runs), hint=f"one of: {', '.join(arms)}")
    arms = _ordered([baseline, *arms])
    if len(arms) < 2 or not any(run.samples for run in runs):
        raise ResultsError("nothing to compare: two arms with samples are needed", where=_places(runs))

    warnings = [w for run in runs for w in _run_warnings(run)]
    summaries: list[Summary] = []
    comparisons: list[Comparison] = []
    for test in tests:
        samples: dict[str, list[_Sample]] = {}
        failed: dict[str, list[_Sample]] = {}
        for arm in arms:
            rows = [_Sample(run=r, row=s) for r in runs for s in r.samples if (s["arm"], s["test"]) == (arm, test)]
            failed[arm] = [s for s in rows if s.row["status"] == "failed"]
            samples[arm], notes = _planned_state([s for s in rows if s.row["status"] == "ok"])
            warnings += [f"{s.label} failed: {s.row.get('reason') or 'no reason given'}" for s in failed[arm]]
            warnings += notes
        for arm in arms:
            require_same_facts([(s.label, facts(s.run, s.row)) for s in [*samples[baseline], *samples[arm]]])
        trend = _trend([s for arm in arms for s in samples[arm]])
        if trend is not None and trend.significant:
            low, high = (100 * x for x in trend.ci95)
            warnings.append(
                f"{test}: drift of {100 * trend.slope:+.2g} % per run over the order "
                f"(95 % interval {low:+.2g} to {high:+.2g} %); let the machine rest between runs"
            )
        by_arm = {arm: _summary(arm, test, samples[arm], len(failed[arm])) for arm in arms}
        summaries += by_arm.values()
        warnings += [w for arm in arms for w in _sample_warnings(samples[arm])]
        if by_arm[baseline].mib_per_token == 0:
            warnings.append(f"{test}: nothing to gain, {baseline} read 0 bytes (the model is in memory)")
        comparisons += [
            _comparison(
                by_arm[baseline], by_arm[arm], samples[baseline], samples[arm], trend, [*failed[baseline], *failed[arm]]
            )
            for arm in arms[1:]
        ]
    return Findings(
        runs=tuple(runs),
        baseline=baseline,
        summaries=tuple(summaries),
        comparisons=tuple(comparisons),
        warnings=tuple(_ordered(warnings)),
    )


def tokens(test: str) -> int:
    """Tokens timed by a test of llama-bench's naming: 48 for `tg48 @ d4096`."""
    match = re.match(r"(?:pp|tg)(\d+)", test)
    if match is None or int(match[1]) == 0:
        raise ResultsError(f"not a test name: {test!r}", hint="names are like pp64, tg48 or tg48 @ d4096")
    return int(match[1])


def _require_poolable(runs: Sequence[RunData]) -> None:
    paths: dict[str, Path] = {}
    arms: dict[str, tuple[Path, Row]] = {}
    for run in runs:
        if run.run_id in paths:
            raise ResultsError(f"run {run.run_id} is given twice", where=f"{paths[run.run_id]} and {run.path}")
        paths[run.run_id] = run.path
        for name, arm in run.header["arms"].items():
            build = {key: arm.get(key) for key in ("wheel_sha256", "mode", "env")}
            path, first = arms.setdefault(name, (run.path, build))
            for key, value in build.items():
                if value != first[key]:
                    raise ResultsError(
                        f"arm {name} is not the same in both runs: {key} {first[key]} and {value}",
                        where=f"{path} and {run.path}",
                        hint="compare the files one by one",
                    )


def _run_warnings(run: RunData) -> list[str]:
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
    return found


def _planned_state(samples: list[_Sample]) -> tuple[list[_Sample], list[str]]:
    """Samples with the planned cache state, and notes on the others, which are kept only if all are so.

    The first warm run after the cache was dropped is a quantity of its own; pooled it pulls the mean down.
    """
    words = {True: "cold", False: "warm", None: "of unknown cache state"}
    kept = [s for s in samples if s.cold == s.run.header["plan"].get("cold", s.cold)]
    if not kept and samples:
        state = words[samples[0].cold]
        return samples, [f"{samples[0].row['arm']} {samples[0].row['test']}: every run was {state}, not as planned"]
    apart = [s for s in samples if s not in kept]
    return kept, [f"{s.label} was {words[s.cold]}: {s.row['avg_ts']:.3g} t/s, shown apart" for s in apart]


def _sample_warnings(samples: list[_Sample]) -> list[str]:
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
        disk, mib = s.row.get("disk_mib_s"), s.row.get("mib_per_token")
        if disk and mib and mib * s.row["avg_ts"] > _BANDWIDTH_TOLERANCE * disk:
            found.append(f"{s.row['arm']} {s.row['test']}: read faster than the measured disk, measure it again")
    return found


def _trend(samples: list[_Sample]) -> stats.Drift | None:
    if not samples:
        return None
    return stats.drift(
        [s.row["avg_ts"] for s in samples],
        [s.row["position"] for s in samples],
        [(s.run.run_id, s.row["arm"]) for s in samples],
    )


def _blocks(samples: list[_Sample]) -> dict[tuple[str, int], list[_Sample]]:
    blocks: dict[tuple[str, int], list[_Sample]] = {}
    for s in samples:
        blocks.setdefault(s.block, []).append(s)
    return blocks


def _summary(arm: str, test: str, samples: list[_Sample], n_failed: int) -> Summary:
    def average(name: str) -> float | None:
        values = [s.row[name] for s in samples if s.row.get(name) is not None]
        return stats.mean(values) if values else None

    ts = [float(s.row["avg_ts"]) for s in samples]
    block_means = [stats.mean([s.row["avg_ts"] for s in block]) for block in _blocks(samples).values()]
    faults, mib = average("major_faults"), average("mib_per_token")
    compute_ms, disk = average("compute_ms_per_token"), average("disk_mib_s")
    limit = None
    if ts and compute_ms is not None and disk and mib is not None:
        limit = max(compute_ms / 1000, mib / disk) * stats.mean(ts)
    return Summary(
        arm=arm,
        test=test,
        ts=tuple(ts),
        ts_mean=stats.mean(ts) if ts else None,
        ts_sd=stats.sample_sd(ts),
        ts_ci95=stats.mean_interval(block_means),
        n_failed=n_failed,
        p50_ms=average("p50_ms"),
        p95_ms=average("p95_ms"),
        mib_per_token=mib,
        mib_per_token_samples=tuple(s.row["mib_per_token"] for s in samples if s.row.get("mib_per_token") is not None),
        read_amplification=average("read_amplification"),
        major_faults_per_token=None if faults is None else faults / tokens(test),
        limit_fraction=limit,
    )


def _comparison(
    base: Summary,
    cand: Summary,
    base_samples: list[_Sample],
    cand_samples: list[_Sample],
    trend: stats.Drift | None,
    failed: list[_Sample],
) -> Comparison:
    base_blocks, cand_blocks = _blocks(base_samples), _blocks(cand_samples)
    shared = [block for block in base_blocks if block in cand_blocks]

    def column(blocks: dict[tuple[str, int], list[_Sample]], name: str) -> list[list[float]]:
        return [[s.row[name] for s in blocks[block]] for block in shared]

    found = None
    if shared:
        bias = stats.drift_bias(trend, column(base_blocks, "position"), column(cand_blocks, "position"))
        found = stats.paired_ratio(column(base_blocks, "avg_ts"), column(cand_blocks, "avg_ts"), bias=bias)
    void = _void(cand_samples) or _void(base_samples)
    equal, difference = _outputs(base.arm, base_samples, cand.arm, cand_samples, failed)
    return Comparison(
        test=base.test,
        baseline=base.arm,
        candidate=cand.arm,
        ratio=found.ratio if found else None,
        ci95=found.ci95 if found else None,
        n_blocks=len(shared),
        verdict=found.verdict if found and not void and equal is not False else Verdict.UNDECIDED,
        outputs_equal=equal,
        baseline_mib_per_token=base.mib_per_token,
        candidate_mib_per_token=cand.mib_per_token,
        candidate_read_amplification=cand.read_amplification,
        candidate_limit_fraction=cand.limit_fraction,
        method=found.method if found else "none (no block holds both arms)",
        drift_per_run=trend.slope if trend is not None and trend.significant else None,
        output_difference=difference,
        void=void,
    )


def _void(samples: list[_Sample]) -> str | None:
    counters = [s.row["hints"] for s in samples if s.row.get("hints")]
    errors = sum(c.get("errors", 0) for c in counters)
    if errors and errors >= sum(c.get("calls", 0) for c in counters):
        return f"all {errors} hints of {samples[0].row['arm']} failed"
    if sum(c.get("unmapped", 0) for c in counters) and not sum(c.get("slices", 0) for c in counters):
        return f"no expert of {samples[0].row['arm']} was read from a mapping"
    return None


def _outputs(
    base: str, base_samples: list[_Sample], cand: str, cand_samples: list[_Sample], failed: list[_Sample]
) -> tuple[bool | None, str | None]:
    """True when every logits hash of both arms is the same and no check says otherwise; None when unknown."""
    runs = {s.run.run_id: s.run for s in [*base_samples, *cand_samples]}.values()
    for check in (c for run in runs for c in run.checks if c["arm"] in (base, cand)):
        if check.get("outputs_equal") is False:
            text = check.get("text") or "the check found another output"
            largest = check.get("max_abs_diff")
            return False, text if largest is None else f"{text} (largest difference {largest:.3g})"
    hashes = [s.row.get("logits_sha256") for s in [*base_samples, *cand_samples]]
    # A failed row with a hash has finished its tokens: its logits are what failed, or must be the same.
    known = {h for h in (*hashes, *(s.row.get("logits_sha256") for s in failed)) if h}
    for s in failed:
        if s.row.get("logits_sha256") and "not finite" in (s.row.get("reason") or ""):
            return False, f"{s.label}: {s.row['reason']}"
    if len(known) > 1:
        return False, "the logits of the timed tokens differ"
    return (True, None) if known and all(hashes) and base_samples and cand_samples else (None, None)


def _planned(runs: Sequence[RunData], name: str) -> list[str]:
    return [value for run in runs for value in run.header["plan"].get(name, ())]


def _ordered(values: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _places(runs: Sequence[RunData]) -> str:
    return ", ".join(str(run.path) for run in runs)
