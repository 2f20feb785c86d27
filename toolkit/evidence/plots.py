"""Findings as one SVG file: throughput and reads of every arm, or where the time of each layer went."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from xml.sax.saxutils import escape

from toolkit.errors import ResultsError
from toolkit.evidence import timeline
from toolkit.evidence.findings import Comparison, Findings, Summary
from toolkit.evidence.report import conditions, number, ratio_text, verdict_text
from toolkit.evidence.svg import HATCH, text, ticks
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
.compute { fill: #0072b2; } .wait, .late { fill: url(#hatch); stroke: #c04e00; stroke-width: .75; }
.asking { fill: #6e7781; fill-opacity: .25; stroke: #6e7781; stroke-width: .75; } .amount { fill: #6e7781; }
.hatching { stroke: #c04e00; stroke-width: 2; } .reading { stroke: currentColor; stroke-width: 2; }
.halo { stroke: #ffffff; stroke-width: 4; }
@media (prefers-color-scheme: dark) {
  svg { color: #e6edf3; } .back { fill: #0d1117; } .even { fill: #9198a1; stroke: #9198a1; }
  .faster { fill: #56b4e9; stroke: #56b4e9; } .slower { fill: #ff8c42; stroke: #ff8c42; }
  .raw { stroke: none; }
  .compute { fill: #56b4e9; } .wait, .late, .hatching { stroke: #ff8c42; }
  .asking { fill: #9198a1; stroke: #9198a1; } .amount { fill: #9198a1; } .halo { stroke: #0d1117; }
}
"""


def chart(findings: Findings) -> str:
    """Per test, throughput of each arm beside the MiB that it reads per token, as a self-contained SVG document.

    Whiskers are 95 % intervals of the mean, pale dots single runs.
    """
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
    title = f"Throughput and reads of {', '.join(dict.fromkeys(s.arm for s in findings.summaries))}"
    return _document(title, body, y, [*conditions(findings), *notes])


def timelines(findings: Findings) -> str:
    """Per test and arm, where the time of each layer went, as a self-contained SVG document.

    The arms of a test have one scale. Raises ResultsError when no row has a timeline.
    """
    body: list[str] = []
    y = 12.0
    for test in dict.fromkeys(s.test for s in findings.summaries):
        by_arm = timeline.by_arm(findings, test)
        for arm, layers in by_arm.items():
            parts, height = timeline.draw(layers, _WIDTH - 24, list(by_arm.values()))
            body += [
                text(12, y + 14, f"{test}: {_phase(test)}{arm}, mean of its runs", "head"),
                text(12, y + 32, timeline.summary(layers), "small"),
                f'<g transform="translate(12 {y + 36:.0f})">',
                *parts,
                "</g>",
            ]
            y += 36 + height + 18
    if not body:
        raise ResultsError(
            "no row says where the time of each layer went",
            where=", ".join(str(run.path) for run in findings.runs),
            hint="measure a patched arm with it: moe-madv bench run MODEL --timeline",
        )
    return _document("Time by layer", body, y, [*conditions(findings), timeline.KEY])


def _document(title: str, body: Sequence[str], y: float, notes: Sequence[str]) -> str:
    """The file: a picture that is `y` high and the notes below it."""
    body = list(body)
    for line in (part for words in notes for part in textwrap.wrap(words, 130)):
        body.append(text(12, y, line, "small"))
        y += 16
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y:.0f}" role="img" '
            f'width="{_WIDTH}" height="{y:.0f}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f"<defs>{HATCH}</defs>",
            f'<rect class="back" width="{_WIDTH}" height="{y:.0f}"/>',
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
    body += left.frame(f"{test}: {_phase(test)}t/s", top, bottom) + right.frame("MiB read per token", top, bottom)
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


def _phase(test: str) -> str:
    return {"pp": "prefill, ", "tg": "decode, "}.get(test[:2], "")


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
