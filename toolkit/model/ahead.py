"""How long a token takes when reads and compute share it: simulated, for reads that start some layers early.

It is what a runtime can reach at best on a machine: no thread is ever in another's way, and the disk never pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.console import MIB
from toolkit.errors import ModelError
from toolkit.model.eviction import CHOSEN, POLICIES, layer_misses
from toolkit.model.eviction_report import capacity_of, check_capacities
from toolkit.model.trace import Recording

N_MATRICES = 3  # of an expert: gate, up, down

LAYERS_EARLY = (0, 1, 2)
SHOWN_POLICIES = ("LRU", CHOSEN, "Belady")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Times of one model on one machine."""

    compute_ms: float  # of a token in memory
    experts_share: float  # of the compute, in the matmuls of selected experts
    shared_share: float  # of the compute, in those of shared experts, which every token uses
    disk_mib_s: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures per decoded token of one trace, cache and policy."""

    trace: str
    capacity_percent: int
    policy: str
    mib: float  # read
    read_ms: float  # time of the disk alone
    compute_ms: float
    # by how many layers before its own matmuls a layer's selection is known
    by_matrix_ms: tuple[float, ...]  # each matmul takes all experts, the resident ones first
    by_expert_ms: tuple[float, ...]  # each expert goes through its three matmuls, the resident ones first
    shared_first_ms: tuple[float, ...]  # by matrix, the shared experts before the selected ones instead of after them


def token_ms(
    missing: NDArray[np.int64],
    *,
    top_k: int,
    read_ms: float,
    machine: Machine,
    early: int,
    by_expert: bool = False,
    shared_first: bool = False,
) -> float:
    """Mean time of a token whose layers miss `missing` experts, [token, layer], in milliseconds.

    The disk reads one expert after the other, `read_ms` each, matrix by matrix or expert by expert, as they are
    computed. A layer's reads are asked for when its selection is known: `early` layers before its own matmuls,
    never before the token begins. What is read is there for every matmul that needs it; the others wait.
    """
    n_tokens, n_layers = missing.shape
    expert_ms = machine.compute_ms * machine.experts_share / n_layers / top_k
    shared_ms = machine.compute_ms * machine.shared_share / n_layers
    other_ms = machine.compute_ms * (1 - machine.experts_share - machine.shared_share) / n_layers
    now = disk = 0.0
    for token in missing:
        begin = [0.0] * n_layers  # when the disk begins with a layer's reads
        asked = 0
        for layer, n in enumerate(token):
            now += other_ms
            while asked < min(layer + early + 1, n_layers):
                begin[asked] = max(disk, now)
                disk = begin[asked] + float(token[asked]) * read_ms
                asked += 1
            now += shared_ms if shared_first else 0
            resident = (top_k - float(n)) * expert_ms
            if by_expert:
                now += resident
                for i in range(n):
                    now = max(now, begin[layer] + (i + 1) * read_ms) + expert_ms
            else:
                for part in range(1, N_MATRICES + 1):
                    now += resident / N_MATRICES
                    # slice by slice as they come
                    for i in range(n):
                        read = ((part - 1) * float(n) + i + 1) / N_MATRICES * read_ms
                        now = max(now, begin[layer] + read) + expert_ms / N_MATRICES
            now += 0 if shared_first else shared_ms
    return now / n_tokens


def _by_notice(
    missing: NDArray[np.int64], machine: Machine, top_k: int, read_ms: float, **order: bool
) -> tuple[float, ...]:
    return tuple(
        token_ms(missing, top_k=top_k, read_ms=read_ms, machine=machine, early=early, **order) for early in LAYERS_EARLY
    )


def study(
    recordings: Sequence[Recording],
    percents: Sequence[int],
    machine: Machine,
    *,
    expert_bytes: int | None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Simulate every trace, capacity and policy. `expert_bytes` is for traces that do not say. Raises ModelError."""
    rows = []
    for recording in recordings:
        workload, sizes = recording.workload(), recording.header.expert_bytes
        size = expert_bytes or (sum(sizes) / len(sizes) if sizes else None)
        if size is None:
            raise ModelError(
                "the trace does not say how large an expert is", where=recording.path, hint="add --expert-bytes SIZE"
            )
        check_capacities(workload, percents)
        read_ms = size / MIB / machine.disk_mib_s * 1000
        for percent in percents:
            for policy in SHOWN_POLICIES:
                progress(f"{recording.path.name}: {percent} %, {policy}")
                missing = layer_misses(workload, POLICIES[policy], capacity_of(workload, percent))
                missing = missing[workload.trace.n_prompt :]
                times = partial(_by_notice, missing, machine, workload.trace.top_k, read_ms)
                mean = float(missing.sum()) / len(missing)
                rows.append(
                    Row(
                        trace=recording.header.model,
                        capacity_percent=percent,
                        policy=policy,
                        mib=mean * size / MIB,
                        read_ms=mean * read_ms,
                        compute_ms=machine.compute_ms,
                        by_matrix_ms=times(),
                        by_expert_ms=times(by_expert=True),
                        shared_first_ms=times(shared_first=True),
                    )
                )
    return rows


def as_json(rows: Sequence[Row], machine: Machine) -> dict[str, Any]:
    """Plain data, times in milliseconds per decoded token."""
    return {"machine": asdict(machine), "layers_early": LAYERS_EARLY, "rows": [asdict(row) for row in rows]}


def _about_shared(machine: Machine) -> list[str]:
    if not machine.shared_share:
        return []
    return [
        f"Another {machine.shared_share:.0%} of the compute is in shared experts, which come after the selected ones;",
        "`shared first`: before them, while what is missing is read.",
    ]


def as_markdown(rows: Sequence[Row], machine: Machine) -> str:
    """The table as a page."""
    orders = ("matrices", "experts", "shared first") if machine.shared_share else ("matrices", "experts")
    heads = [f"{early} early, {order}" for order in orders for early in LAYERS_EARLY]
    lines = [
        "# What reading ahead can win",
        "",
        "Simulated time of a decoded token in milliseconds, from recorded routing: a cache of whole experts, one disk",
        f"of {machine.disk_mib_s:g} MiB/s that never pauses, {machine.compute_ms:g} ms of compute in memory,",
        f"{machine.experts_share:.0%} of it in the expert matmuls. A layer's reads start when its selection is known,",
        "at its own matmuls (0 early), or one or two layers before. `matrices`: gate of all experts, then up, then",
        "down, each with the resident experts first, as llama.cpp does it. `experts`: the resident experts go through",
        "all three before the first missing one.",
        *_about_shared(machine),
        "",
        f"| trace | cache | policy | MiB | disk alone | compute alone | {' | '.join(heads)} |",
        f"| --- | ---: | --- |{' ---: |' * (3 + len(heads))}",
    ]
    for row in rows:
        figures = (row.mib, row.read_ms, row.compute_ms, *row.by_matrix_ms, *row.by_expert_ms)
        figures += row.shared_first_ms if machine.shared_share else ()
        cells = [row.trace, f"{row.capacity_percent} %", row.policy, *(f"{figure:.1f}" for figure in figures)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
