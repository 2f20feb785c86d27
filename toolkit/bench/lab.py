"""A fast disk made of memory: ext4 on a loop device whose file lies on a tmpfs. Needs root, and Linux."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from toolkit.bench.disk import mounts
from toolkit.bench.limits import available_memory
from toolkit.console import GIB, MIB
from toolkit.errors import MachineError, ToolkitError
from toolkit.process import run

_PREFIX = "moe-madv-lab-"
_TOOLS = ("mount", "umount", "losetup", "mkfs.ext4")
_OVERHEAD = 1.05  # of ext4 with a small journal
_FIXED = 64 * MIB


@contextlib.contextmanager
def fast_disk(nbytes: int, *, read_ahead_kb: int) -> Iterator[Path]:
    """A folder with room for `nbytes` on the fast disk; it is gone at the end, also after SIGTERM and SIGHUP.

    What a killed process left is removed first. Raises MachineError where it cannot be made.
    """
    _require(nbytes)
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            _dismantle(left)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    with _ended_by_exception():
        try:
            yield _make(folder, nbytes, read_ahead_kb)
        finally:
            _dismantle(folder)


def fill(path: Path, nbytes: int) -> None:
    """Write a file of bytes that do not repeat within a piece."""
    piece = os.urandom(MIB)
    with path.open("wb") as f:
        for start in range(0, nbytes, MIB):
            f.write((start.to_bytes(8, "little") + piece[8:])[: nbytes - start])
        f.flush()
        os.fsync(f.fileno())


def _require(nbytes: int) -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise MachineError("a disk made of memory needs Linux and root", hint="run the command as root")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]:
        raise MachineError(f"missing: {', '.join(missing)}", hint="install util-linux, mount and e2fsprogs")
    free = available_memory()
    if nbytes * _OVERHEAD + GIB > free.bytes:
        raise MachineError(
            f"{nbytes / GIB:.1f} GiB of memory and 1 more are needed, {free.bytes / GIB:.1f} are free",
            where=free.source,
            hint="give a smaller --lab",
        )


def _make(folder: Path, nbytes: int, read_ahead_kb: int) -> Path:
    ram, disk, image = folder / "ram", folder / "disk", folder / "ram" / "image"
    ram.mkdir()
    disk.mkdir()
    size = int(nbytes * _OVERHEAD) + _FIXED
    _run("mount", "-t", "tmpfs", "-o", f"size={size + _FIXED},mode=700", "moe-madv-lab", ram)
    with image.open("wb") as f:
        f.truncate(size)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", "-J", "size=8", image)
    device = _run("losetup", "--find", "--show", image).strip()
    window = Path("/sys/block") / Path(device).name / "queue/read_ahead_kb"
    window.write_text(f"{read_ahead_kb}\n", encoding="utf-8")
    _run("mount", "-o", "noatime", device, disk)
    return disk


def _dismantle(folder: Path) -> None:
    """Undo as much of `_make` as was done; the first failure is raised after everything was tried."""
    failures: list[ToolkitError] = []
    for point in (folder / "disk", folder / "ram"):
        image = folder / "ram" / "image"
        if point.name == "ram" and image.exists():
            with _collected(failures):
                for device in _run("losetup", "--noheadings", "--output", "NAME", "--associated", image).split():
                    _run("losetup", "--detach", device)
        if any(mount.point == str(point) for mount in mounts()):
            with _collected(failures):
                _run("umount", point)
    if failures:
        raise failures[0]
    shutil.rmtree(folder)


@contextlib.contextmanager
def _collected(failures: list[ToolkitError]) -> Iterator[None]:
    try:
        yield
    except ToolkitError as e:
        failures.append(e)


@contextlib.contextmanager
def _ended_by_exception() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process by SystemExit, so that what is open gets closed."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(tool: str, *args: str | Path) -> str:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return run([tool, *args], env={"PATH": path}).stdout
