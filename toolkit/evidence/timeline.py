"""Where a run's time went, layer by layer: rows with a `timeline`, averaged over the runs of an arm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.console import MIB
from toolkit.errors import ResultsError
from toolkit.evidence.findings import Sample
from toolkit.evidence.report import number, percent
from toolkit.evidence.svg import Scale, figure, line, text, ticks

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 480, 44, 466, 26, 190

_FIELDS = ("wait_ms", "read_ms", "compute_ms", "bytes", "late", "in_time")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Means over runs; a field that no row has is 0."""

    layer: int
    wait_ms: float  # of the compute threads, for reads of this layer
    read_ms: float  # of the slowest read worker, beside the computing
    compute_ms: float
    bytes: float
    late: float  # reads that came after they were needed
    in_time: float


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


def chart(timeline: Sequence[Layer]) -> str:
    """Per layer: compute and wait stacked, the reads beside them as a mark, a sign over layers with late reads."""
    most = max((max(entry.wait_ms + entry.compute_ms, entry.read_ms) for entry in timeline), default=0.0)
    scale = Scale(ticks(most), _BOTTOM, _TOP)
    step = (_RIGHT - _LEFT) / len(timeline)
    width = max(step * 0.7, 1.0)
    body = []
    for y, words in scale.labels(6):
        body += [line(_LEFT, y, _RIGHT, y, "grid"), text(_LEFT - 6, y + 4, words, "small", "end")]
    body.append(text(_LEFT - 6, _TOP - 12, "ms", "small", "end"))
    body.append(text(_RIGHT, _BOTTOM + 30, "layer", "small", "end"))
    every = math.ceil(len(timeline) / 12)
    for i, entry in enumerate(timeline):
        x = _LEFT + step * (i + 0.5)
        base, middle, top = scale(0), scale(entry.compute_ms), scale(entry.compute_ms + entry.wait_ms)
        body.append(_bar("compute", x, width, base, middle))
        body.append(_bar("wait", x, width, middle, top))
        if entry.read_ms:
            body.append(line(x - step * 0.45, scale(entry.read_ms), x + step * 0.45, scale(entry.read_ms), "reading"))
        if entry.late:
            body.append(text(x, min(top, scale(entry.read_ms)) - 4, "▾", "small", "middle"))
        if i % every == 0:
            body.append(text(x, _BOTTOM + 16, str(entry.layer), "small", "middle"))
    return figure(_WIDTH, _BOTTOM + 36, f"time by layer, {len(timeline)} layers", body)


def _bar(css: str, x: float, width: float, low: float, high: float) -> str:
    return f'<rect class="{css}" x="{x - width / 2:.1f}" y="{high:.1f}" width="{width:.1f}" height="{low - high:.1f}"/>'


def summary(timeline: Sequence[Layer]) -> str:
    """The totals of a timeline in words."""
    late, reads = sum(e.late for e in timeline), sum(e.late + e.in_time for e in timeline)
    parts = [
        f"{len(timeline)} layers",
        f"computing {number(sum(e.compute_ms for e in timeline))} ms",
        f"waiting {number(sum(e.wait_ms for e in timeline))} ms",
        f"reading {number(sum(e.read_ms for e in timeline))} ms",
        f"{number(sum(e.bytes for e in timeline) / MIB)} MiB",
        f"{number(late)} of {number(reads)} reads late ({percent(late / reads)})" if reads else "",
    ]
    return " · ".join(part for part in parts if part)
