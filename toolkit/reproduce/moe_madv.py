"""The MoE-MADV experiment: decode with and without a hint for each routed expert, on two short prompts.

Published: hint off and on, 24 tokens after a short prompt, context 1024, 3 repeats, no prewarm; and a matrix of a
decode and a prefill suite that ran for five hours. Ours: `off` is the patched build with its hooks idle, `madv` the
published behaviour; stock and the other modes run beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit import stats
from toolkit.bench.plan import MODES, STOCK, Tokens
from toolkit.console import GIB
from toolkit.errors import BenchError
from toolkit.evidence.report import markdown_table, number, percent
from toolkit.model.layout import Access, ModelLayout
from toolkit.reproduce import positions, rows, tables
from toolkit.reproduce.prewarmed import PREWARM, with_prewarm
from toolkit.reproduce.published import Published, load
from toolkit.reproduce.setup import Options, Setup, measure, prepare
from toolkit.results import RunData

NAME = "moe-madv"
OFF, ON = "off", "madv"
ARMS = (STOCK, *MODES)
QUICK_ARMS = (OFF, ON, "hint")
N_CTX = 1024


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Prompts of one kind; the published lengths are those their rates and times give."""

    name: str
    prompts: tuple[str, str]
    n_prompt: int
    n_gen: int


DECODE = Suite(name="decode", prompts=("json", "plain"), n_prompt=16, n_gen=24)
PREFILL = Suite(name="prefill", prompts=("note", "code"), n_prompt=88, n_gen=2)
SUITES = (DECODE, PREFILL)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of theirs and the same of ours, as text."""

    what: str
    published: str
    ours: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured, beside what was published."""

    published: Published
    runs: dict[str, dict[str, RunData]]  # by suite and prompt
    arms: list[str]
    ratios: list[rows.RatioRow]
    profile: list[Figure]
    conditions: list[rows.Condition]
    failures: list[str]
    path: Path | None


def reproduce(options: Options, *, quick: bool, matrix: bool, hours: float | None) -> Report | None:
    """Run the experiment, or continue it; None after a dry run.

    With `matrix` the prefill suite runs too; with `hours` both suites run until these are used up, a quarter of
    them for each prompt, instead of a number of repeats.
    """
    if options.arms and OFF not in options.arms:
        raise BenchError(
            f"the arm {OFF} is missing, with which all others are compared",
            where="--arms",
            hint=f"--arms {','.join((OFF, *options.arms))}",
        )
    setup = prepare(options, NAME, QUICK_ARMS if quick else ARMS, (OFF, ON))
    if setup is None:
        return None
    suites = SUITES if matrix or hours else (DECODE,)
    tokens = {suite.name: _tokens(setup, suite) for suite in suites}
    covered = None
    if len(suites) > 1:
        setup, covered = with_prewarm(
            setup, (OFF, ON), [t for by_prompt in tokens.values() for t in by_prompt.values()]
        )
    part = ""
    changes: dict[str, Any] = {"n_ctx": N_CTX}
    if hours is not None:
        part = "longrun-"
        changes |= {"blocks": None, "minutes": 60 * hours / sum(len(suite.prompts) for suite in suites)}
    runs = {
        suite: {prompt: measure(setup, t, f"{part}{suite}-{prompt}", **changes) for prompt, t in by_prompt.items()}
        for suite, by_prompt in tokens.items()
    }
    published = load(NAME)
    return Report(
        published=published,
        runs=runs,
        arms=setup.arm_names,
        ratios=ratios(published, runs, setup.arm_names),
        profile=[
            *profile(published, runs, setup.layout, list(tokens[DECODE.name].values())),
            Figure(
                what="choices of all suites that the prewarmed experts cover",
                published=published.figures["prewarm"]["coverage"],
                ours="not run" if covered is None else percent(covered),
            ),
        ],
        conditions=rows.differing(published, conditions(list(runs[DECODE.name].values()))),
        failures=rows.failures([run for by_prompt in runs.values() for run in by_prompt.values()]),
        path=setup.report,
    )


