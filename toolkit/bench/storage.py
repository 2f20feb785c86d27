"""How fast the disk under a file reads: at random and in sequence, past the page cache and through it."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from toolkit.bench import counters
from toolkit.console import MIB
from toolkit.errors import BenchError

_EXPERT_MATRIX = MIB  # about one
# Some disks give more to several readers, some less; the better figure is what the disk can do.
_READERS = (1, 4)

Pattern = Literal["random", "sequential"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a series of reads took."""

    nbytes: int
    seconds: float
    slowest_s: float  # the longest single read

    @property
    def mib_s(self) -> float:
        return self.nbytes / MIB / self.seconds


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One way of reading a file, and what the disk gave."""

    pattern: Pattern
    block_bytes: int
    readers: int  # reads under way at the same time
    direct: bool  # past the page cache
    mib_s: float | None  # None: not measured
    nbytes: int
    seconds: float
    from_disk: float | None  # share of the bytes that the disk delivered; the rest was cached or a hole
    why: str | None  # why there is no figure


@contextlib.contextmanager
def opened(path: Path, *, direct: bool) -> Iterator[int]:
    """A descriptor for reading; with `direct` its reads bypass the page cache.

    Raises BenchError where the file, its file system or the operating system refuses.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
    if not hasattr(os, "preadv"):
        raise BenchError(f"timed reads are not available on {sys.platform}", where=path)
    if direct and sys.platform != "darwin":
        if not hasattr(os, "O_DIRECT"):
            raise BenchError(f"reads past the page cache are not available on {sys.platform}", where=path)
        flags |= os.O_DIRECT
    try:
        fd = os.open(path, flags)
    except OSError as e:
        raise BenchError(f"cannot open for {'direct ' if direct else ''}reading: {e.strerror}", where=path) from e
    try:
        if direct and sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        yield fd
    finally:
        os.close(fd)


def read_at(fd: int, offsets: Sequence[int], block: int, *, seconds: float = float("inf")) -> Reading:
    """Read `block` bytes at each offset in turn, at least one, until the time is over.

    Direct reads need offsets and block in multiples of the page size; the end of the file cuts a read short.
    """
    total, slowest = 0, 0.0
    with mmap.mmap(-1, block) as buffer:  # page-aligned, as direct reads need
        start = before = time.perf_counter()
        for offset in offsets:
            total += os.preadv(fd, [buffer], offset)
            now = time.perf_counter()
            slowest = max(slowest, now - before)
            before = now
            if now - start >= seconds:
                break
    return Reading(nbytes=total, seconds=before - start, slowest_s=slowest)


def drop(fd: int, start: int = 0, length: int = 0) -> None:
    """Ask the kernel to forget a stretch of a file (all of it by default); where it cannot, nothing happens."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)


def speed(
    path: Path,
    *,
    pattern: Pattern,
    block: int,
    readers: int = 1,
    direct: bool = True,
    seconds: float = 1.0,
    max_bytes: int | None = None,
) -> Speed:
    """Measure one way of reading `path`, ending after `seconds` or `max_bytes`, whichever comes first.

    Reads through the cache drop the stretch first. Nothing raises: what cannot be measured says why.
    """
    nbytes, elapsed, from_disk, why = 0, 0.0, None, None
    try:
        size = path.stat().st_size
        count = min(max_bytes or size, size) // block
        if count == 0:
            raise BenchError(f"the file is smaller than {block} bytes", where=path)
        if pattern == "sequential":
            offsets = np.arange(count) * block
        else:
            wanted = count if max_bytes else 1 << 16
            offsets = np.random.default_rng(readers).integers(0, size // block, size=wanted) * block
        with opened(path, direct=direct) as fd:
            if not direct:
                drop(fd, 0, count * block)
            before = counters.snapshot().read_bytes
            start = time.perf_counter()
            with ThreadPoolExecutor(readers) as pool:
                parts = [offsets[i::readers].tolist() for i in range(readers)]
                found = list(pool.map(lambda part: read_at(fd, part, block, seconds=seconds), filter(None, parts)))
            elapsed = time.perf_counter() - start
            after = counters.snapshot().read_bytes
            nbytes = sum(reading.nbytes for reading in found)
            from_disk = None if before is None or after is None else min(1.0, (after - before) / max(nbytes, 1))
            if not direct:
                drop(fd, 0, count * block)
    except BenchError as e:
        why = e.what
    except OSError as e:
        why = f"a read failed: {e.strerror}"
    return Speed(
        pattern=pattern,
        block_bytes=block,
        readers=readers,
        direct=direct,
        mib_s=nbytes / MIB / elapsed if nbytes and not why else None,
        nbytes=nbytes,
        seconds=elapsed,
        from_disk=from_disk,
        why=why,
    )


def random_read_mib_s(path: Path, *, seconds: float = 1.5) -> float | None:
    """MiB/s of random 1 MiB direct reads, the better of one and four readers; None where direct reads are refused."""
    tried = (
        speed(path, pattern="random", block=_EXPERT_MATRIX, readers=readers, seconds=seconds / len(_READERS))
        for readers in _READERS
    )
    return max((found.mib_s for found in tried if found.mib_s is not None), default=None)
