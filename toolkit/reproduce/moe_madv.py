"""The MoE-MADV experiment: decode with and without a hint for each routed expert, on two short prompts.

Published: hint off and on, 24 tokens after a short prompt, context 1024, 3 repeats, no prewarm. Ours: `off` is the
patched build with its hooks idle, `madv` the published behaviour; stock and the other modes run beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolkit import stats
from toolkit.bench.plan import MODES, STOCK
from toolkit.console import GIB
from toolkit.evidence.report import markdown_table, number
from toolkit.reproduce import positions, rows
from toolkit.reproduce.published import Published, load
from toolkit.reproduce.setup import Options, Setup, measure, prepare
from toolkit.results import RunData

NAME = "moe-madv"
OFF, ON = "off", "madv"
ARMS = (STOCK, *MODES)
QUICK_ARMS = (OFF, ON, "hint")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Prompts of one kind; the published lengths are those their rates and times give."""

    name: str
    prompts: tuple[str, str]
    n_prompt: int
    n_gen: int


DECODE = Suite(name="decode", prompts=("json", "plain"), n_prompt=16, n_gen=24)
PREFILL = Suite(name="prefill", prompts=("note", "code"), n_prompt=88, n_gen=2)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured, beside what was published."""

    published: Published
    runs: dict[str, dict[str, RunData]]  # by suite and prompt
    arms: list[str]
    ratios: list[rows.RatioRow]
    conditions: list[rows.Condition]
    failures: list[str]


def reproduce(options: Options, *, quick: bool, matrix: bool) -> Report | None:
    """Run the experiment, or continue it; None after a dry run. With `matrix` the prefill suite runs too."""
    setup = prepare(options, NAME, QUICK_ARMS if quick else ARMS, (OFF, ON))
    if setup is None:
        return None
    suites = (DECODE, PREFILL) if matrix else (DECODE,)
    runs = {suite.name: _run(setup, suite) for suite in suites}
    published = load(NAME)
    return Report(
        published=published,
        runs=runs,
        arms=setup.arm_names,
        ratios=_ratios(published, runs, setup.arm_names),
        conditions=rows.differing(published, _conditions(list(runs["decode"].values()))),
        failures=rows.failures([run for by_prompt in runs.values() for run in by_prompt.values()]),
    )


def _run(setup: Setup, suite: Suite) -> dict[str, RunData]:
    length = suite.n_prompt + suite.n_gen
    found = {}
    for i, prompt in enumerate(suite.prompts):
        pool = positions.prescribed(setup)
        tokens = (
            pool.take(i * length, suite.n_prompt, suite.n_gen)
            if pool
            else positions.of_text(setup, prompt).take(0, suite.n_prompt, suite.n_gen)
        )
        found[prompt] = measure(setup, tokens, f"{suite.name}-{prompt}.jsonl")
    return found


def _conditions(runs: Sequence[RunData]) -> dict[str, str]:
    plan = runs[0].header["plan"]
    return rows.our_conditions(runs[0]) | {
        "context": str(plan["n_ctx"]),
        "load": _load(runs),
        "decoded": str(plan["n_gen"]),
        "hint off": "the patched build without the hint",
    }


def _load(runs: Sequence[RunData]) -> str:
    """What each arm read at load: with a mode on, a model larger than memory is not read ahead as a whole."""
    read: dict[str, list[float]] = {}
    for row in (r for run in runs for r in run.samples):
        if row.get("load_read_bytes") is not None:
            read.setdefault(row["arm"], []).append(row["load_read_bytes"] / GIB)
    return ", ".join(f"{arm} read {stats.mean(gib):.2f} GiB" for arm, gib in read.items()) or "not recorded"


def published_ratio(published: Published, field: str) -> float:
    """Hint on over hint off in one figure, of the means over both prompts; for wall time off over on."""
    values: dict[str, list[float]] = {"off": [], "on": []}
    for table in published.figures["decode"]:
        values[table["arm"]] += table[field]
    off, on = stats.mean(values["off"]), stats.mean(values["on"])
    return off / on if field == "wall_s" else on / off


def _ratios(published: Published, runs: dict[str, dict[str, RunData]], arms: Sequence[str]) -> list[rows.RatioRow]:
    found = []
    for suite, by_prompt in runs.items():
        fields = {"decode t/s": "gen_ts", "prompt t/s": "prompt_ts", "run time": "wall_s"}
        for what, field in fields.items():
            for arm in (a for a in arms if a != OFF):
                figure = published_ratio(published, field) if (suite, arm) == ("decode", ON) else None
                found.append(
                    rows.ratio(list(by_prompt.values()), arm, OFF, f"{suite} suite, {what}", field, published=figure)
                )
    return found


def as_json(report: Report) -> dict[str, Any]:
    """Everything, for tools: raw values of every process, ratios, conditions, files."""
    return {
        "experiment": NAME,
        "published": report.published.as_json(),
        "ours": [
            {"suite": suite, "prompt": prompt, "arm": arm, "processes": [asdict(p) for p in rows.processes(run, arm)]}
            for suite, by_prompt in report.runs.items()
            for prompt, run in by_prompt.items()
            for arm in report.arms
        ],
        "ratios": [asdict(r) for r in report.ratios],
        "conditions": [asdict(c) for c in report.conditions],
        "failures": report.failures,
        "files": [str(run.path) for by_prompt in report.runs.values() for run in by_prompt.values()],
    }


def as_text(report: Report) -> str:
    """Markdown: figures side by side, ratios, what differs."""
    parts = [f"# {report.published.title}, again", f"Published figures: {report.published.source}"]
    parts += ["## Decode suite", _side_by_side(report)]
    parts += ["## Ratios", ratio_table(report.ratios)]
    parts += ["## Long run and matrix", _matrix(report)]
    parts += ["## What differs", condition_table(report.conditions)]
    if report.failures:
        parts += ["## Failed", "\n".join(f"- {text}" for text in report.failures)]
    return "\n\n".join(parts)


def _side_by_side(report: Report) -> str:
    tables = {(t["prompt"], {"off": OFF, "on": ON}[t["arm"]]): t for t in report.published.figures["decode"]}
    body = []
    for prompt, run in report.runs["decode"].items():
        for arm in report.arms:
            theirs, ours = tables.get((prompt, arm), {}), rows.processes(run, arm)
            cells = [
                cell
                for field, key in (("wall_s", "wall_s"), ("prompt_ts", "prompt_ts"), ("gen_ts", "gen_ts"))
                for cell in (_mean(theirs.get(key, [])), _mean([getattr(p, field) for p in ours]))
            ]
            read = [p.mib_per_token for p in ours if p.mib_per_token is not None]
            equal = "" if arm == OFF else {True: "yes", False: "NO", None: "-"}[rows.outputs_equal([run], arm, OFF)]
            body.append([prompt, arm, *cells, _mean(read), equal])
    figures = ("wall s", "prompt t/s", "decode t/s")
    headings = ["prompt", "arm", *(f"{what}, {whose}" for what in figures for whose in ("published", "ours"))]
    return markdown_table([*headings, "MiB/token", "outputs equal"], body)


def _matrix(report: Report) -> str:
    """The published cases with a prewarm have no run of ours beside them: `ours` is the case without one."""
    body = []
    for case in report.published.figures["longrun"]:
        arm = {"hint on": ON}.get(case["case"])
        ours: list[rows.Process] = []
        if arm is not None:
            ours = [p for run in report.runs.get(case["suite"], {}).values() for p in rows.processes(run, arm)]
        pairs = (("wall_s", "wall_s"), ("prompt_ts", "prompt_ts"), ("gen_ts", "gen_ts"))
        cells = [
            cell
            for field, key in pairs
            for cell in (number(case[key]), _mean([getattr(p, field) for p in ours]) if ours else "not run")
        ]
        body.append([case["suite"], case["case"], str(case["n"]), *cells])
    figures = ("wall s", "prompt t/s", "decode t/s")
    headings = [f"{what}, {whose}" for what in figures for whose in ("published", "ours")]
    return markdown_table(["suite", "case", "published runs", *headings], body)


def ratio_table(ratios: Sequence[rows.RatioRow]) -> str:
    """One line for each arm and figure."""
    body = []
    for r in ratios:
        ours = "-" if r.ratio is None else f"{r.ratio:.2f}"
        if r.ratio is not None and r.ci95 is not None:
            ours += f" [{r.ci95[0]:.2f}, {r.ci95[1]:.2f}]"
        published = "-" if r.published is None else f"{r.published:.2f}"
        body.append([r.what, f"{r.arm} over {r.over}", published, ours, str(r.n_pairs), r.verdict])
    return markdown_table(["figure", "arms", "published", "ours [95 %]", "pairs", "verdict"], body)


def condition_table(conditions: Sequence[rows.Condition]) -> str:
    """One line for each condition that differs."""
    return markdown_table(["condition", "published", "ours"], [[c.what, c.published, c.ours] for c in conditions])


def _mean(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return number(stats.mean(known)) if known else "-"
