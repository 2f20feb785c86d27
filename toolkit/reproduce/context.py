"""Throughput by length of the context: a fresh process for each length and repeat, and one session that grows."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from toolkit.bench import counters
from toolkit.console import MIB
from toolkit.evidence.report import markdown_table, number
from toolkit.files import write_text
from toolkit.reproduce import positions, rows
from toolkit.reproduce.moe_madv import condition_table
from toolkit.reproduce.published import Published, load
from toolkit.reproduce.setup import Options, Setup, measure, prepare
from toolkit.results import RunData

NAME = "context"
N_GEN = 16
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Length:
    """Throughput of one arm at one length: mean, sample SD, all values, outliers marked and kept."""

    arm: str
    length: int  # tokens in the context when the part ends
    prefill: dict[str, Any] | None
    decode: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured, beside what was published."""

    published: Published
    fresh: list[Length]
    session: list[Length]  # prefill of the added interval alone; decode after the last one
    memory: dict[str, int | None]
    conditions: list[rows.Condition]
    failures: list[str]
    files: list[Path]


class MemoryWatch:
    """Lowest available memory and highest use of swap while it is entered, kept in `path` over restarts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._seen: list[tuple[int | None, int | None]] = []

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        before = self.read(self._path)
        lowest = [a for a, _ in self._seen if a is not None]
        free = [s for _, s in self._seen if s is not None]
        used = max(free[0] - s for s in free) if free else None
        merged = {
            "min_available_bytes": _least(min(lowest, default=None), before.get("min_available_bytes")),
            "swap_delta_bytes": _most(used, before.get("swap_delta_bytes")),
        }
        write_text(self._path, json.dumps(merged) + "\n")

    def _poll(self) -> None:
        while True:
            now = counters.snapshot()
            self._seen.append((now.mem_available_bytes, now.swap_free_bytes))
            if self._stop.wait(_POLL_S):
                return

    @staticmethod
    def read(path: Path) -> dict[str, int | None]:
        """What was seen so far; empty when nothing was."""
        try:
            found: dict[str, int | None] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _most(a: int | None, b: int | None) -> int | None:
    return max((x for x in (a, b) if x is not None), default=None)


def reproduce(options: Options, *, lengths: Sequence[int], wanted: Sequence[str]) -> Report | None:
    """Run both series, or continue them; None after a dry run. `lengths` rise; the session adds their differences."""
    setup = prepare(options, NAME, wanted, wanted)
    if setup is None:
        return None
    pool = positions.prescribed(setup) or positions.of_text(setup, "note")
    watched = setup.out / "memory.json"
    fresh: dict[int, RunData] = {}
    with MemoryWatch(watched):
        for length in lengths:
            fresh[length] = measure(setup, pool.take(0, length, N_GEN), f"fresh-{length}.jsonl")
        session = _session(setup, pool, lengths)
    published = load(NAME)
    runs = [*fresh.values(), session]
    memory = MemoryWatch.read(watched)
    ours = rows.our_conditions(session) | {
        "available memory": _mib(memory.get("min_available_bytes")) + " at least",
        "swap": _mib(memory.get("swap_delta_bytes")),
    }
    return Report(
        published=published,
        fresh=[
            Length(
                arm=arm,
                length=length,
                prefill=rows.spread([p.prompt_ts for p in rows.processes(run, arm) if p.prompt_ts is not None]),
                decode=rows.spread([p.gen_ts for p in rows.processes(run, arm) if p.gen_ts is not None]),
            )
            for arm in setup.arm_names
            for length, run in fresh.items()
        ],
        session=[part for arm in setup.arm_names for part in intervals(session, arm, lengths[0])],
        memory=memory,
        conditions=rows.differing(published, ours),
        failures=rows.failures(runs),
        files=[run.path for run in runs],
    )


def _session(setup: Setup, pool: positions.Positions, lengths: Sequence[int]) -> RunData:
    """One process takes the context in steps of the first length: each step is one batch, timed by itself."""
    step = lengths[0]
    total = lengths[-1] // step * step
    tokens = pool.take(0, total, N_GEN)
    return measure(setup, tokens, f"session-{step}-{total}.jsonl", n_batch=step, n_ubatch=min(step, 512))


def intervals(run: RunData, arm: str, step: int) -> list[Length]:
    """Throughput of every added interval of `step` tokens, over all processes of the arm."""
    prompts = [r for r in run.samples if (r["arm"], r["status"]) == (arm, "ok") and r["test"].startswith("pp")]
    decoded = [p.gen_ts for p in rows.processes(run, arm) if p.gen_ts is not None]
    n = min((len(row["token_ms"]) for row in prompts), default=0)
    return [
        Length(
            arm=arm,
            length=step * (i + 1),
            prefill=rows.spread([1000 * step / row["token_ms"][i] for row in prompts]),
            decode=rows.spread(decoded) if i == n - 1 else None,
        )
        for i in range(n)
    ]


def as_json(report: Report) -> dict[str, Any]:
    """Everything, for tools."""
    return {
        "experiment": NAME,
        "published": report.published.as_json(),
        "fresh": [asdict(x) for x in report.fresh],
        "session": [asdict(x) for x in report.session],
        "memory": report.memory,
        "conditions": [asdict(c) for c in report.conditions],
        "failures": report.failures,
        "files": [str(path) for path in report.files],
    }


def as_text(report: Report) -> str:
    """Markdown: published and own series, memory, what differs."""
    parts = [f"# {report.published.title}, again", f"Published figures: {report.published.source}"]
    for series, lengths, title in (
        ("fresh", report.fresh, "Fresh process for each length"),
        ("session", report.session, "One session; prefill is of the added tokens alone"),
    ):
        body = [
            [
                "published",
                str(r["length"]),
                _given(r, "prefill"),
                _given(r, "decode"),
                _runs(r.get("decode_runs", [])),
                r.get("note", ""),
            ]
            for r in report.published.figures[series]
        ]
        body += [
            [
                x.arm,
                str(x.length),
                _shown(x.prefill),
                _shown(x.decode),
                _runs(x.decode["values"] if x.decode else []),
                _marked(x),
            ]
            for x in lengths
        ]
        parts += [
            f"## {title}",
            markdown_table(["arm", "context", "prefill t/s", "decode t/s", "decode runs", "note"], body),
        ]
    parts += ["## What differs", condition_table(report.conditions)]
    if report.failures:
        parts += ["## Failed", "\n".join(f"- {text}" for text in report.failures)]
    return "\n\n".join(parts)


def _given(row: dict[str, Any], what: str) -> str:
    mean, sd = row[f"{what}_ts"], row.get(f"{what}_sd")
    return f"{mean:.2f}" if sd is None else f"{mean:.2f} ± {sd:.2f}"


def _shown(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return number(found["mean"]) if found["sd"] is None else f"{number(found['mean'])} ± {number(found['sd'], 2)}"


def _runs(values: Sequence[float]) -> str:
    """Every run: among three or four values no rule can tell an outlier, a reader can."""
    return ", ".join(number(value) for value in values)


def _marked(x: Length) -> str:
    texts = []
    for what, found in (("prefill", x.prefill), ("decode", x.decode)):
        for i in found["outliers"] if found else ():
            texts.append(f"{what} run {i + 1} is an outlier, kept: {number(found['values'][i] if found else None)} t/s")
    return "; ".join(texts)


def _mib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / MIB:.0f} MiB"
