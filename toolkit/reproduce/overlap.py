"""The layer read overlap experiment: prefill with the next layer read ahead, on, off, off, on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.evidence.report import markdown_table, number
from toolkit.reproduce import positions, rows
from toolkit.reproduce.moe_madv import condition_table, ratio_table
from toolkit.reproduce.published import Published, load
from toolkit.reproduce.setup import Options, measure, prepare
from toolkit.results import RunData

NAME = "overlap"
ON = "overlap"
N_GEN = 8
# Counters of the payload that are times a computing thread stood still for reads.
_WAITS = ("wait_ns", "hint_ns")


@dataclass(frozen=True, kw_only=True)
class ArmTimes:
    """One arm: seconds of prefill and of waiting in each process, in run order."""

    arm: str
    prompt_ts: list[float]
    waits_s: dict[str, list[float]]  # by counter; those that the rows carry


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured, beside what was published."""

    published: Published
    run: RunData
    times: list[ArmTimes]
    ratios: list[rows.RatioRow]
    outputs_equal: bool | None  # logits of every position, bit for bit
    text_equal: bool | None  # greedy tokens of the checked positions
    conditions: list[rows.Condition]
    failures: list[str]


def reproduce(options: Options, *, off: str, n_prompt: int) -> Report | None:
    """Run on, off, off, on (two repeats), or continue; None after a dry run. `off` is the arm without overlap."""
    setup = prepare(options, NAME, (ON, off), (ON, off))
    if setup is None:
        return None
    pool = positions.prescribed(setup) or positions.of_text(setup, "note")
    run = measure(setup, pool.take(0, n_prompt, N_GEN), f"{ON}-{off}-pp{n_prompt}.jsonl")
    published = load(NAME)
    greedy = {tuple(check["greedy"]) for check in run.checks if "greedy" in check}
    figure = published.figures["prefill"]["ratio"]
    ours = rows.our_conditions(run) | {"program": "llama.cpp", "order": _order(run)}
    return Report(
        published=published,
        run=run,
        times=[_times(run, arm) for arm in setup.arm_names],
        ratios=[
            rows.ratio([run], ON, off, "prompt t/s", "prompt_ts", published=figure),
            rows.ratio([run], ON, off, "decode t/s", "gen_ts"),
        ],
        outputs_equal=rows.outputs_equal([run], ON, off),
        text_equal=len(greedy) == 1 if greedy else None,
        conditions=rows.differing(published, ours),
        failures=rows.failures([run]),
    )


def _order(run: RunData) -> str:
    """The order that really ran, in the published words."""
    first = {row["position"]: row["arm"] for row in run.samples}
    return ", ".join("on" if first[position] == ON else "off" for position in sorted(first))


def _times(run: RunData, arm: str) -> ArmTimes:
    found = rows.processes(run, arm)
    known = [name for name in _WAITS if any(name in p.hints for p in found)]
    return ArmTimes(
        arm=arm,
        prompt_ts=[p.prompt_ts for p in found if p.prompt_ts is not None],
        waits_s={name: [p.hints.get(name, 0) / 1e9 for p in found] for name in known},
    )


def as_json(report: Report) -> dict[str, Any]:
    """Everything, for tools."""
    return {
        "experiment": NAME,
        "published": report.published.as_json(),
        "ours": [asdict(t) for t in report.times],
        "order": _order(report.run),
        "ratios": [asdict(r) for r in report.ratios],
        "outputs_equal": report.outputs_equal,
        "text_equal": report.text_equal,
        "conditions": [asdict(c) for c in report.conditions],
        "failures": report.failures,
        "files": [str(report.run.path)],
    }


def as_text(report: Report) -> str:
    """Markdown: ratio, waits, equality, what differs."""
    figures = report.published.figures["prefill"]
    said = {True: "equal", False: "DIFFERENT", None: "unknown"}
    equality = [
        ["logits", said[figures["logits_equal"]], said[report.outputs_equal]],
        ["text", said[figures["text_equal"]], said[report.text_equal]],
    ]
    parts = [
        f"# {report.published.title}, again",
        f"Published figures: {report.published.source}",
        "## Ratios",
        ratio_table(report.ratios),
        "## Time spent waiting for reads",
        _waits(report.times, figures),
        "## Outputs",
        markdown_table(["output", "published", "ours"], equality),
        "## What differs",
        condition_table(report.conditions),
    ]
    if report.failures:
        parts += ["## Failed", "\n".join(f"- {text}" for text in report.failures)]
    return "\n\n".join(parts)


def _waits(times: Sequence[ArmTimes], figures: dict[str, Any]) -> str:
    names = {"wait_ns": "waiting for reads, s", "hint_ns": "in the hook, reads asked for included, s"}
    body = []
    for t in times:
        published = figures["join_on_s" if t.arm == ON else "join_off_s"]
        cells = [", ".join(number(s) for s in t.waits_s.get(name, [])) or "not in the rows" for name in names]
        body.append([t.arm, ", ".join(number(x) for x in t.prompt_ts), number(published), *cells])
    return markdown_table(["arm", "prompt t/s, in order", "joins, s, published", *names.values()], body)
