"""From rows to findings: every candidate arm against the baseline, for every test.

Conclusions come from time alone; bytes, faults and amplification stand beside them as explanation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit import stats
from toolkit.console import MIB
from toolkit.errors import ResultsError
from toolkit.evidence import doubts
from toolkit.evidence.findings import (
    Comparison,
    Findings,
    Roofline,
    Sample,
    Summary,
    Trend,
    average,
    greedy_equal,
    samples,
    stalls_of,
)
from toolkit.evidence.observed import observed_in
from toolkit.results import Row, RunData, facts, require_same_facts
from toolkit.stats import Verdict


def compare(runs: Sequence[RunData], baseline: str | None = None, *, effect: float | None = None) -> Findings:
    """Compare every arm with `baseline` (default: the first arm of the plan); several runs are pooled.

    With `effect`, a fraction such as 0.05, each comparison says how many blocks find an effect of that size.
    Raises ResultsError when rows to be compared differ in a checked fact, when a pooled arm is not the
    same build in all runs, or when there is nothing to compare.
    """
    builds = _require_poolable(runs)
    arms = _ordered([*_planned(runs, "arms"), *(row["arm"] for run in runs for row in run.samples)])
    tests = _ordered([*_planned(runs, "tests"), *(row["test"] for run in runs for row in run.samples)])
    baseline = baseline or (arms[0] if arms else "")
    if baseline not in arms:
        raise ResultsError(f"no arm is called {baseline!r}", where=_places(runs), hint=f"one of: {', '.join(arms)}")
    arms = _ordered([baseline, *arms])
    if len(arms) < 2 or not any(run.samples for run in runs):
        raise ResultsError("nothing to compare: two arms with samples are needed", where=_places(runs))

    warnings = [*doubts.of_runs(runs), *(w for run in runs for w in doubts.of_run(run))]
    summaries: list[Summary] = []
    comparisons: list[Comparison] = []
    rooflines: list[Roofline] = []
    trends: list[Trend] = []
    for test in tests:
        kept: dict[str, list[Sample]] = {}
        apart: dict[str, list[Sample]] = {}
        failed: dict[str, list[Sample]] = {}
        for arm in arms:
            rows = samples(runs, arm, test)
            failed[arm] = [s for s in rows if s.row["status"] == "failed"]
            kept[arm], apart[arm], notes = doubts.planned_state([s for s in rows if s.row["status"] == "ok"])
            warnings += [*doubts.of_failed(failed[arm]), *notes]
        for arm in arms:
            require_same_facts([(s.label, facts(s.run, s.row)) for s in [*kept[baseline], *kept[arm]]])
        drift = _drift([s for arm in arms for s in kept[arm]])
        if drift is not None:
            trends.append(Trend(test=test, drift=drift))
            warnings += doubts.of_trend(trends[-1])
        outputs = {
            arm: outputs_of(baseline, kept[baseline], arm, kept[arm], [*failed[baseline], *failed[arm]])
            for arm in arms[1:]
        }
        # the disk here bounds no arm on other machines, and what such an arm reads here is no bound for the others
        local = [arm for arm in arms if not builds.get(arm, {}).get("rpc")]
        usable = [s for arm in local if outputs.get(arm, (True, None))[0] is not False for s in kept[arm]]
        roofline = _roofline(test, usable)
        rooflines += [roofline] if roofline else []
        by_arm = {
            arm: _summary(
                arm,
                test,
                builds.get(arm, {}),
                kept[arm],
                apart[arm],
                len(failed[arm]),
                roofline if arm in local else None,
            )
            for arm in arms
        }
        summaries += by_arm.values()
        warnings += [w for arm in arms for w in doubts.of_samples(kept[arm])]
        if by_arm[baseline].mib_per_token == 0:
            warnings.append(f"{test}: nothing to gain, {baseline} read 0 bytes (the model is in memory)")
        comparisons += [
            _comparison(
                by_arm[baseline],
                by_arm[arm],
                kept[baseline],
                kept[arm],
                drift=drift,
                outputs=outputs[arm],
                greedy_equal=greedy_equal(runs, baseline, arm),
                same_build=_same_build(builds.get(baseline), builds.get(arm)),
                effect=effect,
            )
            for arm in arms[1:]
        ]
    return Findings(
        runs=tuple(runs),
        baseline=baseline,
        effect=effect,
        summaries=tuple(summaries),
        comparisons=tuple(comparisons),
        rooflines=tuple(rooflines),
        trends=tuple(trends),
        stalls=stalls_of(runs),
        warnings=tuple(_ordered(warnings)),
    )


def pools(runs: Sequence[RunData]) -> list[list[RunData]]:
    """Runs that `compare` would pool, together; the first run of each group decides.

    Raises ResultsError when a run is given twice.
    """
    groups: list[list[RunData]] = []
    _require_once(runs)
    for run in runs:
        for group in groups:
            try:
                _require_poolable([*group, run])
                require_same_facts([(str(r.path), facts(r, r.samples[0])) for r in (group[0], run) if r.samples])
            except ResultsError:
                continue
            group.append(run)
            break
        else:
            groups.append([run])
    return groups


def tokens(test: str) -> int:
    """Tokens timed by a test of llama-bench's naming: 48 for `tg48 @ d4096`, 192 for `pp64+tg128`."""
    counts = re.match(r"(?:pp|tg)(\d+)(?:\+tg(\d+))?", test)
    total = sum(int(n) for n in counts.groups(default="0")) if counts else 0
    if total == 0:
        raise ResultsError(f"not a test name: {test!r}", hint="names are like pp64, tg48 or tg48 @ d4096")
    return total


