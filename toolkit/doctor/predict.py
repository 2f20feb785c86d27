"""What a model can be expected to do on a machine, before anything is built: arithmetic with stated assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from toolkit.bench.storage import Speed
from toolkit.console import MIB
from toolkit.evidence.findings import Roofline
from toolkit.model.layout import Access, ModelLayout

# What a run needs beside weights: buffers, a short context, the interpreter.
PROCESS_BYTES = 256 * MIB
# Hits of a least-recently-used cache by the share of the experts it holds, in recorded routing of real
# models (`moe-madv model synth` prints the same two figures of what it makes).
_SHARES, _HITS = (0.0, 0.20, 0.30, 1.0), (0.0, 0.74, 0.87, 1.0)
# Kernels reach this part of the memory's speed at the least: they compute while they read.
_KERNEL_SHARE = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Pairs are (least, most); None where a figure it needs is missing."""

    file_bytes: int
    memory_bytes: int  # what a run may use
    oversubscription: float  # file over memory
    fits: bool
    always_used_bytes: int | None  # per token
    routed_bytes_per_token: int | None
    read_bytes_per_token: tuple[float, float] | None  # from the disk
    compute_ms: tuple[float, float] | None  # per token
    tokens_per_s: tuple[float, float] | None
    limit: str | None  # "disk" or "compute": what holds the upper figure
    assumptions: tuple[str, ...]


def predict(
    layout: ModelLayout, memory_bytes: int, speeds: Mapping[str, Speed], memory_mib_s: float | None
) -> Prediction:
    """Predict decode of `layout` in `memory_bytes`, from measured disk speeds and memory speed in MiB/s."""
    size = sum(shard.path.stat().st_size for shard in layout.shards)
    always, routed = layout.nbytes(Access.ALWAYS_USED), layout.routed_bytes_per_token
    experts = layout.nbytes(Access.ROUTED)
    fits = size + PROCESS_BYTES <= memory_bytes

    read = compute = rate = limit = None
    if always is not None and routed is not None and experts is not None:
        room = memory_bytes - always - PROCESS_BYTES
        missed = (0.0, 0.0) if fits else _missed(experts, room)
        # What is read in turn and does not fit is gone when its turn comes again.
        again = 0 if fits or room >= 0 else always
        read = (again + missed[0] * routed, again + missed[1] * routed)
        if memory_mib_s and always + routed:
            least = (always + routed) / MIB / memory_mib_s
            compute = (1000 * least, 1000 * least / _KERNEL_SHARE)
    disk = disk_range(speeds) or ((1.0, 1.0) if fits else None)  # a model that fits reads nothing
    if read is not None and compute is not None and disk is not None:
        best = Roofline(test="tg", disk_mib_s=disk[1], compute_ms=compute[0], must_read_mib=read[0] / MIB)
        assert best.limit_ms is not None  # the compute time is known
        # worst: reading and computing take turns
        rate = (1000 / (compute[1] + 1000 * read[1] / MIB / disk[0]), 1000 / best.limit_ms)
        limit = "disk" if best.read_ms > compute[0] else "compute"
    return Prediction(
        file_bytes=size,
        memory_bytes=memory_bytes,
        oversubscription=size / max(memory_bytes, 1),
        fits=fits,
        always_used_bytes=always,
        routed_bytes_per_token=routed,
        read_bytes_per_token=read,
        compute_ms=compute,
        tokens_per_s=rate,
        limit=limit,
        assumptions=_assumptions(fits),
    )


def disk_range(speeds: Mapping[str, Speed]) -> tuple[float, float] | None:
    """MiB/s of the slowest and the fastest way to read experts at random; None when none was measured."""
    known = [s.mib_s for s in speeds.values() if s.pattern == "random" and s.mib_s is not None]
    return (min(known), max(known)) if known else None


def _missed(experts_bytes: int, room: int) -> tuple[float, float]:
    """Least and largest share of a token's expert bytes that come from the disk, with `room` for experts."""
    share = min(1.0, max(0.0, room / experts_bytes)) if experts_bytes else 1.0
    return 1 - float(np.interp(share, _SHARES, _HITS)), 1 - share


def _assumptions(fits: bool) -> tuple[str, ...]:
    said = [
        "CPU only, one sequence, short context; weights stay in the mapping (no repacking)",
        f"compute: weights of a token at {_KERNEL_SHARE:.0%} to 100 % of the measured memory speed",
    ]
    if fits:
        return (*said, "nothing is read: the whole model is in memory after its first use")
    return (
        *said,
        f"{PROCESS_BYTES // MIB} MiB go to the process; always used weights stay in memory if the rest holds them, "
        "and experts get what is left",
        "upper figure: routing repeats as in recorded models (a least-recently-used cache hits 74 % with 20 % of the "
        "experts, 87 % with 30 %), the disk at its best random speed, reading and computing fully overlap",
        "lower figure: every expert equally likely, the disk at its lowest random speed, reading and computing in turn",
        "only what is needed is read; stock llama.cpp with a large read-ahead falls far below the lower figure",
    )
