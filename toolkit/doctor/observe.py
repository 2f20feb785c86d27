"""Everything the doctor looks at, read once; judged elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from toolkit.bench import limits, machine, storage
from toolkit.bench.disk import Storage, integer, read, read_ahead_file, storage_of
from toolkit.bench.limits import Available, Method
from toolkit.bench.machine import MachineFacts, Power
from toolkit.bench.storage import Speed
from toolkit.console import GIB, MIB
from toolkit.doctor import kernel
from toolkit.doctor.activity import Activity, watch
from toolkit.doctor.kernel import Feature
from toolkit.errors import BenchError

_SECONDS = 1.0
_MAX_BYTES = 256 * MIB  # of each way of reading: a fast disk needs no longer
_SCRATCH_BYTES = 128 * MIB
_MEMORY_BYTES = 256 * MIB  # more than most caches hold
_MEMORY_THREADS = 16


@dataclass(frozen=True, kw_only=True)
class Swap:
    """One line of /proc/swaps."""

    file: str
    used_bytes: int
    priority: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What can be read without measuring; `root` holds proc, sys and etc."""

    root: Path
    path: Path  # the model's largest file, or a folder on the disk in question
    elsewhere: tuple[str, ...]  # other disks that hold parts of the model
    facts: MachineFacts
    read_ahead_file: Path | None
    available: Available
    budget: Method
    budget_refused: str | None  # what the proof of the budget said
    swaps: tuple[Swap, ...]
    power: Power
    numa_balancing: int | None
    io_uring_disabled: int | None  # sysctl: 1 for users without privileges, 2 for all
    kernel: Mapping[str, Feature]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What took time to find out; None or empty where it was not measured."""

    speeds: Mapping[str, Speed]
    memory_mib_s: float | None  # all usable cores read memory together
    activity: Activity | None


def settings(path: Path, parts: Sequence[Path] = (), *, root: Path = Path("/")) -> Settings:
    """Read the state of the machine and of the disk under `path`, one of the `parts` of a model.

    Changes nothing; a memory group is made for a moment to prove that limits hold.
    """
    proc, groups = root / "proc", root / "sys/fs/cgroup"
    budget, refused = limits.detect(root=groups, proc=proc, run=root / "run"), None
    if budget.name != "none":
        try:
            limits.prove_enforced(budget, root=groups, proc=proc)
        except BenchError as e:
            refused = e.what
    facts = machine.facts(path, root=root)
    return Settings(
        root=root,
        path=path,
        elsewhere=tuple(sorted({_named(storage_of(part, root=root)) for part in parts} - {_named(facts.storage)})),
        facts=facts,
        read_ahead_file=read_ahead_file(path, root=root),
        available=limits.available_memory(root=groups, proc=proc),
        budget=budget,
        budget_refused=refused,
        swaps=_swaps(proc),
        power=machine.power(root / "sys"),
        numa_balancing=integer(proc / "sys/kernel/numa_balancing"),
        io_uring_disabled=integer(proc / "sys/kernel/io_uring_disabled"),
        kernel={
            "populate-read": kernel.populate_read(),
            "io-uring": kernel.io_uring(),
            "cachestat": kernel.cachestat(path if path.is_file() else Path(sys.executable)),
            "psi": kernel.pressure(proc),
            "join-wait": kernel.run_queue(proc),
        },
    )


def _named(place: Storage) -> str:
    return place.device or place.filesystem or "an unknown disk"


def measured(path: Path, device: str | None, *, read_disk: bool = True, root: Path = Path("/")) -> Measured:
    """Watch the others for a second, then time the disk (at most 6 s and 1.3 GiB) and the memory.

    In a folder the disk is timed on a scratch file of 128 MiB, deleted at the end.
    """
    activity = watch(device, root=root)
    if not read_disk:
        return Measured(speeds={}, memory_mib_s=None, activity=activity)
    with _something_to_read(path) as file:
        speeds = {} if file is None else _speeds(file)
    return Measured(speeds=speeds, memory_mib_s=_memory_mib_s(), activity=activity)


def _speeds(file: Path) -> dict[str, Speed]:
    kib = 1024

    def speed(pattern: storage.Pattern, block: int, readers: int = 1, direct: bool = True) -> Speed:
        return storage.speed(
            file,
            pattern=pattern,
            block=block,
            readers=readers,
            direct=direct,
            seconds=_SECONDS,
            max_bytes=_MAX_BYTES,
        )

    return {
        "random-128k": speed("random", 128 * kib),
        "random-1m": speed("random", MIB),
        "random-1m-x4": speed("random", MIB, readers=4),
        "sequential": speed("sequential", MIB, direct=False),
        "bypassing-8m": speed("sequential", 8 * MIB),
    }


@contextlib.contextmanager
def _something_to_read(path: Path) -> Iterator[Path | None]:
    """The file itself, or for a folder a scratch file in it; None without the space for one."""
    if not path.is_dir():
        yield path
        return
    if shutil.disk_usage(path).free < GIB:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="moe-madv-doctor-", dir=path) as folder:
        scratch = Path(folder) / "scratch"
        with scratch.open("wb") as f:
            # Random bytes: file systems that compress would store anything else as nothing.
            generator = np.random.default_rng(1)
            for _ in range(_SCRATCH_BYTES // (16 * MIB)):
                f.write(generator.bytes(16 * MIB))
            f.flush()
            os.fsync(f.fileno())
        yield scratch


def _memory_mib_s() -> float | None:
    """MiB/s at which all usable cores together read memory, the best of three passes."""
    threads = min(_MEMORY_THREADS, machine.usable_cores())
    try:
        array = np.ones(_MEMORY_BYTES // 4, np.float32)
    except MemoryError:
        return None
    parts = np.array_split(array, threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - start)
    return _MEMORY_BYTES / MIB / best


def _swaps(proc: Path) -> tuple[Swap, ...]:
    """Filename, type, size in KiB, used in KiB, priority."""
    found = []
    for line in (read(proc / "swaps") or "").splitlines()[1:]:
        file, _, _, used, priority = line.split()
        # spaces are written as three octal digits
        name = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), file)
        found.append(Swap(file=name, used_bytes=int(used) * 1024, priority=int(priority)))
    return tuple(found)