def _require_once(runs: Sequence[RunData]) -> None:
    paths: dict[str, Path] = {}
    for run in runs:
        if run.run_id in paths:
            raise ResultsError(f"run {run.run_id} is given twice", where=f"{paths[run.run_id]} and {run.path}")
        paths[run.run_id] = run.path


# What makes two arms the same thing; a slowdown on purpose is never that of an ordinary arm.
_BUILD = ("wheel_sha256", "mode", "env", "config", "rpc", "injected_slowdown_percent")


def _require_poolable(runs: Sequence[RunData]) -> dict[str, Row]:
    """The build of each arm, the same in all runs."""
    _require_once(runs)
    arms: dict[str, tuple[Path, Row]] = {}
    for run in runs:
        for name, arm in run.header["arms"].items():
            build = {key: arm.get(key) for key in _BUILD}
            path, first = arms.setdefault(name, (run.path, build))
            for key, value in build.items():
                if value != first[key]:
                    raise ResultsError(
                        f"arm {name} is not the same in both runs: {key} {first[key]} and {value}",
                        where=f"{path} and {run.path}",
                        hint="compare the files one by one",
                    )
    return {name: build for name, (_, build) in arms.items()}


def _injected_ratio(base: Summary, cand: Summary) -> float | None:
    slowed = [s.injected_slowdown_percent for s in (base, cand)]
    if not any(slowed):
        return None
    before, after = (1 + (percent or 0) / 100 for percent in slowed)
    return before / after


def _same_build(a: Row | None, b: Row | None) -> bool:
    """Whether two names stand for one thing: the same wheel, or the same llama-bench configuration."""
    return a is not None and a == b and (a["wheel_sha256"] or a["config"]) is not None


def _drift(rows: Sequence[Sample]) -> stats.Drift | None:
    rows = [s for s in rows if s.run.header.get("source") is None]  # another program's rows are in no known order
    if not rows:
        return None
    return stats.drift(
        [s.row["avg_ts"] for s in rows],
        [s.row["position"] for s in rows],
        [(s.run.run_id, s.row["arm"]) for s in rows],
    )


def _blocks(rows: Sequence[Sample]) -> dict[tuple[str, int], list[Sample]]:
    blocks: dict[tuple[str, int], list[Sample]] = {}
    for s in rows:
        blocks.setdefault(s.block, []).append(s)
    return blocks