def _tokens(setup: Setup, suite: Suite) -> dict[str, Tokens]:
    """By prompt: neighbouring positions of what a synthetic model prescribes, or the texts."""
    length, pool = suite.n_prompt + suite.n_gen, positions.prescribed(setup)
    return {
        prompt: pool.take(i * length, suite.n_prompt, suite.n_gen)
        if pool
        else positions.of_text(setup, prompt).take(0, suite.n_prompt, suite.n_gen)
        for i, prompt in enumerate(suite.prompts)
    }


def conditions(runs: Sequence[RunData]) -> dict[str, str]:
    """Ours, under the names that the published ones use."""
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


def published_means(published: Published, field: str) -> tuple[float, float]:
    """Hint off and on: means over both prompts and all runs."""
    values: dict[str, list[float]] = {"off": [], "on": []}
    for table in published.figures["decode"]:
        values[table["arm"]] += table[field]
    return stats.mean(values["off"]), stats.mean(values["on"])


def published_ratio(published: Published, field: str) -> float:
    """Hint on over hint off in one figure; for wall time off over on."""
    off, on = published_means(published, field)
    return off / on if field == "wall_s" else on / off


def ratios(published: Published, runs: dict[str, dict[str, RunData]], arms: Sequence[str]) -> list[rows.RatioRow]:
    """Every arm over hint off in every figure of every suite."""
    found = []
    for suite, by_prompt in runs.items():
        fields = {"decode t/s": "gen_ts", "prompt t/s": "prompt_ts", "run time": "wall_s"}
        for what, field in fields.items():
            for arm in (a for a in arms if a != OFF):
                figure = published_ratio(published, field) if (suite, arm) == (DECODE.name, ON) else None
                found.append(
                    rows.ratio(list(by_prompt.values()), arm, OFF, f"{suite} suite, {what}", field, published=figure)
                )
    return found


def profile(
    published: Published, runs: dict[str, dict[str, RunData]], layout: ModelLayout, tokens: Sequence[Tokens]
) -> list[Figure]:
    """Where time and bytes go: share of waiting for the disk with the hint off, and what a decoded token needs."""
    theirs = published.figures["profile"]
    found = []
    for what, test in (("prefill", "pp"), ("decode", "tg")):
        off = [r for run in runs[DECODE.name].values() for r in run.samples if (r["arm"], r["status"]) == (OFF, "ok")]
        share = rows.io_share([row for row in off if row["test"].startswith(test)])
        found.append(
            Figure(what=f"{what}, hint off: part of the time with reads", published=theirs[what], ours=percent(share))
        )
    routed = layout.nbytes(Access.ROUTED)
    per_expert = max((layer.bytes_per_expert or 0 for layer in layout.layers), default=0)
    per_token = layout.routed_bytes_per_token
    return [
        *found,
        Figure(
            what="Jaccard of the expert sets of neighbouring decoded tokens",
            published=f"{theirs['jaccard']}",
            ours=number(jaccard(tokens)),
        ),
        Figure(
            what="GiB of experts per decoded token",
            published=f"{theirs['round_gib']}",
            ours="-" if per_token is None else number(per_token / GIB),
        ),
        Figure(what="bytes of one expert", published=f"{theirs['bytes_per_expert']:,}", ours=f"{per_expert:,}"),
        Figure(
            what="GiB of all experts",
            published=number(theirs["routed_bytes"] / GIB, 4),
            ours="-" if routed is None else number(routed / GIB, 4),
        ),
    ]


def jaccard(tokens: Sequence[Tokens]) -> float | None:
    """Mean over layers and neighbouring decoded tokens; None when the experts are not prescribed."""
    found: list[float] = []
    for t in tokens:
        if t.experts is None:
            return None
        for before, after in itertools.pairwise(t.experts[len(t.prompt) :]):
            for a, b in zip(before, after, strict=True):
                found.append(len(np.intersect1d(a, b)) / len(np.union1d(a, b)))
    return stats.mean(found) if found else None


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
        "profile": [asdict(f) for f in report.profile],
        "conditions": [asdict(c) for c in report.conditions],
        "failures": report.failures,
        "files": [str(run.path) for by_prompt in report.runs.values() for run in by_prompt.values()],
    }


def as_text(report: Report) -> str:
    """Markdown: figures side by side, ratios, matrix, what differs."""
    sections = [
        ("Headline", _headline(report)),
        ("Decode suite", _side_by_side(report)),
        ("Ratios", tables.ratio_table(report.ratios)),
        ("Matrix of the five-hour run", _matrix(report)),
        ("Profile", _figures(report.profile)),
    ]
    runs = [run for by_prompt in report.runs.values() for run in by_prompt.values()]
    return tables.page(report.published, sections, report.conditions, report.failures, runs)


