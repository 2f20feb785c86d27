"""Findings as one SVG file: per test, throughput of each arm beside the MiB that it reads per token."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from xml.sax.saxutils import escape

from toolkit.evidence.findings import Comparison, Findings, Summary
from toolkit.evidence.report import conditions, number, ratio_text, verdict_text
from toolkit.evidence.svg import text, ticks
from toolkit.stats import Verdict

_WIDTH = 880
_LABELS = 100  # left of the first panel: arm names
_PANEL = 290
_RIGHT = (_LABELS + _PANEL + 195, 210)  # x and width of the second panel; between them: the ratios
_ROW = 30
_HEAD = 34
_FOOT = 44

# Blue and vermilion of Okabe and Ito stay apart for all common kinds of colour blindness; the verdict is
# also written out. Light and dark follow the reader's setting.
_STYLE = """
svg { color: #1f2328; font: 13px system-ui, sans-serif; }
.back { fill: #ffffff; } text { fill: currentColor; } .small { font-size: 11px; } .head { font-weight: 600; }
.grid { stroke: currentColor; stroke-opacity: .15; } .base { stroke: currentColor; stroke-dasharray: 4 3; }
.mark { stroke-width: 2; } .ring { fill: none; stroke: currentColor; }
.even { fill: #6e7781; stroke: #6e7781; } .faster { fill: #0072b2; stroke: #0072b2; }
.slower { fill: #d55e00; stroke: #d55e00; }
.raw { fill-opacity: .35; stroke: none; }
@media (prefers-color-scheme: dark) {
  svg { color: #e6edf3; } .back { fill: #0d1117; } .even { fill: #9198a1; stroke: #9198a1; }
  .faster { fill: #56b4e9; stroke: #56b4e9; } .slower { fill: #ff8c42; stroke: #ff8c42; }
  .raw { stroke: none; }
}
"""


def chart(findings: Findings) -> str:
    """A self-contained SVG document; whiskers are 95 % intervals of the mean, pale dots single runs."""
    tests = list(dict.fromkeys(s.test for s in findings.summaries))
    body: list[str] = []
    y = 12
    for test in tests:
        rows = [s for s in findings.summaries if s.test == test]
        found = {c.candidate: c for c in findings.comparisons if c.test == test}
        body += _panels(test, rows, found, y)
        y += _HEAD + len(rows) * _ROW + _FOOT
    notes = ["pale dots: single runs; whiskers: 95 % interval of the mean over blocks; dashed: baseline"]
    if any(s.outliers for s in findings.summaries):
        notes = [f"{notes[0]}; ring: outlier, kept"]
    for line in (part for words in [*conditions(findings), *notes] for part in textwrap.wrap(words, 130)):
        body.append(text(12, y, line, "small"))
        y += 16
    title = f"Throughput and reads of {', '.join(dict.fromkeys(s.arm for s in findings.summaries))}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" role="img" '
            f'width="{_WIDTH}" height="{y}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="back" width="{_WIDTH}" height="{y}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panels(test: str, rows: Sequence[Summary], found: dict[str, Comparison], y: int) -> list[str]:
    def shown(s: Summary) -> bool:
        return s.arm not in found or found[s.arm].outputs_equal is not False

    body: list[str] = []
    speed_top = max((v for s in rows if shown(s) for v in (*s.ts, *(s.ts_ci95 or ()))), default=0.0)
    # A whisker of two blocks is so wide that it would squeeze everything else; it is cut at the edge.
    speed_top = min(speed_top, 1.5 * max((v for s in rows if shown(s) for v in s.ts), default=0.0))
    reads_top = max((v for s in rows for v in s.mib_per_token_samples), default=0.0)
    left, right = _Axis(_LABELS, _PANEL, ticks(speed_top)), _Axis(*_RIGHT, ticks(reads_top))
    top, bottom = y + _HEAD, y + _HEAD + len(rows) * _ROW
    phase = {"pp": "prefill, ", "tg": "decode, "}.get(test[:2], "")
    body += left.frame(f"{test}: {phase}t/s", top, bottom) + right.frame("MiB read per token", top, bottom)
    for i, s in enumerate(rows):
        middle = top + i * _ROW + _ROW / 2
        c = found.get(s.arm)
        kind = _kind(c)
        body.append(text(_LABELS - 12, middle + 4, s.arm, anchor="end"))
        if s.ts_mean is None or not shown(s):
            body.append(text(_LABELS + 6, middle + 4, "no finished run" if s.ts_mean is None else "outputs differ"))
        else:
            if c is None:
                x = left.x(s.ts_mean)
                body.append(f'<line class="base" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>')
            body += left.series(s.ts, s.ts_mean, s.ts_ci95, middle, kind, s.outliers)
            label = "baseline" if c is None else f"{ratio_text(c)} {verdict_text(c)}"
            body.append(text(_LABELS + _PANEL + 10, middle + 4, label, "small"))
        if s.mib_per_token is not None:
            body += right.series(s.mib_per_token_samples, s.mib_per_token, None, middle, "even", ())
            body.append(text(_RIGHT[0] + _RIGHT[1] + 8, middle + 4, number(s.mib_per_token), "small"))
    return body


class _Axis:
    """A horizontal scale from 0 to the last tick."""

    def __init__(self, left: float, width: float, marks: Sequence[float]) -> None:
        self._left, self._width, self._marks = left, width, marks

    def x(self, value: float) -> float:
        return self._left + self._width * min(max(value / self._marks[-1], 0), 1)

    def frame(self, heading: str, top: float, bottom: float) -> list[str]:
        parts = [text(self._left, top - 12, heading, "head")]
        for mark in self._marks:
            x = self.x(mark)
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>')
            parts.append(text(x, bottom + 14, f"{mark:g}", "small", anchor="middle"))
        return parts

    def series(
        self,
        values: Sequence[float],
        mean: float,
        interval: tuple[float, float] | None,
        y: float,
        kind: str,
        outliers: Sequence[int],
    ) -> list[str]:
        parts = [f'<circle class="raw {kind}" cx="{self.x(v):.1f}" cy="{y}" r="4"/>' for v in values]
        for x in (self.x(values[i]) for i in outliers):
            parts.append(f'<path class="ring" d="M{x - 7:.1f} {y}a7 7 0 1 0 14 0a7 7 0 1 0 -14 0z"/>')
        if interval is not None:
            low, high = (self.x(v) for v in interval)
            path = f"M{low:.1f} {y}H{high:.1f}M{low:.1f} {y - 5}v10M{high:.1f} {y - 5}v10"
            parts.append(f'<path class="mark {kind}" d="{path}"/>')
        parts.append(f'<path class="mark {kind}" d="M{self.x(mean):.1f} {y - 9}v18"/>')
        return parts


def _kind(c: Comparison | None) -> str:
    decided = c is not None and not c.void and c.verdict is not Verdict.UNDECIDED
    return c.verdict.value if c is not None and decided else "even"