def _roofline(test: str, rows: Sequence[Sample]) -> Roofline | None:
    disk = average(rows, "disk_mib_s")
    arms = {s.row["arm"] for s in rows}
    reads = [average([s for s in rows if s.row["arm"] == arm], "mib_per_token") for arm in arms]
    needed = [s.row["needed_bytes"] / MIB / tokens(test) for s in rows if s.row.get("needed_bytes") is not None]
    known = [*(r for r in reads if r is not None), *needed]
    if not disk or not known:
        return None
    compute_ms = average(rows, "compute_ms_per_token")
    return Roofline(test=test, disk_mib_s=disk, compute_ms=compute_ms, must_read_mib=min(known))


def _summary(
    arm: str,
    test: str,
    build: Row,
    rows: Sequence[Sample],
    apart: Sequence[Sample],
    n_failed: int,
    roofline: Roofline | None,
) -> Summary:
    ts = [float(s.row["avg_ts"]) for s in rows]
    block_means = [stats.mean([s.row["avg_ts"] for s in block]) for block in _blocks(rows).values()]
    faults, wait = average(rows, "major_faults"), average(rows, "io_wait_s")
    limit_ms = roofline.limit_ms if roofline else None
    return Summary(
        arm=arm,
        test=test,
        servers=tuple(build.get("rpc") or ()),
        injected_slowdown_percent=build.get("injected_slowdown_percent"),
        ts=tuple(ts),
        ts_mean=stats.mean(ts) if ts else None,
        ts_sd=stats.sample_sd(ts),
        ts_ci95=stats.mean_interval(block_means),
        outliers=stats.outliers(ts),
        ts_apart=tuple(float(s.row["avg_ts"]) for s in apart),
        n_failed=n_failed,
        p50_ms=average(rows, "p50_ms"),
        p95_ms=average(rows, "p95_ms"),
        mib_per_token=average(rows, "mib_per_token"),
        mib_per_token_samples=tuple(s.row["mib_per_token"] for s in rows if s.row.get("mib_per_token") is not None),
        # the bytes needed are needed elsewhere
        read_amplification=None if build.get("rpc") else average(rows, "read_amplification"),
        major_faults_per_token=None if faults is None else faults / tokens(test),
        io_wait_ms_per_token=None if wait is None else 1000 * wait / tokens(test),
        io_wait_why=next((s.row["io_wait_why"] for s in rows if wait is None and s.row.get("io_wait_why")), None),
        wire_bytes_per_token=average(rows, "wire_bytes_per_token"),
        limit_fraction=limit_ms / 1000 * stats.mean(ts) if ts and limit_ms is not None else None,
        observed=observed_in([s.row for s in rows]),
    )


