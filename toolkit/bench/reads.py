"""Ways to read experts from a file larger than the memory for it, measured against each other.

The reading itself is done by reads.c, compiled on first use, in a process of its own per sample.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit import stats
from toolkit.bench import limits, pagecache
from toolkit.bench.disk import storage_of
from toolkit.console import GIB, MIB
from toolkit.errors import BenchError, CommandError, MachineError
from toolkit.files import atomic_path, sha256_file
from toolkit.process import run as run_process

FORMAT = 1

METHODS = {
    "fault": "page faults, no hint",
    "willneed": "MADV_WILLNEED in pieces, then touched by the same thread",
    "pool": "MADV_WILLNEED in pieces by the readers, touched by one other thread",
    "populate": "MADV_POPULATE_READ",
    "readahead": "readahead(2) in pieces, then touched by the same thread",
    "pread": "pread into a buffer, through the page cache",
    "direct": "pread with O_DIRECT into a buffer",
    "uring": "io_uring with O_DIRECT from one thread, as many at a time as readers",
}

_SOURCES = [Path(__file__).with_name(name) for name in ("reads.c", "reads-uring.c", "reads.h")]
_EXIT_CANNOT = 77
_ALIGN = 32  # tensors start at multiples of it in a GGUF file
_PAGE = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096
_LEAST_WINDOW = 128 * 1024  # Linux' default read-ahead
_MOST_SLICES = 1 << 16
_MOST_READERS = 256

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure; sizes in bytes."""

    methods: tuple[str, ...]
    readers: tuple[int, ...]
    slice_bytes: int
    group: int  # slices that are wanted at the same time; the next group starts when they are there
    window: int | None  # most bytes in one hint; None: what the kernel reads at once for this file
    seconds: float  # for one sample, then its group is finished
    blocks: int
    budget: int | None  # memory for the reading process and its page cache


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One way of reading with some readers, over all blocks that have it."""

    method: str
    readers: int
    mib_s: float | None  # geometric mean; None: not measured
    ci95: tuple[float, float] | None  # None: fewer than two blocks
    n_blocks: int
    amplification: float | None  # bytes from the disk / bytes wanted
    cpu_s_per_gib: float | None
    group_p50_ms: float | None
    group_p95_ms: float | None
    why: str | None  # why there is no figure


def measure(file: Path, plan: Plan, home: Path, *, progress: Callable[[str], None]) -> Iterator[Row]:
    """Rows of the results as they come: one `reads` row with the conditions, then a `sample` row for each.

    The file is dropped from the page cache before each sample. Order: every way once in a block, shuffled, each
    second block backwards. Raises BenchError or MachineError where nothing can be measured.
    """
    size = _check(file, plan)
    storage = storage_of(file)
    window = plan.window or max(_LEAST_WINDOW, (storage.read_ahead_kb or 0) * 1024)
    helper = build_helper(home)
    method = limits.detect()
    if plan.budget is not None and method.name == "none":
        raise BenchError("no memory budget is possible here", where=method.why, hint="leave out --budget")
    yield {
        "kind": "reads",
        "format": FORMAT,
        "file": file.name,
        "file_bytes": size,
        "plan": {**dataclasses.asdict(plan), "window": window},
        "budget_method": "none" if plan.budget is None else method.name,
        "storage": dataclasses.asdict(storage),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
    }
    for block in range(plan.blocks):
        offsets = "\n".join(map(str, slices(size, plan, block).tolist()))
        for position, (name, readers) in enumerate(_order(plan, block)):
            progress(f"block {block + 1}/{plan.blocks}: {name}, readers: {readers}")
            row = {"kind": "sample", "block": block, "position": position, "method": name, "readers": readers}
            evicted = pagecache.evict([file])
            argv = [helper, name, file, plan.slice_bytes, readers, plan.seconds, window, plan.group]
            with limits.memory_budget(plan.budget, method=method) as budget:
                yield {**row, "cold": evicted.cold, **_sample(budget.command(list(map(str, argv))), offsets)}
    pagecache.evict([file])


def _check(file: Path, plan: Plan) -> int:
    if sys.platform != "linux":
        raise MachineError(f"these ways to read are Linux', this is {sys.platform}")
    if not file.is_file():
        raise BenchError("not a file", where=file)
    if unknown := [name for name in plan.methods if name not in METHODS]:
        raise BenchError(f"there is no way {unknown[0]} to read", where="--methods", hint=f"use {', '.join(METHODS)}")
    if bad := [n for n in plan.readers if not 1 <= n <= _MOST_READERS]:
        raise BenchError(f"{bad[0]} readers; use 1 to {_MOST_READERS}", where="--readers")
    if plan.window is not None and plan.window % _PAGE:
        raise BenchError(f"{plan.window} bytes are no whole pages", where="--window", hint=f"use multiples of {_PAGE}")
    size = file.stat().st_size
    if len(slices(size, plan, 0)) == 0:
        need = plan.group * _stride(plan) / MIB
        raise BenchError(f"one group of slices needs {need:.0f} MiB, the file has {size / MIB:.0f}", where=file)
    return size


def _stride(plan: Plan) -> int:
    return -(-plan.slice_bytes // _PAGE) * _PAGE + _PAGE


def slices(size: int, plan: Plan, block: int) -> NDArray[np.int64]:
    """Offsets of the slices to read, whole groups in random order, none twice, starts as unaligned as in a GGUF."""
    rng = np.random.default_rng(block)
    stride = _stride(plan)
    order = rng.permutation(size // stride)[:_MOST_SLICES]
    order = order[: len(order) // plan.group * plan.group]
    return np.asarray(order * stride + rng.integers(1, _PAGE // _ALIGN, len(order)) * _ALIGN, dtype=np.int64)


def _order(plan: Plan, block: int) -> list[tuple[str, int]]:
    ways = [(name, readers) for name in plan.methods for readers in plan.readers]
    shuffled = [ways[i] for i in np.random.default_rng(block // 2).permutation(len(ways))]
    return shuffled[::-1] if block % 2 else shuffled


def _sample(argv: Sequence[str], offsets: str) -> Row:
    done = run_process(argv, stdin=offsets, check=False)
    if done.returncode == 0:
        return {"status": "done", **json.loads(done.stdout)}
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"status": "skipped" if done.returncode == _EXIT_CANNOT else "failed", "reason": reason}


def build_helper(home: Path) -> Path:
    """The compiled reader, made once for each version of its source. Raises MachineError."""
    version = hashlib.sha256("".join(map(sha256_file, _SOURCES)).encode()).hexdigest()
    out = home / "tools" / f"reads-{version[:12]}"
    if out.exists():
        return out
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise MachineError("there is no C compiler", hint="install one, such as gcc")
    flags = ["-std=gnu11", "-O2", "-pthread"]
    try:
        with atomic_path(out) as partial:
            run_process([*compiler.split(), *flags, *_SOURCES[:2], "-o", partial])
    except CommandError as e:
        raise MachineError(f"the reader does not compile: {e.what}", where=e.where) from e
    return out


# --- From rows to figures


def figures(rows: Sequence[Row]) -> list[Figure]:
    """A figure for each way and number of readers, in the order of the plan."""
    plan = rows[0]["plan"]
    found = []
    for name in plan["methods"]:
        for readers in plan["readers"]:
            mine = [r for r in rows[1:] if (r["method"], r["readers"]) == (name, readers)]
            done = [r for r in mine if r["status"] == "done" and r["groups"]]
            why = next((r.get("reason") for r in mine if r["status"] != "done"), None)
            found.append(_figure(name, readers, done, why or "no whole group"))
    return found


def _figure(name: str, readers: int, done: Sequence[Row], why: str) -> Figure:
    if not done:
        return Figure(
            method=name,
            readers=readers,
            mib_s=None,
            ci95=None,
            n_blocks=0,
            amplification=None,
            cpu_s_per_gib=None,
            group_p50_ms=None,
            group_p95_ms=None,
            why=why,
        )
    speeds = [math.log(r["bytes"] / MIB / r["seconds"]) for r in done]
    interval = stats.mean_interval(speeds)
    nbytes = sum(r["bytes"] for r in done)
    return Figure(
        method=name,
        readers=readers,
        mib_s=math.exp(stats.mean(speeds)),
        ci95=interval and (math.exp(interval[0]), math.exp(interval[1])),
        n_blocks=len(done),
        amplification=sum(r["read_bytes"] for r in done) / nbytes,
        cpu_s_per_gib=sum(r["cpu_s"] for r in done) / (nbytes / GIB),
        group_p50_ms=float(np.median([r["group_p50_s"] for r in done])) * 1000,
        group_p95_ms=float(np.median([r["group_p95_s"] for r in done])) * 1000,
        why=None,
    )


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Conditions and figures as plain data."""
    return {**rows[0], "figures": [dataclasses.asdict(f) for f in figures(rows)]}


