"""How much of a file is in the page cache, and getting it out: a run is cold only when that is measured."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from toolkit.bench.disk import MEMORY_FILESYSTEMS, mount_of
from toolkit.console import GIB, MIB
from toolkit.errors import BenchError

PROC = Path("/proc")

# What stays saves at most this share of the time to read the file, far below the noise between runs.
COLD_SHARE = 0.001

# Mapped at a time for mincore: its vector has a byte per page, 256 KiB for each GiB of 4 KiB pages.
_CHUNK = GIB
# Same number on every architecture but alpha; Linux 6.5.
_SYS_CACHESTAT = 451
# Pages in another CPU's batch are not on a list yet when the first call comes.
_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class Residency:
    """Bytes of one or more files in the page cache; `resident` is None when it could not be measured."""

    resident: int | None
    total: int
    method: Literal["cachestat", "mincore", "unknown"]
    why: str | None = None  # for "unknown"

    @property
    def fraction(self) -> float | None:
        """Share of the bytes, 0 to 1; an empty file counts as absent."""
        return None if self.resident is None else self.resident / max(self.total, 1)


@dataclass(frozen=True, kw_only=True)
class Mapper:
    """A process that has one of the files mapped."""

    pid: int
    command: str


@dataclass(frozen=True, kw_only=True)
class EvictResult:
    """What an eviction did, as measured; a run may be called cold only if `cold` is true."""

    resident_before: int | None
    resident_after: int | None
    total: int
    method: Literal["fadvise", "drop_caches", "none"]
    why_warm: str | None  # None when cold
    mappers: tuple[Mapper, ...] = ()

    @property
    def cold(self) -> bool:
        return self.why_warm is None


def residency(*paths: Path) -> Residency:
    """Bytes of the files (all parts of a split model) that are in the page cache, without touching them.

    cachestat(2) where the kernel has it (pages on their way from the disk count), else mincore(2).
    Both answer only to owners and writers of a file: mincore tells everybody else that all is
    resident, so those get "unknown".
    """
    total = sum(_size(path) for path in paths)
    if sys.platform != "linux":
        why = f"page residency cannot be measured on {sys.platform}"
        return Residency(resident=None, total=total, method="unknown", why=why)
    resident = 0
    method: Literal["cachestat", "mincore"] = "cachestat"
    for path in paths:
        with _opened(path) as fd:
            found = _cachestat(fd, _size(path))
            if found is None:
                if not (os.fstat(fd).st_uid == os.geteuid() or os.access(path, os.W_OK)):
                    why = f"only the owner or a writer may ask which pages of {path} are resident"
                    return Residency(resident=None, total=total, method="unknown", why=why)
                found, method = _mincore(fd, _size(path)), "mincore"
        resident += found
    return Residency(resident=resident, total=total, method=method)


def evict(paths: Sequence[Path], *, drop_caches: bool = False, proc: Path = PROC) -> EvictResult:
    """Drop the files from the page cache and measure what stayed.

    Only pages that no process maps and that are written back can go, so the files are synced first and
    whoever maps them is named. With `drop_caches` (root; empties the cache of the whole machine) the
    kernel switch is used if the advice was not enough.
    """
    before = residency(*paths)
    if sys.platform != "linux":
        why = f"{sys.platform} has no call that drops one file from the page cache"
        return _result(before, before, "none", why)
    kinds = {mount.filesystem for path in paths if (mount := mount_of(path, proc=proc))}
    if memory := kinds & MEMORY_FILESYSTEMS:
        why = f"on {memory.pop()} the file is memory: no cold run is possible, move the model to a disk"
        return _result(before, before, "none", why)

    method: Literal["fadvise", "drop_caches"] = "fadvise"
    after = before
    for _ in range(_ATTEMPTS):
        for path in paths:
            with _opened(path) as fd:
                with contextlib.suppress(OSError):  # not all file systems can; the measurement decides
                    os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        after = residency(*paths)
        if _is_cold(after):
            break
    refused = ""
    if drop_caches and not _is_cold(after):
        try:
            (proc / "sys/vm/drop_caches").write_text("1\n", encoding="utf-8")
        except OSError as e:
            refused = f"; drop_caches was refused: {e.strerror}"
        else:
            after, method = residency(*paths), "drop_caches"
    if _is_cold(after):
        return _result(before, after, method, None)
    if after.resident is None:
        return _result(before, after, method, f"not verified: {after.why}{refused}")
    found = mappers(paths, proc=proc)
    stayed = f"{after.resident / MIB:.1f} of {after.total / MIB:.1f} MiB stayed in the page cache"
    holders = ", ".join(f"{m.pid} ({m.command})" for m in found)
    reason = f"mapped by process {holders}" if found else "no process seen here maps it"
    return _result(before, after, method, f"{stayed}: {reason}{refused}", found)


def mappers(paths: Sequence[Path], *, proc: Path = PROC) -> tuple[Mapper, ...]:
    """Processes that map one of the files, by /proc/<pid>/maps; those of other users are not seen."""
    names = {str(path.resolve()) for path in paths}
    inodes = {(os.major(s.st_dev), os.minor(s.st_dev), s.st_ino) for s in map(_stat, paths)}
    found = []
    for process in sorted(proc.glob("[0-9]*"), key=lambda p: int(p.name)):
        try:
            lines = (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
            command = (process / "cmdline").read_text(encoding="utf-8", errors="replace")
        except OSError:  # ended meanwhile, or not ours to read
            continue
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) < 6:
                continue
            # By name as well: btrfs and overlay show another device number here than stat does.
            major, _, minor = fields[3].partition(":")
            if fields[5] in names or (int(major, 16), int(minor, 16), int(fields[4])) in inodes:
                found.append(Mapper(pid=int(process.name), command=command.replace("\0", " ").strip()))
                break
    return tuple(found)


def _is_cold(measured: Residency) -> bool:
    return measured.resident is not None and measured.resident <= COLD_SHARE * measured.total


def _result(
    before: Residency,
    after: Residency,
    method: Literal["fadvise", "drop_caches", "none"],
    why_warm: str | None,
    found: tuple[Mapper, ...] = (),
) -> EvictResult:
    return EvictResult(
        resident_before=before.resident,
        resident_after=after.resident,
        total=after.total,
        method=method,
        why_warm=why_warm,
        mappers=found,
    )


# --- System calls


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as e:
        raise BenchError(f"cannot look at the model file: {e.strerror}", where=path) from e


def _size(path: Path) -> int:
    found = _stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise BenchError("not a regular file", where=path)
    return found.st_size


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise BenchError(f"cannot open the model file: {e.strerror}", where=path) from e
    try:
        yield fd
    finally:
        os.close(fd)


def _cachestat(fd: int, size: int) -> int | None:
    """Resident bytes by cachestat(2); None where the kernel or a filter does not allow the call."""
    wanted = (ctypes.c_uint64 * 2)(0, size)  # offset, length
    # cached, dirty, under write-back, evicted, recently evicted: pages
    pages = (ctypes.c_uint64 * 5)()
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    number, zero = ctypes.c_long(_SYS_CACHESTAT), ctypes.c_long(0)
    if size and call(number, ctypes.c_long(fd), ctypes.byref(wanted), ctypes.byref(pages), zero) != 0:
        return None
    return min(pages[0] * mmap.PAGESIZE, size)


def _mincore(fd: int, size: int, *, chunk: int = _CHUNK) -> int:
    """Resident bytes by mincore(2) over mappings of `chunk` bytes, a multiple of the page size."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    pages = 0
    for offset in range(0, size, chunk):
        length = min(chunk, size - offset)
        address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
        if address == ctypes.c_void_p(-1).value:
            raise BenchError(f"cannot map the model file: {os.strerror(ctypes.get_errno())}")
        try:
            vector = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            if libc.mincore(address, length, vector.ctypes.data) != 0:
                raise BenchError(f"mincore failed: {os.strerror(ctypes.get_errno())}")
            pages += int(np.count_nonzero(vector & 1))  # the other bits are reserved
        finally:
            libc.munmap(address, length)
    return min(pages * mmap.PAGESIZE, size)
