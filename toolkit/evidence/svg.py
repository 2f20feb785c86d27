"""The parts that all charts are drawn with: scales, text, and marks that differ in shape as well as in colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

# Corners on a unit circle; a circle has none. Shape and colour repeat with different periods, so that 42
# series are told apart.
_CORNERS: dict[str, tuple[tuple[float, float], ...]] = {
    "circle": (),
    "square": ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    "triangle": ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
    "diamond": ((0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)),
    "wedge": ((0, 1.15), (1.1, -0.85), (-1.1, -0.85)),
    "hourglass": ((-1, -1), (1, -1), (-1, 1), (1, 1)),
}
COLOURS = 7

# Filled by its id; the class of its line holds the colour.
HATCH = (
    '<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="hatching" d="M0 0V5"/></pattern>'
)


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one arm is marked in every chart; the class holds the colour."""

    shape: str
    css: str


def styles(names: Sequence[str]) -> dict[str, Style]:
    """One style per name, in order."""
    shapes = list(_CORNERS)
    return {name: Style(shape=shapes[i % len(shapes)], css=f"s{i % COLOURS}") for i, name in enumerate(names)}


def marker(style: Style, x: float, y: float, *, radius: float = 4.5, css: str = "") -> str:
    """The mark of a style, centred."""
    corners = _CORNERS[style.shape]
    if corners:
        path = "M" + "L".join(f"{x + radius * dx:.1f} {y + radius * dy:.1f}" for dx, dy in corners) + "z"
    else:
        path = (
            f"M{x - radius:.1f} {y:.1f}a{radius} {radius} 0 1 0 {2 * radius} 0a{radius} {radius} 0 1 0 {-2 * radius} 0z"
        )
    return f'<path class="{f"mark {style.css} {css}".strip()}" d="{path}"/>'


def text(x: float, y: float, words: str, css: str = "", anchor: str = "start") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def figure(width: float, height: float, label: str, body: Sequence[str]) -> str:
    """An inline picture; `label` is what a screen reader says of it."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label={quoteattr(label)}>'
        + "\n".join(body)
        + "</svg>"
    )


def ticks(top: float) -> list[float]:
    """Round values from 0 to the first one at or above `top`, in steps of 1, 2 or 5 times a power of ten."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top / 4))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= top / 4)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round values 1, 2 and 5 times powers of ten from at or below `low` to at or above `high`, both above 0."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [m * 10.0**p for p in powers for m in (1, 2, 5)]
    below = max((s for s in steps if s <= low * (1 + 1e-9)), default=steps[0])
    above = min((s for s in steps if s >= high * (1 - 1e-9)), default=steps[-1])
    if below == above:
        above = steps[min(steps.index(above) + 1, len(steps) - 1)]
    return [s for s in steps if below <= s <= above]


class Scale:
    """Values to places between `start` and `end`: linear from 0, or logarithmic; values outside are cut."""

    def __init__(self, marks: Sequence[float], start: float, end: float, *, log: bool = False) -> None:
        self.marks, self.start, self.end, self.log = marks, start, end, log

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log_from: float = math.inf) -> Scale:
        """A scale that holds all values; logarithmic when the largest is `log_from` times the smallest or more."""
        low, high = min(values, default=0.0), max(values, default=0.0)
        if low > 0 and high / low >= log_from:
            return cls(log_ticks(low, high), start, end, log=True)
        return cls(ticks(high), start, end)

    def __call__(self, value: float) -> float:
        low, high = self.marks[0], self.marks[-1]
        value = min(max(value, low), high)
        share = math.log(value / low) / math.log(high / low) if self.log else (value - low) / (high - low)
        return self.start + (self.end - self.start) * share

    def labels(self, most: int = 7) -> list[tuple[float, str]]:
        """Places and texts of the marks, thinned to at most about `most`."""
        marks = list(self.marks)
        if self.log and len(marks) > most:
            marks = [m for m in marks if f"{m:e}"[0] == "1"]
        marks = marks[:: math.ceil(len(marks) / most)]
        return [(self(m), f"{m:g}") for m in marks]