def as_markdown(rows: Sequence[Row]) -> str:
    """A table of MiB/s by readers, and one with the rest for the best number of readers of each way."""
    head, found = rows[0], figures(rows)
    plan = head["plan"]
    by_way = {name: [f for f in found if f.method == name] for name in plan["methods"]}
    lines = [
        _conditions(head),
        "",
        *_table(
            ["MiB/s", *(f"{n} reader{'s' if n > 1 else ''}" for n in plan["readers"])],
            [[name, *(_speed(f) for f in own)] for name, own in by_way.items()],
        ),
        "",
        *_table(
            ["best of", "readers", "MiB/s", "read / wanted", "CPU s/GiB", "group p50 ms", "p95 ms", "how"],
            [_best(own) for own in by_way.values()],
        ),
    ]
    if warm := sum(not r["cold"] for r in rows[1:]):
        lines += ["", f"{warm} of {len(rows) - 1} samples did not start cold."]
    return "\n".join(lines) + "\n"


def _conditions(head: Row) -> str:
    plan, disk = head["plan"], head["storage"]
    budget = "no memory budget" if plan["budget"] is None else f"memory budget {plan['budget'] / GIB:.2f} GiB"
    device = disk["model"] or disk["device"] or "unknown device"
    lab = f" on {disk['loop_on']} (lab)" if disk["loop_on"] in ("tmpfs", "ramfs") else ""
    return (
        f"Slices of {plan['slice_bytes'] / 1024:.0f} KiB in groups of {plan['group']} from a file of "
        f"{head['file_bytes'] / GIB:.2f} GiB; {budget}; {disk['filesystem']} on {device}{lab}, "
        f"read-ahead {disk['read_ahead_kb']} KiB, hints of at most {plan['window'] // 1024} KiB; "
        f"{plan['blocks']} blocks of {plan['seconds']:g} s; {head['cores']} cores, Linux {head['kernel']}."
    )


def _speed(figure: Figure) -> str:
    if figure.mib_s is None:
        return "-"
    if figure.ci95 is None:
        return f"{figure.mib_s:.0f}"
    return f"{figure.mib_s:.0f} [{figure.ci95[0]:.0f}, {figure.ci95[1]:.0f}]"


def _best(own: Sequence[Figure]) -> list[str]:
    best = max(own, key=lambda f: f.mib_s or 0.0)
    how = METHODS[best.method]
    if best.mib_s is None:
        return [best.method, "-", "-", "-", "-", "-", "-", f"{how}: {best.why}"]
    return [
        best.method,
        str(best.readers),
        _speed(best),
        f"{best.amplification:.2f}",
        f"{best.cpu_s_per_gib:.2f}",
        f"{best.group_p50_ms:.1f}",
        f"{best.group_p95_ms:.1f}",
        how,
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]
