"""Findings as one self-contained HTML page: inline charts, no script, nothing from outside.

The page is well-formed XML too, so the style must do without the characters that XML escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from toolkit import __version__
from toolkit.bench.stalls import count
from toolkit.bench.stalls import sentence as stall_sentence
from toolkit.evidence import charts, doubts, observed, setting, timeline
from toolkit.evidence.findings import Findings, Sample, samples
from toolkit.evidence.html_style import CSS
from toolkit.evidence.report import conditions, number, percent, statements, table
from toolkit.evidence.svg import HATCH, Style, figure, marker, styles

_PHASES = {"pp": "prefill", "tg": "decode"}
_CLASSES = {"faster": "faster", "slower": "slower", "void": "void", "outputs differ": "void"}


def page(sections: Sequence[Findings]) -> str:
    """The whole page; one section per group of runs that belong together."""
    arms = dict.fromkeys(s.arm for found in sections for s in found.summaries)
    models = dict.fromkeys(
        str(run.header["model"].get("filename", "model")) for found in sections for run in found.runs
    )
    title = f"{', '.join(arms)} on {', '.join(models)}"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{escape(title)}</title><style>{CSS}</style></head>",
            "<body>",
            _HATCH,
            f"<h1>{escape(title)}</h1>",
            *(_section(found, numbered=len(sections) > 1) for found in sections),
            f'<p class="dim">Made by moe-madv {escape(__version__)} from the results files named above.</p>',
            "</body></html>\n",
        ]
    )


# Referred to by the charts' style; a picture of no size.
_HATCH = f'<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>{HATCH}</defs></svg>'


def _section(found: Findings, *, numbered: bool) -> str:
    style = styles([found.baseline, *dict.fromkeys(s.arm for s in found.summaries if s.arm != found.baseline)])
    parts = ["<section>"]
    if numbered:
        parts.append(f"<h2>{escape(', '.join(run.path.name for run in found.runs))}</h2>")
    parts += [f'<p class="dim">{escape(words)}</p>' for words in conditions(found)]
    parts.append(_list(statements(found)))
    parts.append(_table(*table(found)))
    headings, rows = observed.table(found.summaries)
    if rows:
        parts += ["<h3>The machine meanwhile</h3>", _table(headings, rows)]
    for test in dict.fromkeys(s.test for s in found.summaries):
        parts += [f"<h3>{escape(test)}: {_PHASES.get(test[:2], 'run')}</h3>", _charts(found, test, style)]
    if found.warnings:
        parts += ["<h3>Before you believe it</h3>", _list(found.warnings)]
    if found.stalls is not None:
        lines = [stall_sentence(stall) for stall in found.stalls]
        told = f"<details><summary>Each of them</summary>{_list(lines)}</details>" if lines else ""
        parts += ["<h3>Stalls</h3>", f"<p>{count(found.stalls)}</p>", told]
    parts.append("<h3>Conditions</h3>")
    parts += [_table(["", run.path.name], setting.rows(run), wrap=True) for run in found.runs]
    parts += ["<details><summary>Every run</summary>", _runs(found), "</details>", "</section>"]
    return "\n".join(parts)


# Of the series that a run keeps with --series.
_OVER_TIME = (
    ("disk_util_percent", "Disk utilisation", "Per cent"),
    ("gpu_util_percent", "GPU utilisation", "Per cent, the busiest GPU,"),
    ("cpu_mhz", "CPU clock", "MHz"),
)


def _charts(found: Findings, test: str, style: dict[str, Style]) -> str:
    rows = [s for s in found.summaries if s.test == test]
    comparisons = {c.candidate: c for c in found.comparisons if c.test == test}
    kept: dict[str, list[Sample]] = {}
    others: list[Sample] = []
    for s in rows:
        everything = samples(found.runs, s.arm, test)
        kept[s.arm], apart, _ = doubts.planned_state([x for x in everything if x.row["status"] == "ok"])
        others += [*apart, *(x for x in everything if x.row["status"] == "failed")]
    shown = {s.arm: s for s in rows if s.arm not in comparisons or comparisons[s.arm].outputs_equal is not False}
    trend = next((t for t in found.trends if t.test == test), None)
    roof = next((r for r in found.rooflines if r.test == test), None)
    key = _key(style, {arm: arm for arm in shown})
    marks = "Pale: single runs; bar: mean; whisker: 95 % interval of the mean over blocks"
    if any(s.outliers for s in rows):
        marks += "; ring: outlier, kept"
    if any(s.ts_apart for s in rows):
        marks += "; hollow: another cache state than planned, in no mean"
    figures = [
        _figure("Throughput", charts.throughput(rows, comparisons, style), f"{marks}."),
        _figure("Read per token", charts.reads(rows, style), "Pale: single runs; bar: mean."),
    ]
    if test.startswith("tg"):
        ms = {arm: [v for x in kept[arm] for v in x.row.get("token_ms") or ()] for arm in shown}
        caption = "One stroke per token of all runs, or 400 quantiles; box: the middle half; bar: median; dashed: p95."
        figures.append(_figure("Time per token", charts.latency(ms, style), caption))
    picture = charts.order(
        {arm: kept[arm] for arm in shown},
        [x for x in others if x.row["arm"] in shown],
        {arm: s.outliers for arm, s in shown.items()},
        trend,
        style,
    )
    figures.append(_figure("Order and drift", picture, _drift(found, test), key))
    if roof is not None:
        picture = charts.roofline(roof, list(shown.values()), style)
        caption = (
            "Line: what the disk's measured speed and computing in memory allow. Dashed: the least to read, by the "
            "best arm or by distinct bytes needed; ringed: the limit, percent: of it. Dots: from an arm to what its "
            "reads would allow."
        )
        shares = {
            arm: f"{arm}: {percent(s.limit_fraction)}" for arm, s in shown.items() if s.limit_fraction is not None
        }
        figures.append(_figure("Roofline", picture, caption, _key(style, {arm: arm for arm in shown} | shares)))
    seen = {arm: [x.row["observed"] for x in kept[arm] if x.row.get("observed")] for arm in shown}
    for name, title, unit in _OVER_TIME:
        caption = f"{unit} over the seconds of the test; one line per run, its end marked."
        picture = charts.over_time(name, seen, style, label=title)
        figures.append(_figure(title, picture, caption, key))
    timelines = timeline.by_arm(found, test)
    for arm, entries in timelines.items():
        body, height = timeline.draw(entries, charts.WIDTH, list(timelines.values()))
        picture = figure(charts.WIDTH, height, f"time by layer, {len(entries)} layers", body)
        figures.append(_figure(f"Time by layer: {arm}", picture, f"{timeline.summary(entries)}. {timeline.KEY}."))
    return '<div class="charts">' + "\n".join(f for f in figures if f) + "</div>"


def _drift(found: Findings, test: str) -> str:
    trend = next((t for t in found.trends if t.test == test), None)
    if trend is None:
        return "Too few runs to tell a drift."
    low, high = (100 * x for x in trend.drift.ci95)
    said = "significant" if trend.drift.significant else "none that can be told from noise"
    return (
        f"Drift {100 * trend.drift.slope:+.2g} % per run (95 % interval {low:+.2g} to {high:+.2g} %): {said}. "
        "Lines: the trend at each arm's level; dotted: blocks; cross: failed."
    )


def _figure(title: str, picture: str | None, caption: str, key: str = "") -> str:
    if picture is None:
        return ""
    return f"<figure><p>{escape(title)}</p>{key}{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _key(style: dict[str, Style], arms: dict[str, str]) -> str:
    """The mark of each arm beside its words."""
    items = [
        f"<li>{figure(16, 16, arm, [marker(style[arm], 8, 8, radius=6)])} {escape(words)}</li>"
        for arm, words in arms.items()
    ]
    return f'<ul class="key dim">{"".join(items)}</ul>'


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(words)}</li>" for words in lines) + "</ul>"


_WORDS = ("test", "arm", "verdict", "status", "reason", "file", "cache", "")


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, wrap: bool = False) -> str:
    def cell(heading: str, value: str, *, last: bool) -> str:
        css = ["word"] if heading in _WORDS or wrap else []
        css += ["wrap"] if wrap and last else ["name"] if heading in ("arm", "file") else []
        css += [_CLASSES[value]] if value in _CLASSES else []
        sign = charts.VERDICT_SIGNS.get(value, "")
        return f'<td class="{" ".join(css)}">{sign}{escape(value)}</td>'

    head = "".join(f'<th class="{"word" if h in _WORDS or wrap else ""}">{escape(h)}</th>' for h in headings)
    body = "".join(
        "<tr>"
        + "".join(
            cell(h, value, last=i == len(row) - 1) for i, (h, value) in enumerate(zip(headings, row, strict=True))
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _runs(found: Findings) -> str:
    headings = ["file", "block", "position", "arm", "test", "status", "t/s", "p50 ms", "p95 ms", "MiB/token", "cache"]
    rows = []
    for run in found.runs:
        for row in run.samples:
            s = Sample(run=run, row=row)
            finished = row["status"] == "ok"
            reason = "" if finished else f": {str(row.get('reason') or 'no reason given').splitlines()[0]}"
            rows.append(
                [
                    run.path.name,
                    str(row["block"]),
                    str(row["position"]),
                    row["arm"],
                    row["test"],
                    row["status"] + reason,
                    *(number(row.get(name) if finished else None) for name in ("avg_ts", "p50_ms", "p95_ms")),
                    number(row.get("mib_per_token")),
                    {True: "cold", False: "warm", None: "-"}[s.cold] + ("" if s.as_planned else " (not as planned)"),
                ]
            )
    return _table(headings, rows)
