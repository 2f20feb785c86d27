"""Tokens, chunks and layers that took many times as long as their like, and what the time went into.

Pure: from sample rows to stalls. A row is never dropped for a stall; it is named beside the figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from toolkit.console import MIB
from toolkit.results import Row

FACTOR = 5.0
LEAST_MS = 50.0  # beyond the median: below it a scheduler's hiccup is as likely as anything
_LEAST_RUNS = 3  # whose median at one place is believed
_LEAST_ITEMS = 4  # of one row, the same
_HALF = 0.5  # of the time beyond the median: what explains so much is the cause
_NEXT_TO_NONE = 0.1


class Cause(str, Enum):
    STORAGE = "storage"
    MEMORY = "memory pressure"
    SOFTWARE = "software wait"
    COMPUTE = "compute"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Stall:
    """One token or chunk (of a prompt) or layer; times in ms, shares are of the time beyond the median."""

    run_id: str
    block: int
    position: int
    arm: str
    test: str
    what: Literal["token", "chunk", "layer"]
    index: int  # in the test; of a layer, in the order they run
    layer: str | None  # the layer's first expert matrix; of a token or chunk, the layer that took most of the excess
    ms: float
    median_ms: float
    cause: Cause
    evidence: str
    shares: dict[str, float]  # io, memory, busy, queued, wait, read: those that are known
    read_bytes: int | None
    major_faults: int | None


@dataclass(frozen=True, kw_only=True)
class _Item:
    """One place of a row: its time, its counters, and what its like have of these."""

    what: Literal["token", "chunk", "layer"]
    index: int
    layer: str | None
    ms: float
    used: Mapping[str, float] = field(default_factory=dict)
    usual: Mapping[str, float] = field(default_factory=dict)


def find(rows: Iterable[Row], *, factor: float = FACTOR, least_ms: float = LEAST_MS) -> list[Stall]:
    """All stalls in sample rows, in the order of the rows.

    An item is measured against the larger of two medians: over the items of its row, and over the same place in the
    other runs of its arm and test. So neither a layer that is always slow nor a first token that always reads more
    is a stall. With too few of both, as a single chunk in one run, nothing can be said.
    """
    known = [(row, _items(row)) for row in rows if row.get("token_ms")]
    groups: dict[tuple[str, str, str], list[list[_Item]]] = {}
    for row, items in known:
        groups.setdefault((row["run_id"], row["arm"], row["test"]), []).append(items)
    places = {key: _places(runs) for key, runs in groups.items()}
    found = []
    for row, items in known:
        for kind in (("token", "chunk"), ("layer",)):
            alike = [item for item in items if item.what in kind]
            own = statistics.median(item.ms for item in alike) if len(alike) >= _LEAST_ITEMS else None
            for item in alike:
                across = places[row["run_id"], row["arm"], row["test"]].get((item.what, item.index))
                usual = max((m for m in (own, across) if m is not None), default=None)
                if usual is not None and item.ms > factor * usual and item.ms - usual >= least_ms:
                    found.append(_stall(row, item, usual))
    return found


def count(found: Sequence[Stall]) -> str:
    return "1 stall" if len(found) == 1 else f"{len(found)} stalls"


def sentence(stall: Stall) -> str:
    """One line: where, how long, why, by what evidence."""
    place = f"{stall.what} {stall.index}" + (f" ({stall.layer})" if stall.layer else "")
    return (
        f"{stall.arm} {stall.test} run {stall.position}, {place}: {stall.ms:.0f} ms, median {stall.median_ms:.3g} ms: "
        f"{stall.cause.value} ({stall.evidence})"
    )


def _places(runs: Sequence[Sequence[_Item]]) -> dict[tuple[str, int], float]:
    """Median over runs of every place that enough of them have."""
    times: dict[tuple[str, int], list[float]] = {}
    for items in runs:
        for item in items:
            times.setdefault((item.what, item.index), []).append(item.ms)
    return {place: statistics.median(ms) for place, ms in times.items() if len(ms) >= _LEAST_RUNS}


# --- What a row holds


def _items(row: Row) -> list[_Item]:
    timeline = row.get("timeline") or []
    names = [str(entry.get("name") or entry["layer"]) for entry in timeline]
    return [*_batches(row, names), *_layers(row, timeline, names)]


def _batches(row: Row, names: Sequence[str]) -> list[_Item]:
    """The tokens of a decode test, the chunks of a prompt."""
    columns = _columns(row)
    slowest, layer_ms = columns.pop("layer", None), columns.pop("layer_ms", None)
    usual = {name: statistics.median(values) for name, values in columns.items()}
    usual_ms = statistics.median(row["token_ms"])
    items = []
    for i, ms in enumerate(row["token_ms"]):
        layer = None
        # the slowest layer is to blame when it alone took half of what this batch took more
        if slowest and layer_ms and layer_ms[i] >= _HALF * (ms - usual_ms):
            layer = names[int(slowest[i])]
        items.append(
            _Item(
                what="token" if row["test"].startswith("tg") else "chunk",
                index=i,
                layer=layer,
                ms=ms,
                used={name: values[i] for name, values in columns.items()},
                # one batch alone has no usual: then all of its counters are its own
                usual=usual if len(row["token_ms"]) >= _LEAST_ITEMS else {},
            )
        )
    return items


def _layers(row: Row, timeline: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[_Item]:
    """The layers of a timeline, with the counters of the whole row.

    The most that the others can have used of a counter, all of their time, is taken as usual.
    """
    total_ms = sum(row["token_ms"])
    sums = {name: sum(values) for name, values in _columns(row).items() if name not in ("layer", "layer_ms")}
    usual = {name: statistics.median(entry[name] for entry in timeline) for name in ("wait_ms", "read_ms") if timeline}
    items = []
    for i, entry in enumerate(timeline):
        ms = entry["hint_ms"] + entry["wait_ms"] + entry["compute_ms"]
        elsewhere = {name: max(0.0, total_ms - ms) for name in sums if name.endswith("_ms")}
        own = {name: entry[name] for name in ("wait_ms", "read_ms")} | {"layer_bytes": entry["bytes"]}
        items.append(_Item(what="layer", index=i, layer=names[i], ms=ms, used=sums | own, usual=elsewhere | usual))
    return items


def _columns(row: Row) -> dict[str, list[float]]:
    """The known counters of every batch, CPU time as that of one thread, pressure as that of one waiting thread.

    Linux averages pressure over the CPUs that are not idle: one thread that waits while another spins counts half.
    """
    # a column is empty where an arm has nothing to count: a timeline without the payload
    columns = {name: values for name, values in (row.get("token_counters") or {}).items() if values}
    cpus = columns.pop("busy_cpus", [1.0] * len(row["token_ms"]))
    for name in {"psi_io_ms", "psi_memory_ms"} & columns.keys():
        columns[name] = [min(p * n, ms) for p, n, ms in zip(columns[name], cpus, row["token_ms"], strict=True)]
    if "cpu_ms" in columns:
        columns["cpu_ms"] = [ms / (row.get("n_threads") or 1) for ms in columns["cpu_ms"]]
    return columns


# --- What the time went into

_SHARES = {
    "io": "psi_io_ms",
    "memory": "psi_memory_ms",
    "busy": "cpu_ms",
    "queued": "queued_ms",
    "wait": "wait_ms",
    "read": "read_ms",
}


def _stall(row: Row, item: _Item, median_ms: float) -> Stall:
    excess = item.ms - median_ms
    shares = {
        name: min(1.0, max(0.0, item.used[column] - item.usual.get(column, 0.0)) / excess)
        for name, column in _SHARES.items()
        if column in item.used
    }
    read_bytes = item.used.get("layer_bytes", item.used.get("read_bytes"))
    faults = item.used.get("major_faults")
    return Stall(
        run_id=row["run_id"],
        block=row["block"],
        position=row["position"],
        arm=row["arm"],
        test=row["test"],
        what=item.what,
        index=item.index,
        layer=item.layer,
        ms=item.ms,
        median_ms=median_ms,
        cause=_cause(shares, item, median_ms, threads=row.get("n_threads") or 1),
        evidence=_evidence(shares, item, read_bytes, faults),
        shares={name: round(share, 3) for name, share in shares.items()},
        read_bytes=None if read_bytes is None else int(read_bytes),
        major_faults=None if faults is None else int(faults),
    )


def _cause(shares: Mapping[str, float], item: _Item, median_ms: float, *, threads: int) -> Cause:
    """What holds at least half of the time beyond the median."""

    def explains(name: str) -> bool:
        return shares.get(name, 0.0) >= _HALF

    # pressure is that of the whole machine: I/O counts only when this process read something itself
    reads = any(item.used.get(name) for name in ("read_bytes", "major_faults", "layer_bytes"))
    # a wait for reads that took long is one for the disk, unless hardly anything waited for I/O meanwhile
    waited = explains("wait") and explains("read")
    if "psi_io_ms" in item.used:
        waited = waited and item.used["psi_io_ms"] >= _HALF * (item.ms - median_ms)
    if reads and (explains("io") or waited):
        return Cause.MEMORY if explains("memory") and _reads_again(item, median_ms) else Cause.STORAGE
    if explains("memory"):
        return Cause.MEMORY
    if explains("wait"):
        return Cause.SOFTWARE
    # While one thread waits, the others spin at the barrier: less than half a thread may have been idle.
    busy_enough = 1 - _HALF / threads
    if shares.get("busy", 0.0) + shares.get("queued", 0.0) >= busy_enough or explains("queued"):
        return Cause.COMPUTE
    # A layer's shares are the least it can have had; only of a token do small ones say that it did nothing.
    pressure_known = {"io", "memory", "busy"} <= shares.keys()
    if item.what != "layer" and pressure_known and shares["io"] + shares["memory"] < _NEXT_TO_NONE:
        return Cause.SOFTWARE
    return Cause.UNKNOWN


def _reads_again(item: _Item, median_ms: float) -> bool:
    """Whether the time is due to more reads rather than to slower ones: what had been in memory was dropped."""
    usual = item.usual.get("read_bytes")
    return usual is not None and item.used["read_bytes"] * median_ms >= _HALF * item.ms * usual


_WORDS = {
    "io": "{:.0%} in I/O pressure",
    "memory": "{:.0%} in memory pressure",
    "wait": "{:.0%} waiting for reads of the layer",
    "read": "{:.0%} until its last read was there",
    "busy": "cores {:.0%} busy",
    "queued": "main thread {:.0%} waiting for a core",
}
_WORTH_TELLING = 0.05


def _evidence(shares: Mapping[str, float], item: _Item, read_bytes: float | None, faults: float | None) -> str:
    if not shares:
        return "the row holds no counters"
    parts = [words.format(shares[name]) for name, words in _WORDS.items() if shares.get(name, 0) >= _WORTH_TELLING]
    if read_bytes:
        parts.append(f"{read_bytes / MIB:.3g} MiB read, {read_bytes / MIB / (item.ms / 1000):.3g} MiB/s")
    if faults and item.what != "layer":
        parts.append(f"{faults:.0f} major faults")
    return ", ".join(parts) or f"none of {', '.join(shares)}"
