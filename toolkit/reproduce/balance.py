"""The batch that takes as long to read as to compute: where reading ahead can save the most.

Read time is what the batch needs of the file over the measured speed of the disk; compute time is measured with the
model in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.bench import limits, storage
from toolkit.bench.check import require_done
from toolkit.bench.launch import job_of, launch
from toolkit.console import GIB, MIB, note
from toolkit.errors import BenchError, MachineError
from toolkit.files import write_text
from toolkit.model.layout import needed_bytes
from toolkit.reproduce import positions
from toolkit.reproduce.positions import Positions
from toolkit.reproduce.setup import Setup

TOLERANCE = 0.20  # of the longer time
FIRST = 64
MOST = 4096
_TRIES = 8
_WARM_RUNS = 2  # the faster one counts: what slows a run down is not the batch
_STEP = 4  # times as large or as small, at most, as the batch before


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One batch: tokens, bytes it needs of the file, seconds to read these and to compute."""

    batch: int
    read_bytes: int
    read_s: float
    compute_s: float

    @property
    def apart(self) -> float:
        """How far the two times are apart, as a part of the longer one."""
        return abs(self.read_s - self.compute_s) / max(self.read_s, self.compute_s)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """All batches that were tried; the best one has its two times closest together."""

    disk_mib_s: float
    tried: tuple[Tried, ...]

    @property
    def best(self) -> Tried:
        return min(self.tried, key=lambda t: t.apart)

    @property
    def found(self) -> bool:
        """Whether the best is within the tolerance."""
        return self.best.apart < TOLERANCE


def search(measure: Callable[[int], Tried]) -> tuple[Tried, ...]:
    """Try batches until reading and computing take the same time, within the tolerance, or none lies between."""
    tried: list[Tried] = []
    batch: int | None = FIRST
    while batch is not None and len(tried) < _TRIES:
        tried.append(measure(batch))
        batch = following(tried)
    return tuple(tried)


def following(tried: Sequence[Tried]) -> int | None:
    """The batch to try next; None when one is balanced or no other can be closer.

    Compute time grows faster with the batch than read time. Between a batch that is bound by reads and one that is
    bound by computing the ratio of both times is taken for a power of the batch; beyond them computing for linear.
    """
    if min(t.apart for t in tried) < TOLERANCE:
        return None
    below = max((t for t in tried if t.compute_s < t.read_s), key=lambda t: t.batch, default=None)
    above = min((t for t in tried if t.compute_s >= t.read_s), key=lambda t: t.batch, default=None)
    if below and above:
        low, high = (math.log(t.compute_s / t.read_s) for t in (below, above))
        share = -low / (high - low)
        batch = round(below.batch ** (1 - share) * above.batch**share)
        return batch if below.batch < batch < above.batch else None
    last = below or above
    assert last is not None
    factor = min(_STEP, max(1 / _STEP, last.read_s / last.compute_s))
    batch = min(MOST, max(1, round(last.batch * factor)))
    return None if batch == last.batch else batch


def find(setup: Setup, pool: Positions, arm: str) -> Balance:
    """Search with this arm, or take what an earlier call has found and stored beside the results.

    Raises MachineError when the model is larger than the free memory, BenchError when it does not stay in there.
    """
    path = setup.file("-balance.json")
    key = {"size": _size(setup), "n_threads": setup.conditions.n_threads, "arm": arm, "read_ahead": _read_ahead(setup)}
    if (stored := _stored(path, key)) is not None:
        note(f"{path}: a batch of {stored.best.batch} tokens was found before")
        return stored
    available = limits.available_memory()
    if _size(setup) > available.bytes:
        raise MachineError(
            f"the compute time of a batch is measured in memory: the model has {_size(setup) / GIB:.2f} GiB, "
            f"{available.bytes / GIB:.2f} GiB are available ({available.source})",
            hint="name the batch: --batch 512",
        )
    disk = storage.random_read_mib_s(setup.layout.shards[0].path)
    if disk is None:
        raise BenchError(
            "the speed of the disk cannot be measured: direct reads are refused",
            where=setup.layout.shards[0].path,
            hint="name the batch: --batch 512",
        )
    balance = Balance(disk_mib_s=disk, tried=search(lambda batch: _try(setup, pool, arm, batch, disk)))
    write_text(path, json.dumps({**key, **asdict(balance)}, indent=2) + "\n")
    return balance


def _try(setup: Setup, pool: Positions, name: str, batch: int, disk_mib_s: float) -> Tried:
    arm = next(arm for arm in setup.arms if arm.name == name)
    tokens = pool.take(0, batch, 0)
    conditions = replace(setup.conditions, n_batch=batch, n_ubatch=batch)
    # this run brings all that the batch needs into memory, and says what that is
    experts = positions.selected(setup, arm, tokens, conditions)
    job = job_of(setup.layout, conditions, batch) | {"n_prompt": batch, "tokens": tokens.all}
    seconds = []
    with limits.memory_budget(None) as unlimited:
        for _ in range(_WARM_RUNS):
            outcome = launch(arm, job, unlimited)
            require_done(arm, outcome)
            (test,) = outcome.tests
            if read := test["read_bytes"]:
                raise BenchError(
                    f"the model does not stay in memory: another run of {batch} tokens read {read / MIB:.1f} MiB",
                    where=setup.layout.shards[0].path,
                    hint="stop other programs, or name the batch: --batch 512",
                )
            seconds.append(sum(test["ns"]) / 1e9)
    needed = needed_bytes(setup.layout, experts)
    tried = Tried(batch=batch, read_bytes=needed, read_s=needed / MIB / disk_mib_s, compute_s=min(seconds))
    note(f"batch of {batch}: reading {needed / MIB:.0f} MiB {tried.read_s:.3g} s, computing {tried.compute_s:.3g} s")
    return tried


def _size(setup: Setup) -> int:
    return sum(shard.path.stat().st_size for shard in setup.layout.shards)


def _read_ahead(setup: Setup) -> int | None:
    return setup.facts.storage.read_ahead_kb


def _stored(path: Path, key: dict[str, Any]) -> Balance | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = Balance(disk_mib_s=data["disk_mib_s"], tried=tuple(Tried(**t) for t in data["tried"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if found.tried and {name: data.get(name) for name in key} == key else None
