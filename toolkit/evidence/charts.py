"""The charts of the HTML report: inline SVG, pure functions of findings. Sizes are in units of the view box."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from toolkit.evidence.findings import Comparison, Roofline, Sample, Summary, Trend
from toolkit.evidence.report import number, ratio_text, verdict_text
from toolkit.evidence.svg import Scale, Style, figure, line, log_ticks, marker, text

WIDTH = 480
_LEFT, _RIGHT = 14, WIDTH - 14  # of charts whose rows carry their labels
_ROW = 46
_TOP = 10
_FOOT = 26
_LONGEST = 24  # letters of an arm's name
_MOST_STROKES = 400  # of single tokens in one row; more are told by as many evenly spaced quantiles

# An axis whose values span more than this is logarithmic: the slow arm would be a line at zero.
_LOG_FROM = 8.0

VERDICT_SIGNS = {"faster": "▲ ", "slower": "▼ ", "undecided": "○ "}


def throughput(rows: Sequence[Summary], found: Mapping[str, Comparison], style: Mapping[str, Style]) -> str:
    """t/s of every arm: single runs, mean, 95 % interval of the mean; no speed of an arm whose outputs differ."""
    shown = [s for s in rows if s.arm not in found or found[s.arm].outputs_equal is not False]
    most = max((v for s in shown for v in (*s.ts, *s.ts_apart)), default=0.0)
    # The whisker of two blocks is so wide that it would squeeze everything else; it is cut at the edge.
    reach = [min(v, 1.5 * most) for s in shown for v in (s.ts_ci95 or ())]
    lows = [v for s in shown for v in (*s.ts, *s.ts_apart)]
    scale = Scale.over([*lows, *(v for v in reach if v > 0)], _LEFT, _RIGHT, log_from=_LOG_FROM)
    body = _grid(scale, len(rows), "t/s")
    for i, s in enumerate(rows):
        y = _TOP + i * _ROW
        c = found.get(s.arm)
        verdict = verdict_text(c) if c else ""
        note = f"{number(s.ts_mean)} t/s"
        note += f" · {ratio_text(c)} {VERDICT_SIGNS.get(verdict, '')}{verdict}" if c else " · baseline"
        if s not in shown:
            body += _label(y, s.arm, style[s.arm], "outputs differ: no speed is shown")
        elif s.ts_mean is None:
            body += _label(y, s.arm, style[s.arm], "no finished run")
        else:
            body += _label(y, s.arm, style[s.arm], note)
            body += _series(scale, y + 30, s.ts, s.ts_mean, s.ts_ci95, style[s.arm], s.outliers, s.ts_apart)
    return figure(WIDTH, _TOP + len(rows) * _ROW + _FOOT, f"throughput in {rows[0].test} by arm", body)


def reads(rows: Sequence[Summary], style: Mapping[str, Style]) -> str | None:
    """MiB read per token of every arm; None when nothing was counted."""
    values = [v for s in rows for v in s.mib_per_token_samples]
    if not values:
        return None
    scale = Scale.over(values, _LEFT, _RIGHT, log_from=_LOG_FROM)
    body = _grid(scale, len(rows), "MiB/token")
    for i, s in enumerate(rows):
        y = _TOP + i * _ROW
        if s.mib_per_token is None:
            body += _label(y, s.arm, style[s.arm], "not counted")
            continue
        amplification = "" if s.read_amplification is None else f" · {number(s.read_amplification)} x the bytes needed"
        body += _label(y, s.arm, style[s.arm], f"{number(s.mib_per_token)} MiB{amplification}")
        body += _series(scale, y + 30, s.mib_per_token_samples, s.mib_per_token, None, style[s.arm])
    return figure(WIDTH, _TOP + len(rows) * _ROW + _FOOT, f"MiB read per token in {rows[0].test} by arm", body)


def latency(tokens_ms: Mapping[str, Sequence[float]], style: Mapping[str, Style]) -> str | None:
    """Time of every token by arm: strokes, box of the middle half, median; None when no row holds single tokens."""
    known = {arm: np.asarray(values) for arm, values in tokens_ms.items() if len(values) > 1}
    if not known:
        return None
    values = [float(v) for ms in known.values() for v in (ms.min(), ms.max())]
    scale = Scale.over(values, _LEFT, _RIGHT, log_from=_LOG_FROM)
    body = _grid(scale, len(known), "ms per token")
    for i, (arm, ms) in enumerate(known.items()):
        y = _TOP + i * _ROW
        p25, p50, p75, p95 = (float(q) for q in np.percentile(ms, [25, 50, 75, 95]))
        note = f"p50 {number(p50)} · p95 {number(p95)} · longest {number(float(ms.max()))} ms"
        body += _label(y, arm, style[arm], note)
        strokes = ms if len(ms) <= _MOST_STROKES else np.quantile(ms, np.linspace(0, 1, _MOST_STROKES))
        path = "".join(f"M{scale(float(v)):.1f} {y + 23}v14" for v in strokes)
        body.append(f'<path class="stroke {style[arm].css}" d="{path}"/>')
        left, right, css = scale(p25), scale(p75), style[arm].css
        body.append(f'<rect class="box {css}" x="{left:.1f}" y="{y + 23}" width="{right - left:.1f}" height="14"/>')
        body.append(line(scale(p50), y + 20, scale(p50), y + 40, f"mean {css}"))
        body.append(line(scale(p95), y + 24, scale(p95), y + 36, f"mean dashed {css}"))
    return figure(WIDTH, _TOP + len(known) * _ROW + _FOOT, "time per token by arm", body)


def order(
    kept: Mapping[str, Sequence[Sample]],
    others: Sequence[Sample],
    outliers: Mapping[str, Sequence[int]],
    trend: Trend | None,
    style: Mapping[str, Style],
) -> str | None:
    """Throughput over the order of the runs with each arm's part of the common trend; None for a known order of none.

    `others` are samples that failed (a cross at the bottom) or stand apart (hollow).
    """
    everything = [*(s for rows in kept.values() for s in rows), *others]
    known = [s for s in everything if s.run.header.get("source") is None]
    speeds = [float(s.row["avg_ts"]) for s in known if s.row["status"] == "ok"]
    if len(speeds) < 2:
        return None
    place = _places(known)
    left, right, top, bottom = 44, _RIGHT, 22, 210
    scale = Scale.over(speeds, bottom, top, log_from=_LOG_FROM)
    last = max(place.values())

    def x(s: Sample) -> float:
        return left + 8 + (right - left - 16) * place[_key(s)] / max(last, 1)

    body = [part for y, words in scale.labels() for part in _level(left, right, y, words)]
    blocks: dict[tuple[str, int], list[float]] = {}
    for s in known:
        blocks.setdefault(s.block, []).append(x(s))
    starts = sorted(min(xs) for xs in blocks.values())[1:]
    step = (right - left - 16) / max(last, 1)
    body += [line(b - step / 2, top, b - step / 2, bottom, "grid dotted") for b in starts]
    for arm, rows in kept.items():
        css = style[arm].css
        if trend is not None and len(rows) > 1:
            places = [place[_key(s)] for s in rows]
            level = float(np.mean(np.log([s.row["avg_ts"] for s in rows])))
            ends = (min(places), max(places))
            y1, y2 = (scale(math.exp(level + trend.drift.slope * (p - float(np.mean(places))))) for p in ends)
            x1, x2 = (left + 8 + (right - left - 16) * p / max(last, 1) for p in ends)
            body.append(line(x1, y1, x2, y2, f"trend {css}"))
        body += [marker(style[arm], x(s), scale(s.row["avg_ts"])) for s in rows]
        body += [_ring(x(rows[i]), scale(rows[i].row["avg_ts"])) for i in outliers[arm]]
    for s in (s for s in others if s in known):
        arm = s.row["arm"]
        if s.row["status"] == "ok":
            body.append(marker(style[arm], x(s), scale(s.row["avg_ts"]), css="hollow"))
        else:
            body.append(text(x(s), bottom - 4, "✕", style[arm].css, "middle"))
    body.append(text(left, bottom + 18, "first run", "small"))
    body.append(text(right, bottom + 18, f"last run ({last + 1})", "small", "end"))
    body.append(text(left - 6, top - 8, "t/s", "small", "end"))
    return figure(WIDTH, bottom + _FOOT, "throughput over the order of the runs", body)


def over_time(
    name: str, seen: Mapping[str, Sequence[Mapping[str, Any]]], style: Mapping[str, Style], *, label: str
) -> str | None:
    """A series of the machine over the seconds of a test, a line per run; None when no run kept it."""
    lines = [
        (arm, [(i * one["every_s"], v) for i, v in enumerate(one[name]["values"]) if v is not None])
        for arm, runs in seen.items()
        for one in runs
        if one.get(name) and "values" in one[name]
    ]
    if not lines:
        return None
    left, right, top, bottom = 44, _RIGHT, 22, 210
    across = Scale.over([x for _, points in lines for x, _ in points], left, right)
    up = Scale.over([y for _, points in lines for _, y in points], bottom, top)
    body = [part for y, words in up.labels() for part in _level(left, right, y, words)]
    for x, words in across.labels(5):
        body.append(text(x, bottom + 16, words, "small", "end" if x > WIDTH - 20 else "middle"))
    for arm, points in lines:
        path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points)
        body.append(f'<path class="over-time {style[arm].css}" d="M{path}"/>')
        body.append(marker(style[arm], across(points[-1][0]), up(points[-1][1]), css="pale"))
    return figure(WIDTH, bottom + _FOOT, f"{label} over the time of a test", body)


def roofline(roof: Roofline, rows: Sequence[Summary], style: Mapping[str, Style]) -> str | None:
    """t/s over MiB read per token, both logarithmic, under what disk and compute allow; None without reads."""
    points = [s for s in rows if s.ts_mean and s.mib_per_token]
    if not points or roof.must_read_mib <= 0:
        return None
    left, right, top, bottom = 44, _RIGHT, 22, 258
    mib = [s.mib_per_token or 0.0 for s in points] + [roof.must_read_mib]
    ts = [s.ts_mean or 0.0 for s in points]
    roofs = [1000 / roof.compute_ms] if roof.compute_ms else [roof.disk_mib_s / min(mib)]
    across = Scale(log_ticks(min(mib) / 1.5, max(mib) * 1.5), left, right, log=True)
    up = Scale(log_ticks(min(ts) / 1.5, max([*ts, *roofs]) * 1.3), bottom, top, log=True)
    body = [part for y, words in up.labels() for part in _level(left, right, y, words)]
    for x, words in across.labels(5):
        anchor = "end" if x > WIDTH - 20 else "middle"
        body += [line(x, top, x, bottom, "grid"), text(x, bottom + 16, words, "small", anchor)]
    body.append(text(left - 6, top - 8, "t/s", "small", "end"))
    body.append(text(right, bottom + 30, "MiB read per token", "small", "end"))

    def allowed(m: float) -> float:
        disk = roof.disk_mib_s / m
        return min(disk, 1000 / roof.compute_ms) if roof.compute_ms else disk

    low, high = across.marks[0], across.marks[-1]
    corner = [roof.disk_mib_s * roof.compute_ms / 1000] if roof.compute_ms else []
    stops = [
        low,
        *(m for m in corner if low < m < high),
        *(m for m in [roof.disk_mib_s / up.marks[0]] if low < m < high),
    ]
    path = "L".join(
        f"{across(m):.1f} {up(allowed(m)):.1f}" for m in [*stops, high] if allowed(m) >= up.marks[0] * 0.999
    )
    body.append(f'<path class="roof" d="M{path}"/>')
    if roof.compute_ms:
        words = f"computing in memory: {number(1000 / roof.compute_ms)} t/s"
        body.append(text(left + 6, up(1000 / roof.compute_ms) - 6, words, "small"))
    body.append(text(right - 4, top + 12, f"sloped: disk at {number(roof.disk_mib_s)} MiB/s", "small", "end"))
    x = across(roof.must_read_mib)
    body.append(line(x, up(allowed(roof.must_read_mib)), x, bottom, "base"))
    body.append(f'<circle class="ring" cx="{x:.1f}" cy="{up(allowed(roof.must_read_mib)):.1f}" r="5"/>')
    for s in points:
        px, py = across(s.mib_per_token or 0), up(s.ts_mean or 0)
        body.append(line(px, py, px, up(allowed(s.mib_per_token or 0)), f"gap {style[s.arm].css}"))
        body.append(marker(style[s.arm], px, py, radius=6))
    return figure(WIDTH, bottom + _FOOT + 12, f"roofline of {roof.test}", body)


def _places(known: Sequence[Sample]) -> dict[tuple[str, int], int]:
    """Place in time of each process, run after run."""
    keys = sorted({_key(s) for s in known}, key=lambda key: ([s.run.run_id for s in known].index(key[0]), key[1]))
    return {key: i for i, key in enumerate(keys)}


def _key(s: Sample) -> tuple[str, int]:
    return (s.run.run_id, s.row["position"])


def _grid(scale: Scale, rows: int, unit: str) -> list[str]:
    bottom = _TOP + rows * _ROW
    parts = []
    for x, words in scale.labels():
        anchor = "end" if x > WIDTH - 20 else "middle"
        parts += [line(x, _TOP, x, bottom, "grid"), text(x, bottom + 16, words, "small", anchor)]
    return [*parts, text(_RIGHT, _TOP - 1, f"{unit}{', logarithmic' if scale.log else ''}", "small", "end")]


def _level(left: float, right: float, y: float, words: str) -> list[str]:
    return [line(left, y, right, y, "grid"), text(left - 6, y + 4, words, "small", "end")]


def _label(y: float, arm: str, style: Style, note: str) -> list[str]:
    return [
        marker(style, _LEFT + 5, y + 10),
        text(_LEFT + 16, y + 14, _short(arm), "head over"),
        text(_RIGHT, y + 14, note, "small over", "end"),
    ]


def _series(
    scale: Scale,
    y: float,
    values: Sequence[float],
    mean: float,
    interval: tuple[float, float] | None,
    style: Style,
    outliers: Sequence[int] = (),
    apart: Sequence[float] = (),
) -> list[str]:
    parts = [marker(style, scale(v), y, css="pale") for v in values]
    parts += [marker(style, scale(v), y, css="hollow") for v in apart]
    parts += [_ring(scale(values[i]), y) for i in outliers]
    if interval is not None:
        low, high = (scale(v) for v in interval)
        path = f"M{low:.1f} {y}H{high:.1f}M{low:.1f} {y - 5}v10M{high:.1f} {y - 5}v10"
        parts.append(f'<path class="whisker {style.css}" d="{path}"/>')
    return [*parts, line(scale(mean), y - 9, scale(mean), y + 9, f"mean {style.css}")]


def _short(arm: str) -> str:
    """A name that leaves room for a note beside it; tables and keys show the whole."""
    return arm if len(arm) <= _LONGEST else arm[: _LONGEST - 1] + "…"


def _ring(x: float, y: float) -> str:
    return f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="8"/>'
