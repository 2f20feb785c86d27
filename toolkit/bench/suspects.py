"""Who slows the disk down: timed stretches of reading in, one verdict per suspect out; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Literal

from toolkit import stats
from toolkit.console import GIB, MIB

# A suspect matters when it costs or gives this share of the throughput.
SHARE = 0.10
# A place or a moment is slow below this share of the median.
_SLOW = 0.5
# A single read that takes this many times the typical one, and this long, is a pause.
_PAUSE_TIMES, _PAUSE_S = 20, 0.25
_OTHERS_SHARE = 0.05
_FROM_DISK = 0.9
# Less than this is within the noise of sensors and of a disk that wakes up.
_WARMED_C = 5.0
_LEAST_STRETCHES = 4


class Verdict(str, Enum):
    CONFIRMED = "confirmed"
    NOT_CONFIRMED = "not confirmed"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """One timed stretch of sequential reading."""

    part: Literal["cached-or-not", "devices", "trace"]  # the comparison it belongs to
    block: int  # number of the pair, or of the pass (1, 2)
    file: int  # 0: the file in question, 1: the other one
    direct: bool  # past the page cache
    start_s: float  # since the beginning
    offset: int
    nbytes: int
    seconds: float
    slowest_read_s: float
    read_block: int  # bytes asked for at a time
    from_disk: float | None  # share that the disk delivered; the rest was cached or a hole
    others_bytes: int | None  # what others read from the device meanwhile
    disk_c: float | None  # temperature of the disk, at the end
    machine_c: float | None  # hottest zone of the machine

    @property
    def mib_s(self) -> float:
        return self.nbytes / MIB / self.seconds


@dataclass(frozen=True, kw_only=True)
class Judgement:
    suspect: str
    claim: str  # what would be true if confirmed
    verdict: Verdict
    evidence: str


def judge(stretches: Sequence[Stretch], *, no_other: str | None = None) -> list[Judgement]:
    """A verdict on every suspect from what was measured so far; `no_other` says why devices were not compared."""
    slowing = _slowing(stretches)
    return [
        _cached_path(stretches),
        _second_reading(stretches),
        _slow_place(stretches),
        _pauses(stretches),
        slowing,
        _heat(stretches, slowing.verdict),
        _other_readers(stretches),
        _other_device(stretches, no_other),
    ]


def _cached_path(stretches: Sequence[Stretch]) -> Judgement:
    claim = "reading through the page cache is slower than past it"
    rows = [s for s in stretches if s.part == "cached-or-not"]
    cached = {s.block: s.mib_s for s in rows if not s.direct and (s.from_disk is None or s.from_disk >= _FROM_DISK)}
    direct = {s.block: s.mib_s for s in rows if s.direct}
    void = sum(not s.direct for s in rows) - len(cached)
    why = f"{void} cached readings came from memory" if void else "too few pairs were read"
    return _compared("cached-path", claim, direct, cached, ("past the cache", "through it"), why)


def _other_device(stretches: Sequence[Stretch], no_other: str | None) -> Judgement:
    claim = "the file's device is slower than the other file's"
    if no_other is not None:
        return Judgement(suspect="other-device", claim=claim, verdict=Verdict.CANNOT_TELL, evidence=no_other)
    rows = [s for s in stretches if s.part == "devices"]
    here = {s.block: s.mib_s for s in rows if s.file == 0}
    there = {s.block: s.mib_s for s in rows if s.file == 1}
    return _compared("other-device", claim, there, here, ("the other", "this one"), "too few pairs were read")


def _compared(
    suspect: str,
    claim: str,
    baseline: dict[int, float],
    candidate: dict[int, float],
    names: tuple[str, str],
    why: str,
) -> Judgement:
    """Confirmed when the candidate is slower by more than SHARE, by the interval of the paired ratio."""
    blocks = sorted(baseline.keys() & candidate.keys())
    verdict, evidence = Verdict.CANNOT_TELL, why
    if len(blocks) >= stats.MIN_VERDICT_BLOCKS:
        b, c = [baseline[i] for i in blocks], [candidate[i] for i in blocks]
        ratio = stats.paired_ratio([[x] for x in b], [[x] for x in c])
        assert ratio.ci95 is not None  # there are several blocks
        verdict = _decided(slower_by=(1 - ratio.ci95[1], 1 - ratio.ci95[0]))
        evidence = (
            f"{names[0]} {stats.mean(b):.0f} MiB/s, {names[1]} {stats.mean(c):.0f} MiB/s: "
            f"ratio {ratio.ratio:.2f} [{ratio.ci95[0]:.2f}, {ratio.ci95[1]:.2f}] over {len(blocks)} pairs"
        )
    return Judgement(suspect=suspect, claim=claim, verdict=verdict, evidence=evidence)


def _decided(slower_by: tuple[float, float]) -> Verdict:
    if slower_by[0] > SHARE:
        return Verdict.CONFIRMED
    return Verdict.NOT_CONFIRMED if slower_by[1] <= SHARE else Verdict.CANNOT_TELL


# --- The file read twice


def _passes(stretches: Sequence[Stretch]) -> list[tuple[Stretch, Stretch]]:
    """First and second reading of the same places, in file order; holes and cached places are left out."""
    trace = [s for s in stretches if s.part == "trace" and (s.from_disk is None or s.from_disk >= _FROM_DISK)]
    second = {s.offset: s for s in trace if s.block == 2}
    # A place that the deadline cut short is compared as it is: throughput does not depend on its length.
    return [(s, second[s.offset]) for s in trace if s.block == 1 and s.offset in second]


def _too_few(suspect: str, claim: str, found: Sequence[object]) -> Judgement:
    evidence = f"{len(found)} places were read twice from the disk, {_LEAST_STRETCHES} are needed: give it more minutes"
    return Judgement(suspect=suspect, claim=claim, verdict=Verdict.CANNOT_TELL, evidence=evidence)


def _second_reading(stretches: Sequence[Stretch]) -> Judgement:
    claim = "a cache below this system serves a second reading, so an evicted file is not cold"
    both = _passes(stretches)
    if len(both) < _LEAST_STRETCHES:
        return _too_few("second-reading", claim, both)
    ratio = stats.paired_ratio([[a.mib_s] for a, _ in both], [[b.mib_s] for _, b in both])
    assert ratio.ci95 is not None  # there are several places
    if ratio.ci95[0] > 1 + SHARE:
        verdict = Verdict.CONFIRMED
    else:
        verdict = Verdict.NOT_CONFIRMED if ratio.ci95[1] <= 1 + SHARE else Verdict.CANNOT_TELL
    first, second = stats.mean([a.mib_s for a, _ in both]), stats.mean([b.mib_s for _, b in both])
    evidence = (
        f"{sum(a.nbytes for a, _ in both) / GIB:.2f} GiB twice: {first:.0f} and {second:.0f} MiB/s, "
        f"ratio {ratio.ratio:.2f} [{ratio.ci95[0]:.2f}, {ratio.ci95[1]:.2f}]"
    )
    return Judgement(suspect="second-reading", claim=claim, verdict=verdict, evidence=evidence)


def _slow_twice(both: Sequence[tuple[Stretch, Stretch]]) -> list[tuple[Stretch, Stretch]]:
    middle = median(s.mib_s for pair in both for s in pair) if both else 0.0
    return [pair for pair in both if max(s.mib_s for s in pair) < _SLOW * middle]


def _slow_place(stretches: Sequence[Stretch]) -> Judgement:
    claim = "some places of the file are slow every time"
    both = _passes(stretches)
    if len(both) < _LEAST_STRETCHES:
        return _too_few("slow-place", claim, both)
    middle, slow = median(s.mib_s for pair in both for s in pair), _slow_twice(both)
    slowest = min(max(a.mib_s, b.mib_s) for a, b in both)
    evidence = f"{len(both)} places, median {middle:.0f} MiB/s, slowest {slowest:.0f}"
    if slow:
        named = [f"{a.mib_s:.0f} and {b.mib_s:.0f} MiB/s at {a.offset / GIB:.2f} GiB" for a, b in slow[:3]]
        evidence = f"{', '.join(named)}; median {middle:.0f} MiB/s; {len(slow)} of {len(both)} places"
    verdict = Verdict.CONFIRMED if slow else Verdict.NOT_CONFIRMED
    return Judgement(suspect="slow-place", claim=claim, verdict=verdict, evidence=evidence)


def _pauses(stretches: Sequence[Stretch]) -> Judgement:
    """Long reads, and places that are slow in one pass only; places that are slow twice are another suspect."""
    claim = "the disk stops now and then"
    both = _passes(stretches)
    places = {a.offset for a, _ in _slow_twice(both)}
    read = [s for s in stretches if s.file == 0 and s.direct and not (s.part == "trace" and s.offset in places)]
    if len(read) < _LEAST_STRETCHES:
        evidence = f"{len(read)} stretches were read past the cache, {_LEAST_STRETCHES} are needed"
        return Judgement(suspect="pauses", claim=claim, verdict=Verdict.CANNOT_TELL, evidence=evidence)
    middle = median(s.mib_s for s in read)
    typical = median(s.read_block / MIB / s.mib_s for s in read)
    long = [s for s in read if s.slowest_read_s >= max(_PAUSE_S, _PAUSE_TIMES * typical)]
    once = [s for pair in both if pair[0].offset not in places for s in pair if s.mib_s < _SLOW * middle]
    worst = max(read, key=lambda s: s.slowest_read_s)
    evidence = (
        f"longest read {worst.slowest_read_s * 1000:.0f} ms, typical {typical * 1000:.0f} ms, in {len(read)} stretches"
    )
    if long:
        evidence += f"; {len(long)} stretches with a pause, the longest at {worst.offset / GIB:.2f} GiB"
    if once:
        slow = min(once, key=lambda s: s.mib_s)
        evidence += f"; {len(once)} places slow in one pass only, down to {slow.mib_s:.0f} MiB/s of {middle:.0f}"
    verdict = Verdict.CONFIRMED if long or once else Verdict.NOT_CONFIRMED
    return Judgement(suspect="pauses", claim=claim, verdict=verdict, evidence=evidence)


def _slowing(stretches: Sequence[Stretch]) -> Judgement:
    """Time against place: every place has a level of its own, so only its change between the passes counts."""
    claim = "the disk gets slower the longer it reads"
    rows = [s for pair in _passes(stretches) for s in pair]
    trend = stats.drift([s.mib_s for s in rows], [s.start_s for s in rows], [s.offset for s in rows]) if rows else None
    if trend is None or len(rows) < 2 * _LEAST_STRETCHES:
        return _too_few("slowing", claim, _passes(stretches))
    span = max(s.start_s for s in rows) - min(s.start_s for s in rows)
    low, change, high = (math.expm1(x * span) for x in (trend.ci95[0], trend.slope, trend.ci95[1]))
    evidence = f"{change:+.0%} [{low:+.0%}, {high:+.0%}] over {span:.0f} s of reading"
    return Judgement(suspect="slowing", claim=claim, verdict=_decided((-high, -low)), evidence=evidence)


# --- Surroundings


def _heat(stretches: Sequence[Stretch], slowing: Verdict) -> Judgement:
    claim = "heat slows the disk down"

    def found(verdict: Verdict, evidence: str) -> Judgement:
        return Judgement(suspect="heat", claim=claim, verdict=verdict, evidence=evidence)

    trace = [s for s in stretches if s.part == "trace"]
    own = [(s.disk_c, s) for s in trace if s.disk_c is not None]
    rows = own or [(s.machine_c, s) for s in trace if s.machine_c is not None]
    if len(rows) < _LEAST_STRETCHES:
        return found(Verdict.CANNOT_TELL, "no temperature sensor can be read" if not rows else "too few stretches")
    rows.sort(key=lambda row: row[0] or 0.0)
    coolest, hottest = rows[0][0] or 0.0, rows[-1][0] or 0.0
    where = "disk" if own else "machine (the disk has no sensor)"
    series = f"{where} {coolest:.0f} to {hottest:.0f} °C"
    if hottest - coolest < _WARMED_C:
        steady = slowing is Verdict.NOT_CONFIRMED
        text = "and the throughput did not fall" if steady else "too little to compare"
        return found(Verdict.NOT_CONFIRMED if steady else Verdict.CANNOT_TELL, f"{series}, {text}")
    third = max(1, len(rows) // 3)
    cool, hot = (stats.mean([s.mib_s for _, s in part]) for part in (rows[:third], rows[-third:]))
    verdict = Verdict.CONFIRMED if hot < (1 - SHARE) * cool else Verdict.NOT_CONFIRMED
    return found(verdict, f"{series}: {cool:.0f} MiB/s in the coolest third, {hot:.0f} in the hottest")


def _other_readers(stretches: Sequence[Stretch]) -> Judgement:
    claim = "others read from the disk at the same time"
    known = [(s.others_bytes, s.nbytes) for s in stretches if s.file == 0 and s.others_bytes is not None]
    if not known:
        evidence = "the device does not count what is read from it"
        return Judgement(suspect="other-readers", claim=claim, verdict=Verdict.CANNOT_TELL, evidence=evidence)
    others, ours = sum(o for o, _ in known), sum(n for _, n in known)
    share = others / max(others + ours, 1)
    verdict = Verdict.CONFIRMED if share > _OTHERS_SHARE else Verdict.NOT_CONFIRMED
    evidence = f"{others / MIB:.0f} MiB by others while we read {ours / MIB:.0f} MiB: {share:.1%}"
    return Judgement(suspect="other-readers", claim=claim, verdict=verdict, evidence=evidence)
