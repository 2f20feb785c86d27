"""What other processes do while nothing is measured: who reads from the disk, who else runs a model."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from toolkit.bench import disk
from toolkit.console import MIB
from toolkit.model.text import shown

# Less is noise beside reads of hundreds of MiB/s.
_LEAST_MIB_S = 1.0
_SERVERS = re.compile(
    r"llama[-_](server|cli|bench|run|perplexity)|ollama|koboldcpp|lm.?studio|vllm|ktransformers", re.I
)
_LIBRARIES = re.compile(r"/lib(llama|ggml)[^/]*\.(so|dylib)|\.gguf$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Process:
    """Somebody else's process."""

    pid: int
    name: str
    read_mib_s: float | None = None  # from the disk; None: not asked or not told


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What the others did in a stretch of time in which we read nothing."""

    seconds: float
    device_mib_s: float | None  # read from the model's device by everybody; None: no counter
    readers: tuple[Process, ...]  # those that are seen, busiest first
    inference: tuple[Process, ...]  # processes with a model runtime or a GGUF file


def watch(device: str | None, *, seconds: float = 1.0, root: Path = Path("/")) -> Activity:
    """Watch the machine for `seconds`; other users' processes are seen by root only."""
    before, mine = _read_by_process(), disk.bytes_read(device, root=root) if device else None
    start = time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - start
    after, now = _read_by_process(), disk.bytes_read(device, root=root) if device else None
    rates = {pid: (n - before[pid]) / MIB / elapsed for pid, n in after.items() if pid in before}
    busy = sorted((pid for pid in rates if rates[pid] >= _LEAST_MIB_S), key=lambda pid: -rates[pid])
    return Activity(
        seconds=elapsed,
        device_mib_s=None if mine is None or now is None else (now - mine) / MIB / elapsed,
        readers=tuple(Process(pid=pid, name=_name(pid), read_mib_s=rates[pid]) for pid in busy),
        inference=_inference(root / "proc"),
    )


def _read_by_process() -> dict[int, int]:
    """Bytes from the storage layer by process id; empty where the system counts none (macOS)."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, AttributeError, OSError):
            found[process.pid] = process.io_counters().read_bytes
    found.pop(os.getpid(), None)
    return found


def _inference(proc: Path) -> tuple[Process, ...]:
    found = []
    for pid in psutil.pids():
        name = _name(pid)
        maps = disk.read(proc / str(pid) / "maps") or ""
        if pid != os.getpid() and (_SERVERS.match(name) or _LIBRARIES.search(maps)):
            found.append(Process(pid=pid, name=name))
    return tuple(found)


def _name(pid: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        return shown(psutil.Process(pid).name())
    return "?"
