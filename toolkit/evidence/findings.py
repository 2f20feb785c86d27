"""What a comparison found: plain data, computed in `compare` and shown by every form of output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.bench.stalls import Stall, find
from toolkit.evidence.observed import Observed
from toolkit.results import Row, RunData, facts
from toolkit.stats import BlocksNeeded, Drift, Verdict, mean


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample row and the run it belongs to."""

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

    @property
    def as_planned(self) -> bool:
        """Whether the cache was in the planned state; the first warm run after a drop is not."""
        return self.cold == self.run.header["plan"].get("cold", self.cold)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One arm in one test; means over its samples, None where no sample has the value."""

    arm: str
    test: str
    servers: tuple[str, ...]  # HOST:PORT of the RPC servers that hold its layers; none: it is local
    injected_slowdown_percent: float | None  # its spans were made longer on purpose
    ts: tuple[float, ...]  # throughput of each sample in run order, t/s
    ts_mean: float | None
    ts_sd: float | None  # n - 1
    ts_ci95: tuple[float, float] | None  # t interval of the mean over blocks
    outliers: tuple[int, ...]  # indices into ts; flagged, never dropped
    ts_apart: tuple[float, ...]  # samples of another cache state than planned, in no mean
    n_failed: int
    p50_ms: float | None
    p95_ms: float | None
    mib_per_token: float | None
    mib_per_token_samples: tuple[float, ...]
    read_amplification: float | None
    major_faults_per_token: float | None
    io_wait_ms_per_token: float | None  # in which the thread that runs the graph was blocked
    io_wait_why: str | None  # why that is not known
    wire_bytes_per_token: float | None  # sent to and received from the servers; None for a local arm
    limit_fraction: float | None  # the roofline's time per token over the measured one
    observed: Observed | None  # what the machine did meanwhile; None when it was not watched


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least time that a token of one test can take on this machine, whatever the arm."""

    test: str
    disk_mib_s: float
    compute_ms: float | None  # per token, measured with the model in memory
    must_read_mib: float  # per token: what the best arm read, or the distinct bytes needed if those are fewer

    @property
    def read_ms(self) -> float:
        return 1000 * self.must_read_mib / self.disk_mib_s

    @property
    def limit_ms(self) -> float | None:
        """Reads and compute overlap at best; unknown without the compute time."""
        return None if self.compute_ms is None else max(self.compute_ms, self.read_ms)


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Drift of one test over the run order, every arm at a level of its own."""

    test: str
    drift: Drift


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
    greedy_equal: bool | None  # whether the check's own continuations of the forced tokens are the baseline's
    baseline_mib_per_token: float | None
    candidate_mib_per_token: float | None
    candidate_read_amplification: float | None
    candidate_limit_fraction: float | None
    baseline_io_wait_ms_per_token: float | None
    candidate_io_wait_ms_per_token: float | None
    io_wait_ratio: float | None  # candidate over baseline
    baseline_servers: tuple[str, ...]  # of RPC; none: the arm is local
    candidate_servers: tuple[str, ...]
    baseline_wire_bytes_per_token: float | None
    candidate_wire_bytes_per_token: float | None
    method: str
    drift_per_run: float | None  # only when significant
    output_difference: str | None  # what the check said
    void: str | None  # why the candidate is not a measurement of itself
    same_build: bool  # A/A: both names stand for the same wheel and environment
    injected_ratio: float | None  # what slowdowns injected on purpose make of the ratio by themselves
    unpaired: tuple[int, int] | None  # values of baseline and candidate when no block holds both
    blocks_needed: BlocksNeeded | None  # only when an effect was asked for
    detectable_effect: float | None  # that blocks of this number and spread find with 80 % power, as a fraction


@dataclass(frozen=True, kw_only=True)
class Findings:
    runs: tuple[RunData, ...]
    baseline: str
    effect: float | None  # that blocks_needed is for
    summaries: tuple[Summary, ...]
    comparisons: tuple[Comparison, ...]
    rooflines: tuple[Roofline, ...]
    trends: tuple[Trend, ...]
    stalls: tuple[Stall, ...] | None  # None when no row holds the times of its tokens
    warnings: tuple[str, ...]


def samples(runs: Sequence[RunData], arm: str, test: str) -> list[Sample]:
    """All samples of one arm and test, failed ones too, in the order of the runs."""
    return [Sample(run=r, row=s) for r in runs for s in r.samples if (s["arm"], s["test"]) == (arm, test)]


def average(rows: Sequence[Sample], name: str) -> float | None:
    """Mean of a field over the samples that have it; None when none has."""
    values = [s.row[name] for s in rows if s.row.get(name) is not None]
    return mean(values) if values else None


def greedy_equal(runs: Sequence[RunData], a: str, b: str) -> bool | None:
    """Whether two arms go on alike from the forced tokens, by checks of both against the plan's first arm.

    None when one was not checked so, and when neither went on as the first arm: then they may be alike.
    """
    said = {arm: [c["greedy_equal"] for c in _checks(runs, arm) if c.get("greedy_equal") is not None] for arm in (a, b)}
    if not said[a] or not said[b]:
        return None
    as_first = all(said[a]), all(said[b])
    return all(as_first) if any(as_first) else None


def _checks(runs: Sequence[RunData], arm: str) -> list[Row]:
    return [check for run in runs for check in run.checks if check["arm"] == arm]


def stalls_of(runs: Sequence[RunData]) -> tuple[Stall, ...] | None:
    """All stalls of the runs; None when no row holds the times of its tokens."""
    if not any(row.get("token_ms") for run in runs for row in run.samples):
        return None
    return tuple(stall for run in runs for stall in find(run.samples))
