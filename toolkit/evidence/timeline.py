"""Where a run's time went, layer by layer: rows with a `timeline`, averaged over the runs of an arm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from toolkit.console import MIB
from toolkit.errors import ResultsError
from toolkit.evidence import doubts
from toolkit.evidence.findings import Findings, Sample, samples
from toolkit.evidence.report import number, percent
from toolkit.evidence.svg import Scale, line, text, ticks

_LEFT, _RIGHT, _TOP, _GAP, _FOOT = 44, 14, 26, 26, 36

_FIELDS = ("hint_ms", "wait_ms", "read_ms", "compute_ms", "bytes", "late", "in_time")

KEY = (
    "Full: computing; light: asking for reads; hatched: waiting for them; height: all of it. "
    "Bar: from asking to the last read. ▾: late reads"
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Means over runs; a field that no row has is 0."""

    layer: int
    hint_ms: float  # in the node hook: looking for pages and asking for reads
    wait_ms: float  # of the compute threads, for reads of this layer
    read_ms: float  # from asking to the end of the last read, beside the computing
    compute_ms: float
    bytes: float
    late: float  # reads that came after they were needed
    in_time: float

    @property
    def total_ms(self) -> float:
        return self.hint_ms + self.compute_ms + self.wait_ms


def by_arm(found: Findings, test: str) -> dict[str, list[Layer]]:
    """The timeline of each arm that has one in a test; none of an arm whose outputs differ."""
    wrong = {c.candidate for c in found.comparisons if c.test == test and c.outputs_equal is False}
    timelines = {}
    for arm in (s.arm for s in found.summaries if s.test == test and s.arm not in wrong):
        kept, _, _ = doubts.planned_state([s for s in samples(found.runs, arm, test) if s.row["status"] == "ok"])
        timelines[arm] = layers(kept)
    return {arm: entries for arm, entries in timelines.items() if entries}


def layers(samples: Sequence[Sample]) -> list[Layer]:
    """Mean timeline of the samples that have one; ResultsError when one is not a list of layers."""
    found: dict[int, list[dict[str, float]]] = {}
    for s in samples:
        entries = s.row.get("timeline") or []
        if not isinstance(entries, list) or not all(_is_layer(entry) for entry in entries):
            raise ResultsError("the row's timeline is not a list of layers with numbers", where=s.label)
        for entry in entries:
            found.setdefault(entry["layer"], []).append(entry)
    return [
        Layer(layer=n, **{name: sum(e.get(name) or 0 for e in found[n]) / len(found[n]) for name in _FIELDS})
        for n in sorted(found)
    ]


def _is_layer(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("layer"), int)
        and all(isinstance(entry.get(name) or 0, int | float) and (entry.get(name) or 0) >= 0 for name in _FIELDS)
    )


@dataclass(frozen=True, kw_only=True)
class _Strip:
    """One row of bars over the layers: classes and values of what is stacked, from below."""

    unit: str
    height: float
    parts: tuple[tuple[str, Callable[[Layer], float]], ...]

    def top(self, timeline: Iterable[Layer]) -> float:
        return max((sum(value(entry) for _, value in self.parts) for entry in timeline), default=0.0)


_TIME = _Strip(
    unit="ms, all tokens together",
    height=164,
    parts=(
        ("asking", lambda e: e.hint_ms),
        ("compute", lambda e: e.compute_ms),
        ("wait", lambda e: e.wait_ms),
    ),
)
_AMOUNTS = (
    _Strip(unit="MiB read", height=48, parts=(("amount", lambda e: e.bytes / MIB),)),
    _Strip(unit="reads, hatched: late", height=48, parts=(("amount", lambda e: e.in_time), ("late", lambda e: e.late))),
)


def draw(timeline: Sequence[Layer], width: float, like: Sequence[Sequence[Layer]]) -> tuple[list[str], float]:
    """The parts of a chart and its height: time by layer, below it bytes and reads where they were counted.

    The timelines of `like` are drawn to one scale.
    """
    everything = [entry for one in (*like, timeline) for entry in one]
    step = (width - _RIGHT - _LEFT) / len(timeline)
    body: list[str] = []
    y = float(_TOP)
    for strip in (_TIME, *_AMOUNTS):
        if strip is not _TIME and strip.top(timeline) == 0:
            continue
        most = strip.top(everything)
        if strip is _TIME:
            most = max(most, *(entry.read_ms for entry in everything))
        scale = Scale(ticks(most), y + strip.height, y)
        body += _frame(strip, scale, width)
        for i, entry in enumerate(timeline):
            x = _LEFT + step * (i + 0.5)
            body += _bars(strip, scale, entry, x, max(step * 0.7, 1.0))
            if strip is _TIME:
                body += _reading(scale, entry, x, step)
        y += strip.height + _GAP
    bottom = y - _GAP
    for i in range(0, len(timeline), math.ceil(len(timeline) / 12)):
        body.append(text(_LEFT + step * (i + 0.5), bottom + 16, str(timeline[i].layer), "small", "middle"))
    body.append(text(width - _RIGHT, bottom + 30, "layer", "small", "end"))
    return body, bottom + _FOOT


def _frame(strip: _Strip, scale: Scale, width: float) -> list[str]:
    parts = [text(_LEFT, scale.end - 8, strip.unit, "small")]
    for y, words in scale.labels(6 if strip is _TIME else 3):
        parts += [line(_LEFT, y, width - _RIGHT, y, "grid"), text(_LEFT - 6, y + 4, words, "small", "end")]
    return parts


def _bars(strip: _Strip, scale: Scale, entry: Layer, x: float, width: float) -> list[str]:
    parts, low = [], 0.0
    for css, value in strip.parts:
        high = low + value(entry)
        if high > low:
            place = f'x="{x - width / 2:.1f}" y="{scale(high):.1f}"'
            parts.append(f'<rect class="{css}" {place} width="{width:.1f}" height="{scale(low) - scale(high):.1f}"/>')
        low = high
    return parts


def _reading(scale: Scale, entry: Layer, x: float, step: float) -> list[str]:
    """The time that the layer's reads took, and a sign when some came late."""
    reading = scale(entry.read_ms)
    ends = (x - step * 0.45, reading, x + step * 0.45, reading)
    parts = [line(*ends, "halo"), line(*ends, "reading")] if entry.read_ms else []
    if entry.late:
        parts.append(text(x, min(scale(entry.total_ms), reading) - 4, "▾", "small", "middle"))
    return parts


def summary(timeline: Sequence[Layer]) -> str:
    """The totals of a timeline in words."""
    late, reads = sum(e.late for e in timeline), sum(e.late + e.in_time for e in timeline)
    asking = sum(e.hint_ms for e in timeline)
    parts = [
        f"{len(timeline)} layers",
        f"computing {number(sum(e.compute_ms for e in timeline))} ms",
        f"asking {number(asking)} ms" if asking else "",
        f"waiting {number(sum(e.wait_ms for e in timeline))} ms",
        f"reading {number(sum(e.read_ms for e in timeline))} ms",
        f"{number(sum(e.bytes for e in timeline) / MIB)} MiB",
        f"{number(late)} of {number(reads)} reads late ({percent(late / reads)})" if reads else "",
    ]
    return " · ".join(part for part in parts if part)
