"""Throughput by length of the context: a fresh process for each length and repeat, and one session that grows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.bench.plan import Tokens
from toolkit.evidence.report import markdown_table, number
from toolkit.reproduce import positions, rows, tables
from toolkit.reproduce.positions import Positions
from toolkit.reproduce.published import Published, load
from toolkit.reproduce.setup import Options, measure, prepare
from toolkit.results import RunData

NAME = "context"


@dataclass(frozen=True, kw_only=True)
class Once:
    """One process of one arm at one length."""

    block: int
    prompt_ts: float | None  # of the added tokens alone
    gen_ts: float | None
    memory: rows.Memory


@dataclass(frozen=True, kw_only=True)
class Length:
    """One arm at one length: mean, sample SD, all values, outliers marked and kept."""

    arm: str
    length: int  # tokens in the context after the prompt, before anything is decoded there
    added: int  # of them those of this prompt
    prefill: dict[str, Any] | None
    decode: dict[str, Any] | None
    memory: rows.Memory  # over all processes
    runs: list[Once]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured, beside what was published."""

    published: Published
    fresh: list[Length]
    session: list[Length]  # in one process: prefill of the added tokens alone, decode after each of them
    conditions: list[rows.Condition]
    failures: list[str]
    runs: list[RunData]
    path: Path | None


def reproduce(options: Options, *, lengths: Sequence[int], n_gen: int, wanted: Sequence[str]) -> Report | None:
    """Run both series, or continue them; None after a dry run. `lengths` rise by more than `n_gen`."""
    setup = prepare(options, NAME, wanted, wanted)
    if setup is None:
        return None
    pool = positions.prescribed(setup) or positions.of_text(setup, "note")
    fresh = [measure(setup, pool.take(0, length, n_gen), f"fresh-{length}") for length in lengths]
    session = measure(setup, growing(pool, lengths, n_gen), f"session-{'-'.join(map(str, lengths))}")
    published, runs = load(NAME), [*fresh, session]
    return Report(
        published=published,
        fresh=[part for arm in setup.arm_names for run in fresh for part in parts(run, arm)],
        session=[part for arm in setup.arm_names for part in parts(session, arm)],
        conditions=rows.differing(published, conditions(runs, n_gen)),
        failures=rows.failures(runs),
        runs=runs,
        path=setup.report,
    )


def growing(pool: Positions, lengths: Sequence[int], n_gen: int) -> Tokens:
    """A session that reaches each length by a prompt and decodes `n_gen` tokens there, which stay in the context."""
    steps = [(after - before - n_gen, n_gen) for before, after in itertools.pairwise(lengths)]
    return pool.take(0, lengths[0], n_gen, *steps)


def conditions(runs: Sequence[RunData], n_gen: int) -> dict[str, str]:
    """Ours, under the names that the published ones use."""
    seen = rows.memory([row for run in runs for row in run.samples])
    hottest = seen.max_temperature_c
    return rows.our_conditions(runs[0]) | {
        "available memory": f"{tables.mib(seen.min_available_bytes)} at least",
        "swap": tables.mib(seen.swap_delta_bytes),
        "temperature": "n/a" if hottest is None else f"{hottest:.0f} °C at most",
        "decoded": str(n_gen),
    }


def parts(run: RunData, arm: str) -> list[Length]:
    """Every length that the processes of this arm came to, in rising order."""
    done = [row for row in run.samples if (row["arm"], row["status"]) == (arm, "ok")]
    found = []
    for depth in sorted({row["n_depth"] for row in done}):
        here = [row for row in done if row["n_depth"] == depth]
        added = max(row["n_prompt"] for row in here)
        runs = [_once([row for row in here if row["position"] == p]) for p in sorted({r["position"] for r in here})]
        found.append(
            Length(
                arm=arm,
                length=depth + added,
                added=added,
                prefill=rows.spread([x.prompt_ts for x in runs if x.prompt_ts is not None]),
                decode=rows.spread([x.gen_ts for x in runs if x.gen_ts is not None]),
                memory=rows.memory(here),
                runs=runs,
            )
        )
    return found


def _once(process: Sequence[dict[str, Any]]) -> Once:
    return Once(
        block=process[0]["block"],
        prompt_ts=next((row["avg_ts"] for row in process if row["n_prompt"]), None),
        gen_ts=next((row["avg_ts"] for row in process if row["n_gen"]), None),
        memory=rows.memory(process),
    )


def as_json(report: Report) -> dict[str, Any]:
    """Everything, for tools."""
    return {
        "experiment": NAME,
        "published": report.published.as_json(),
        "fresh": [asdict(x) for x in report.fresh],
        "session": [asdict(x) for x in report.session],
        "conditions": [asdict(c) for c in report.conditions],
        "failures": report.failures,
        "files": [str(run.path) for run in report.runs],
    }


def as_text(report: Report) -> str:
    """Markdown: published and own series, each run with its memory, what differs."""
    sections = [
        ("Fresh process for each length", _series(report.published.figures["fresh"], report.fresh)),
        (
            "One session; prefill is of the added tokens alone",
            _series(report.published.figures["session"], report.session),
        ),
        ("Every run", _runs({"fresh": report.fresh, "session": report.session})),
    ]
    return tables.page(report.published, sections, report.conditions, report.failures, report.runs)


def _series(published: Sequence[dict[str, Any]], lengths: Sequence[Length]) -> str:
    body = [
        [
            "published",
            str(r["length"]),
            "-",
            _given(r, "prefill"),
            _given(r, "decode"),
            tables.listed(r.get("decode_runs", [])),
            r.get("note", ""),
        ]
        for r in published
    ]
    body += [
        [
            x.arm,
            str(x.length),
            str(x.added),
            tables.spread(x.prefill),
            tables.spread(x.decode),
            tables.listed(x.decode["values"] if x.decode else []),
            _marked(x),
        ]
        for x in lengths
    ]
    return markdown_table(["arm", "context", "added", "prefill t/s", "decode t/s", "decode runs", "note"], body)


def _runs(series: dict[str, Sequence[Length]]) -> str:
    body = [
        [
            name,
            x.arm,
            str(x.length),
            str(once.block + 1),
            number(once.prompt_ts),
            number(once.gen_ts),
            tables.mib(once.memory.min_available_bytes),
            tables.mib(once.memory.swap_delta_bytes),
            number(once.memory.max_temperature_c) if once.memory.max_temperature_c is not None else "n/a",
        ]
        for name, lengths in series.items()
        for x in lengths
        for once in x.runs
    ]
    figures = ["prefill t/s", "decode t/s", "least available", "swap taken", "°C at most"]
    return markdown_table(["series", "arm", "context", "run", *figures], body)


def _given(row: dict[str, Any], what: str) -> str:
    mean, sd = row[f"{what}_ts"], row.get(f"{what}_sd")
    return f"{mean:.2f}" if sd is None else f"{mean:.2f} ± {sd:.2f}"


def _marked(x: Length) -> str:
    texts = []
    for what, found in (("prefill", x.prefill), ("decode", x.decode)):
        for i in found["outliers"] if found else ():
            texts.append(f"{what} run {i + 1} is an outlier, kept: {number(found['values'][i] if found else None)} t/s")
    return "; ".join(texts)