def _comparison(
    base: Summary,
    cand: Summary,
    base_rows: Sequence[Sample],
    cand_rows: Sequence[Sample],
    *,
    drift: stats.Drift | None,
    outputs: tuple[bool | None, str | None],
    greedy_equal: bool | None,
    same_build: bool,
    effect: float | None,
) -> Comparison:
    base_blocks, cand_blocks = _blocks(base_rows), _blocks(cand_rows)
    shared = [block for block in base_blocks if block in cand_blocks]

    def column(blocks: Mapping[tuple[str, int], list[Sample]], name: str) -> list[list[float]]:
        return [[s.row[name] for s in blocks[block]] for block in shared]

    found, needed, detectable, unpaired, method = None, None, None, None, "none (no block holds both arms)"
    if shared:
        base_ts, cand_ts = column(base_blocks, "avg_ts"), column(cand_blocks, "avg_ts")
        bias = stats.drift_bias(drift, column(base_blocks, "position"), column(cand_blocks, "position"))
        found = stats.paired_ratio(base_ts, cand_ts, bias=bias)
        needed = None if effect is None else stats.blocks_needed(base_ts, cand_ts, effect)
        detectable = stats.detectable_effect(base_ts, cand_ts)
        method = found.method
    elif base_rows and cand_rows:
        found = stats.unpaired_ratio([s.row["avg_ts"] for s in base_rows], [s.row["avg_ts"] for s in cand_rows])
        unpaired = (len(base_rows), len(cand_rows))
        method = found.method
    void = _void(cand_rows) or _void(base_rows)
    equal, difference = outputs
    return Comparison(
        test=base.test,
        baseline=base.arm,
        candidate=cand.arm,
        ratio=found.ratio if found else None,
        ci95=found.ci95 if found else None,
        n_blocks=len(shared),
        verdict=found.verdict if found and not void and equal is not False else Verdict.UNDECIDED,
        outputs_equal=equal,
        greedy_equal=greedy_equal,
        baseline_mib_per_token=base.mib_per_token,
        candidate_mib_per_token=cand.mib_per_token,
        candidate_read_amplification=cand.read_amplification,
        candidate_limit_fraction=cand.limit_fraction,
        baseline_io_wait_ms_per_token=base.io_wait_ms_per_token,
        candidate_io_wait_ms_per_token=cand.io_wait_ms_per_token,
        io_wait_ratio=_over(cand.io_wait_ms_per_token, base.io_wait_ms_per_token),
        baseline_servers=base.servers,
        candidate_servers=cand.servers,
        baseline_wire_bytes_per_token=base.wire_bytes_per_token,
        candidate_wire_bytes_per_token=cand.wire_bytes_per_token,
        method=method,
        drift_per_run=drift.slope if drift is not None and drift.significant else None,
        output_difference=difference,
        void=void,
        same_build=same_build,
        injected_ratio=_injected_ratio(base, cand),
        unpaired=unpaired,
        blocks_needed=needed,
        detectable_effect=detectable,
    )


def _over(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _void(rows: Sequence[Sample]) -> str | None:
    counters = [s.row["hints"] for s in rows if s.row.get("hints")]
    errors = sum(c.get("errors", 0) for c in counters)
    if errors and errors >= sum(c.get("calls", 0) for c in counters):
        return f"all {errors} hints of {rows[0].row['arm']} failed"
    if sum(c.get("unmapped", 0) for c in counters) and not sum(c.get("slices", 0) for c in counters):
        return f"no expert of {rows[0].row['arm']} was read from a mapping"
    return None


def outputs_of(
    base: str, base_rows: Sequence[Sample], cand: str, cand_rows: Sequence[Sample], failed: Sequence[Sample]
) -> tuple[bool | None, str | None]:
    """True when every logits hash of both arms is the same and no check says otherwise; None when unknown."""
    runs = {s.run.run_id: s.run for s in [*base_rows, *cand_rows]}.values()
    for check in (c for run in runs for c in run.checks if c["arm"] in (base, cand)):
        if check.get("outputs_equal") is False:
            text = check.get("text") or "the check found another output"
            largest = check.get("max_abs_diff")
            return False, text if largest is None else f"{text} (largest difference {largest:.3g})"
    hashes = [s.row.get("logits_sha256") for s in [*base_rows, *cand_rows]]
    # A failed row with a hash has finished its tokens: its logits are what failed, or must be the same.
    known = {h for h in (*hashes, *(s.row.get("logits_sha256") for s in failed)) if h}
    for s in failed:
        if s.row.get("logits_sha256") and "not finite" in (s.row.get("reason") or ""):
            return False, f"{s.label}: {s.row['reason']}"
    if len(known) > 1:
        return False, "the logits of the timed tokens differ"
    return (True, None) if known and all(hashes) and base_rows and cand_rows else (None, None)


def _planned(runs: Sequence[RunData], name: str) -> list[str]:
    return [value for run in runs for value in run.header["plan"].get(name, ())]


def _ordered(values: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _places(runs: Sequence[RunData]) -> str:
    return ", ".join(str(run.path) for run in runs)
