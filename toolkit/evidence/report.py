"""Text out: findings as a table, one sentence per comparison, and machine-readable forms."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from toolkit.console import GIB
from toolkit.evidence import observed
from toolkit.evidence.findings import Comparison, Findings, Roofline, Summary
from toolkit.evidence.observed import Observed
from toolkit.results import injected_slowdown_percent, machine_facts
from toolkit.stats import Verdict

_VERBS = {"pp": "prefills", "tg": "decodes"}

# An undecided interval narrower than this is worth saying as "no difference larger than".
_NARROW = 0.10


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits, without an exponent for large values; `-` when unknown."""
    if value is None:
        return "-"
    rounded = float(f"{value:.{digits}g}")
    return f"{value:.0f}" if abs(rounded) >= 10**digits else f"{rounded:.{digits}g}"


def percent(fraction: float | None) -> str:
    """`82 %`; `-` when unknown."""
    return "-" if fraction is None else f"{number(100 * fraction, 2)} %"


def ratio_text(c: Comparison) -> str:
    """`1.62 [1.50, 1.75]`; no number when the outputs differ."""
    if c.outputs_equal is False:
        return "outputs differ"
    if c.ratio is None:
        return "-"
    if c.ci95 is None:
        return f"{c.ratio:.2f}"
    digits = _decimals(c.ci95)
    return f"{c.ratio:.{digits}f} [{c.ci95[0]:.{digits}f}, {c.ci95[1]:.{digits}f}]"


def _decimals(ci95: tuple[float, float]) -> int:
    return 2 if ci95[1] - ci95[0] >= 0.02 else 3


def arm_text(arm: str, injected_slowdown_percent: float | None) -> str:
    """The arm's name; one that was slowed down on purpose is never shown like an ordinary one."""
    percent = injected_slowdown_percent
    return f"{arm} (slowed by {percent:g} % on purpose)" if percent else arm


def verdict_text(c: Comparison) -> str:
    if c.void:
        return "void"
    return "-" if c.outputs_equal is False else c.verdict.value


def _spread(s: Summary) -> str:
    return number(s.ts_mean) if s.ts_sd is None else f"{number(s.ts_mean)} ± {number(s.ts_sd, 2)}"


# One list drives the terminal's and the markdown table: heading, then the cell's text.
_COLUMNS: tuple[tuple[str, Callable[[Summary, Comparison | None], str]], ...] = (
    ("test", lambda s, c: s.test),
    ("arm", lambda s, c: arm_text(s.arm, s.injected_slowdown_percent)),
    ("runs", lambda s, c: f"{len(s.ts)} (+{s.n_failed} failed)" if s.n_failed else str(len(s.ts))),
    ("t/s", lambda s, c: _spread(s)),
    ("p50 ms", lambda s, c: number(s.p50_ms)),
    ("p95 ms", lambda s, c: number(s.p95_ms)),
    ("MiB/token", lambda s, c: number(s.mib_per_token)),
    ("read ampl.", lambda s, c: number(s.read_amplification)),
    ("major faults/token", lambda s, c: number(s.major_faults_per_token)),
    ("of limit", lambda s, c: percent(s.limit_fraction)),
    ("ratio [95 %]", lambda s, c: "baseline" if c is None else ratio_text(c)),
    ("verdict", lambda s, c: "" if c is None else verdict_text(c)),
)


# Where an arm is distributed: each column after the one it belongs to.
_DISTRIBUTED: dict[str, tuple[str, Callable[[Summary, Comparison | None], str]]] = {
    "arm": ("layers", lambda s, c: f"{len(s.servers)} servers" if s.servers else "local"),
    "MiB/token": ("wire KiB/token", lambda s, c: _wire_text(s)),
}
_JOIN_WAIT: tuple[str, Callable[[Summary, Comparison | None], str]] = (
    "join wait ms/token",
    lambda s, c: number(s.io_wait_ms_per_token) if s.io_wait_why is None else "n/a",
)


