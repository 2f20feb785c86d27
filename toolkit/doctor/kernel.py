"""Which calls of the kernel work here: asked by using them, since versions and sandboxes both decide."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from toolkit.bench import blocked, pagecache
from toolkit.errors import BenchError

_MADV_POPULATE_READ = 22  # Linux 5.14
_SYS_IO_URING_SETUP = 425  # the same number on every architecture but alpha
_IO_URING_PARAMS_BYTES = 120


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Whether one call works; `works` is None where it does not exist on this system or cannot be tried."""

    works: bool | None
    why: str | None = None


def _absent() -> Feature | None:
    return None if sys.platform == "linux" else Feature(works=None, why=f"a call of Linux, this is {sys.platform}")


def populate_read() -> Feature:
    """MADV_POPULATE_READ on one anonymous page."""
    if absent := _absent():
        return absent
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_READ)
        except OSError as e:
            return Feature(works=False, why=e.strerror)
    return Feature(works=True)


def io_uring() -> Feature:
    """io_uring_setup(2) with one entry; sysctl kernel.io_uring_disabled and sandboxes refuse it."""
    if absent := _absent():
        return absent
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    params = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    fd = call(ctypes.c_long(_SYS_IO_URING_SETUP), ctypes.c_long(1), params)
    if fd < 0:
        return Feature(works=False, why=os.strerror(ctypes.get_errno()))
    os.close(fd)
    return Feature(works=True)


def cachestat(file: Path) -> Feature:
    """cachestat(2) on a file."""
    if absent := _absent():
        return absent
    try:
        found = pagecache.residency(file)
    except BenchError as e:
        return Feature(works=None, why=e.what)
    return Feature(works=found.method == "cachestat", why=None if found.method == "cachestat" else found.why)


def pressure(proc: Path) -> Feature:
    """Pressure stall information for I/O; some kernels list the file and refuse to read it."""
    if absent := _absent():
        return absent
    try:
        (proc / "pressure/io").read_text(encoding="utf-8")
    except OSError as e:
        off = e.errno in (errno.ENOENT, errno.EOPNOTSUPP)
        return Feature(works=False, why="off: boot with psi=1" if off else e.strerror)
    return Feature(works=True)


def run_queue(proc: Path) -> Feature:
    """The time that a thread was ready and without a core."""
    if absent := _absent():
        return absent
    told = blocked.now(proc).queued is not None
    return Feature(works=told, why=None if told else "no /proc/thread-self/schedstat: build with CONFIG_SCHED_INFO")