def _headline(report: Report) -> str:
    """Both means and the change from one to the other; ours for each arm that a reader may take for the hint."""
    theirs = {field: published_means(report.published, field) for field in ("gen_ts", "wall_s")}
    n = sum(len(table["wall_s"]) for table in report.published.figures["decode"] if table["arm"] == "on")
    body = [["published", "hint on", *_change(*theirs["gen_ts"]), *_change(*theirs["wall_s"]), str(n)]]
    by_arm = {
        arm: [p for run in report.runs[DECODE.name].values() for p in rows.processes(run, arm)] for arm in report.arms
    }
    for arm in (a for a in report.arms if a != OFF):
        off, on = by_arm[OFF], by_arm[arm]
        cells = [cell for f in ("gen_ts", "wall_s") for cell in _change(_mean_of(off, f), _mean_of(on, f))]
        body.append(["ours", arm, *cells, f"{len(off)}, {len(on)}"])
    headings = ["", "arm", "decode t/s, off → on", "change", "run time s, off → on", "change", "runs"]
    return markdown_table(headings, body)


def _mean_of(processes: Sequence[rows.Process], field: str) -> float | None:
    values = [value for p in processes if (value := getattr(p, field)) is not None]
    return stats.mean(values) if values else None


def _change(off: float | None, on: float | None) -> tuple[str, str]:
    if off is None or on is None:
        return "-", "-"
    return f"{number(off)} → {number(on)}", f"{100 * (on / off - 1):+.1f} %"


def _side_by_side(report: Report) -> str:
    published = {(t["prompt"], {"off": OFF, "on": ON}[t["arm"]]): t for t in report.published.figures["decode"]}
    body = []
    for prompt, run in report.runs[DECODE.name].items():
        for arm in report.arms:
            theirs, ours = published.get((prompt, arm), {}), rows.processes(run, arm)
            cells = [
                cell
                for field in ("wall_s", "prompt_ts", "gen_ts")
                for cell in (tables.listed(theirs.get(field, [])) or "-", _each([getattr(p, field) for p in ours]))
            ]
            equal = "" if arm == OFF else {True: "yes", False: "NO", None: "-"}[rows.outputs_equal([run], arm, OFF)]
            body.append([prompt, arm, *cells, tables.mean([p.mib_per_token for p in ours]), equal])
    figures = ("wall s", "prompt t/s", "decode t/s")
    headings = ["prompt", "arm", *(f"{what}, {whose}" for what in figures for whose in ("published", "ours"))]
    return markdown_table([*headings, "MiB/token", "outputs equal"], body)


def _each(values: Sequence[float | None]) -> str:
    """All runs of a short experiment, mean and deviation of a long one."""
    known = [v for v in values if v is not None]
    return tables.listed(known) or "-" if len(known) <= 3 else tables.spread(rows.spread(known))


def _matrix(report: Report) -> str:
    """Published cases with ours of the same suite and arm, where that ran."""
    arms = {"hint on": ON, "prewarm, hint on": f"{PREWARM}{ON}", "prewarm, hint off": f"{PREWARM}{OFF}"}
    body = []
    for case in report.published.figures["longrun"]:
        arm = arms[case["case"]]
        ours = [p for run in report.runs.get(case["suite"], {}).values() for p in rows.processes(run, arm)]
        cells = [
            cell
            for field in ("wall_s", "prompt_ts", "gen_ts")
            for cell in (number(case[field]), tables.mean([getattr(p, field) for p in ours]) if ours else "not run")
        ]
        body.append([case["suite"], case["case"], str(case["n"]), str(len(ours)), *cells])
    figures = ("wall s", "prompt t/s", "decode t/s")
    headings = [f"{what}, {whose}" for what in figures for whose in ("published", "ours")]
    return markdown_table(["suite", "case", "runs, published", "runs, ours", *headings], body)


def _figures(figures: Sequence[Figure]) -> str:
    return markdown_table(["figure", "published", "ours"], [[f.what, f.published, f.ours] for f in figures])