def _wire_text(s: Summary) -> str:
    return number(None if s.wire_bytes_per_token is None else s.wire_bytes_per_token / 1024)


def table(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """Headings and a row per test and arm, as text; with what is known of some: join wait, servers and traffic."""
    distributed = any(s.servers for s in findings.summaries)
    more = dict(_DISTRIBUTED) if distributed else {}
    if any(s.io_wait_ms_per_token is not None or s.io_wait_why for s in findings.summaries):
        more["p95 ms"] = _JOIN_WAIT
    columns = []
    for column in _COLUMNS:
        columns += [column, *([more[column[0]]] if column[0] in more else [])]
    by_key = {(c.test, c.candidate): c for c in findings.comparisons}
    cells = [[text(s, by_key.get((s.test, s.arm))) for _, text in columns] for s in findings.summaries]
    return [heading for heading, _ in columns], cells


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table; `|` inside a cell is escaped."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(headings), line(["---"] * len(headings)), *map(line, rows)])


def markdown(findings: Findings) -> str:
    """Table, conditions, sentences and warnings as markdown."""
    headings, rows = observed.table(findings.summaries)
    parts = [
        markdown_table(*table(findings)),
        markdown_table(headings, rows) if rows else "",
        "\n".join([*conditions(findings), *commands(findings)]),
        "\n".join(f"- {line}" for line in statements(findings)),
        "\n".join(f"- warning: {w}" for w in findings.warnings),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def print_terminal(findings: Findings, console: Console) -> None:
    """The same for a terminal."""
    for headings, rows in (table(findings), observed.table(findings.summaries)):
        grid = Table()
        for heading in headings:
            grid.add_column(heading, justify="left" if heading in ("test", "arm", "verdict") else "right")
        for cells in rows:
            grid.add_row(*cells)
        if rows:
            console.print(grid)
    for line in [*conditions(findings), *commands(findings)]:
        console.print(line, markup=False, highlight=False)
    for line in statements(findings):
        console.print(line, markup=False, highlight=False, style="bold")
    for w in findings.warnings:
        console.print(f"warning: {w}", markup=False, highlight=False, style="yellow")


def to_csv(findings: Findings) -> str:
    """One line per test and arm: the summary's fields, what was observed meanwhile, then those of its comparison."""
    skip = {"ts", "mib_per_token_samples", "ts_ci95", "outliers", "ts_apart", "observed"}
    own = [f.name for f in dataclasses.fields(Summary) if f.name not in skip]
    other = ["baseline", "ratio", "ci95_low", "ci95_high", "n_blocks", "verdict", "outputs_equal"]
    out = io.StringIO()
    watched = [f.name for f in dataclasses.fields(Observed)]
    writer = csv.DictWriter(out, [*own, *watched, *other], lineterminator="\n")
    writer.writeheader()
    by_key = {(c.test, c.candidate): c for c in findings.comparisons}
    for s in findings.summaries:
        row: dict[str, Any] = {name: getattr(s, name) for name in own} | {"servers": " ".join(s.servers)}
        row |= dataclasses.asdict(s.observed) if s.observed else {}
        if c := by_key.get((s.test, s.arm)):
            row |= {name: getattr(c, name) for name in other if not name.startswith("ci95")}
            row["verdict"] = c.verdict.value
            row["ci95_low"], row["ci95_high"] = c.ci95 or (None, None)
        writer.writerow(row)
    return out.getvalue()


def to_json(findings: Findings) -> str:
    """`comparisons` (see `Comparison`, plus `sentence`), `arms` (see `Summary`), `limits`, `drift`, `stalls`, words.

    `stalls` is null when no row holds the times of its tokens.
    """
    data = {
        "comparisons": [{**dataclasses.asdict(c), "sentence": sentence(c)} for c in findings.comparisons],
        "arms": [dataclasses.asdict(s) for s in findings.summaries],
        "limits": [{**dataclasses.asdict(r), "limit_ms": r.limit_ms} for r in findings.rooflines],
        "drift": [
            {"test": t.test, "per_run": t.drift.slope, "ci95": t.drift.ci95, "significant": t.drift.significant}
            for t in findings.trends
        ],
        "stalls": None if findings.stalls is None else [dataclasses.asdict(stall) for stall in findings.stalls],
        "conditions": conditions(findings),
        "commands": [run.header.get("command") for run in findings.runs],
        "warnings": findings.warnings,
    }
    return json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def conditions(findings: Findings) -> list[str]:
    """One line per results file: what was measured on what, as far as the file says."""
    return [_conditions(run.header) for run in findings.runs]


def commands(findings: Findings) -> list[str]:
    """The command that made each file, where it is recorded."""
    return [f"made by: {run.header['command']}" for run in findings.runs if run.header.get("command")]


def budget_text(plan: dict[str, Any]) -> str:
    """`2.50 GiB (cgroup-v2)` or `none`."""
    budget, method = plan.get("budget_bytes"), plan.get("budget_method")
    return f"{budget / GIB:.2f} GiB ({method})" if budget else "none"


def _conditions(header: dict[str, Any]) -> str:
    model, plan, machine = header["model"], header["plan"], machine_facts(header)
    disk = " ".join(str(machine[key]) for key in ("device", "filesystem") if machine.get(key))
    parts = [
        model.get("filename", "model") + (f" {model['size'] / GIB:.2f} GiB" if "size" in model else ""),
        "" if header.get("source") else f"memory budget {budget_text(plan)}",
        f"read-ahead {machine['read_ahead_kb']} KiB" if machine.get("read_ahead_kb") is not None else "",
        disk + (f" in a file on {machine['loop_on']}" if machine.get("loop_on") else ""),
        {True: "cold", False: "warm"}.get(plan.get("cold"), ""),
        f"{plan['blocks']} blocks" if "blocks" in plan else "",
        "one process for all runs" if plan.get("process") == "shared" else "",
        f"{plan['n_threads']} threads" if "n_threads" in plan else "",
        str(machine.get("name") or ""),
        f"kernel {machine['kernel']}" if machine.get("kernel") else "",
        header["created"][:10],
        f"by {header['source']}" if header.get("source") else "",
        *(
            arm_text(arm, percent)
            for arm in header["arms"]
            if (percent := injected_slowdown_percent(header, arm)) is not None
        ),
    ]
    return " · ".join(part for part in parts if part)


def statements(findings: Findings) -> list[str]:
    """The findings in words: each comparison, the blocks that an effect needs, each test's limit."""
    needed = [] if findings.effect is None else map(needed_sentence, findings.comparisons)
    placed = [s for s in findings.summaries if s.servers]
    return [
        *map(sentence, findings.comparisons),
        *needed,
        *wait_sentences(findings),
        *map(place_sentence, placed),
        *map(limit_sentence, findings.rooflines),
    ]


def sentence(c: Comparison) -> str:
    """The finding of one comparison in words."""
    pair = f"{c.candidate} against {c.baseline} in {c.test}"
    if c.outputs_equal is False:
        return f"outputs differ: no speed is reported for {pair} ({c.output_difference})"
    if c.void:
        return f"undecided: {pair} is void, {c.void}"
    if c.ratio is None:
        return f"undecided: {pair} has no block in which both arms finished"
    if c.ci95 is None:
        if c.unpaired:
            return f"undecided: {pair} is unpaired, {c.ratio:.2f}x, and without repetitions; no spread is known"
        return f"undecided: {pair} has one block, which shows no spread; run at least 3"
    low, high = c.ci95
    digits = _decimals(c.ci95)
    ratio = f"{c.ratio:.{digits}f}x"
    outputs = "same outputs" if c.outputs_equal else "outputs not compared"
    size = f"n = {c.n_blocks} blocks"
    if c.unpaired:
        size = f"unpaired, n = {c.unpaired[0]} and {c.unpaired[1]}"
    span = f"95 % interval {low:.{digits}f}-{high:.{digits}f}, {size}, {outputs}"
    drift = "" if c.drift_per_run is None else f"; drift {100 * c.drift_per_run:+.2g} % per run"
    if c.injected_ratio is not None:
        drift += f"; slowed on purpose: that alone makes {c.injected_ratio:.3f}x"
    bound = max(high - 1, 1 - low)
    limit = f"{number(max(100 * bound, 0.1), 2)} %"
    if c.same_build:
        again = f"{c.candidate} is {c.baseline} again (A/A) in {c.test}: {ratio} ({span}){drift}"
        if c.verdict is Verdict.UNDECIDED:
            found = "" if c.detectable_effect is None else f", and one of {percent(c.detectable_effect)} would be found"
            return f"noise floor: {again}; no difference larger than {limit} comes from the machine{found}"
        return f"warning: {again}; equal builds differ, so the machine or the order favours one (by chance: 1 in 20)"
    verb = _VERBS.get(c.test[:2], "runs")
    if c.verdict is Verdict.FASTER:
        return f"{c.candidate} {verb} {ratio} faster than {c.baseline} ({span}){drift}"
    if c.verdict is Verdict.SLOWER:
        return f"slower: {c.candidate} {verb} at {ratio} the speed of {c.baseline} ({span}){drift}"
    if bound <= _NARROW:
        return f"undecided: {pair} shows no difference larger than {limit} ({span}){drift}"
    return f"undecided: {pair} is too noisy to tell ({span}){drift}; more blocks narrow the interval"


def needed_sentence(c: Comparison) -> str:
    """How many blocks find the effect that was asked for, at the spread of those that are there."""
    need = c.blocks_needed
    if need is None:
        return f"how many blocks {c.candidate} in {c.test} needs is unknown: the spread takes two with both arms"
    most = "more than 1000"
    blocks = most if need.n_blocks is None else str(need.n_blocks)
    upper = most if need.n_blocks_upper is None else str(need.n_blocks_upper)
    return (
        f"a difference of {number(100 * need.effect)} % between {c.candidate} and {c.baseline} in {c.test} takes "
        f"{blocks} blocks ({upper} to be safe, {c.n_blocks} are here; {100 * need.power:.0f} % chance to find it, "
        f"spread {number(100 * need.spread, 2)} % per block)"
    )


def wait_sentences(findings: Findings) -> list[str]:
    """How long a token waits for reads in each arm, by comparison, or why that is not known."""
    known = [
        f"join wait in {c.test}: {number(c.candidate_io_wait_ms_per_token)} ms per token in {c.candidate}, "
        f"{number(c.baseline_io_wait_ms_per_token)} ms in {c.baseline} ({number(c.io_wait_ratio)}x)"
        for c in findings.comparisons
        if c.io_wait_ratio is not None and c.outputs_equal is not False
    ]
    untold = [f"join wait of {s.arm} in {s.test} is n/a: {s.io_wait_why}" for s in findings.summaries if s.io_wait_why]
    return known + untold


def place_sentence(s: Summary) -> str:
    """Where the layers of a distributed arm are, and what a token moves."""
    known = s.wire_bytes_per_token is not None
    traffic = f"a token moves {_wire_text(s)} KiB over the wire" if known else "bytes on the wire were not counted"
    return f"{s.arm} is distributed: its layers are on {', '.join(s.servers)}; in {s.test} {traffic}"


def limit_sentence(r: Roofline) -> str:
    """What bounds a token of one test."""
    reads = f"reading {number(r.must_read_mib)} MiB at {number(r.disk_mib_s)} MiB/s takes {number(r.read_ms)} ms"
    if r.limit_ms is None:
        return f"limit of {r.test}: per token, {reads}; the compute time in memory is not known"
    return (
        f"limit of {r.test}: {number(r.limit_ms)} ms per token; {reads}, computing in memory {number(r.compute_ms)} ms"
    )
