"""What a process and its machine have done so far: bytes read, faults, CPU time, memory, pressure.

Stands alone (standard library only) so that a process outside the toolkit's environment can load it by
file path. For that it does without `from __future__ import annotations`: dataclasses resolve string
annotations through sys.modules, where a file loaded by path need not be.
"""

import ctypes
import dataclasses
import os
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
SYS = Path("/sys")

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Counters:
    """One reading; None where the system does not tell."""

    time_s: float  # monotonic clock
    # the process
    read_bytes: int | None  # from the storage layer, page faults included
    minor_faults: int | None
    major_faults: int | None
    user_s: float | None
    system_s: float | None
    queued_us: float | None  # in which the main thread was ready and waited for a core
    rss_bytes: int | None
    swap_bytes: int | None
    # the machine
    psi_io_some_us: int | None  # time in which at least one task waited for I/O
    psi_io_full_us: int | None  # time in which every task did
    psi_memory_some_us: int | None  # as above, for memory to be freed or read again
    idle_s: float | None  # of all CPUs together, without waiting for I/O
    mem_available_bytes: int | None
    swap_free_bytes: int | None
    temperature_c: float | None  # hottest thermal zone


def snapshot(pid: int | None = None, *, proc: Path = PROC, sys_root: Path = SYS) -> Counters:
    """Read all counters of a process (this one by default) and of the machine."""
    process = _darwin(pid or os.getpid()) if sys.platform == "darwin" else _linux(proc / str(pid or "self"))
    found = process | _machine(proc, sys_root)
    values: Values = {field.name: found.get(field.name) for field in dataclasses.fields(Counters)}
    return Counters(**values | {"time_s": time.monotonic()})


def delta(before: Counters, after: Counters) -> Counters:
    """`after` minus `before`, field by field; None where either is unknown."""
    a, b = dataclasses.asdict(before), dataclasses.asdict(after)
    change: Values = {name: None if None in (a[name], b[name]) else b[name] - a[name] for name in a}
    return Counters(**change)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, int]:
    """`Name: 12 kB` lines as bytes, `name: 12` lines as they are."""
    found = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _pressure(path: Path) -> dict[str, int]:
    """Microseconds of "some avg10=0.00 avg60=0.00 avg300=0.13 total=4005985" and of "full ..."."""
    rows = [line.split() for line in _text(path).splitlines()]
    return {row[0]: int(row[-1].removeprefix("total=")) for row in rows if "total=" in row[-1]}


def _machine(proc: Path, sys_root: Path) -> Values:
    meminfo = _fields(proc / "meminfo")
    stalled = {what: _pressure(proc / "pressure" / what) for what in ("io", "memory")}
    uptime = _text(proc / "uptime").split()
    zones = [_text(zone).strip() for zone in sys_root.glob("class/thermal/thermal_zone*/temp")]
    milli_c = [int(t) for t in zones if t.isdecimal()]
    return {
        "psi_io_some_us": stalled["io"].get("some"),
        "psi_io_full_us": stalled["io"].get("full"),
        "psi_memory_some_us": stalled["memory"].get("some"),
        "idle_s": float(uptime[1]) if len(uptime) == 2 else None,
        "mem_available_bytes": meminfo.get("MemAvailable"),
        "swap_free_bytes": meminfo.get("SwapFree"),
        "temperature_c": max(milli_c) / 1000 if milli_c else None,
    }


def _linux(process: Path) -> Values:
    status = _fields(process / "status")
    values: Values = {
        "read_bytes": _fields(process / "io").get("read_bytes"),
        "rss_bytes": status.get("VmRSS"),
        "swap_bytes": status.get("VmSwap"),
    }
    schedule = _text(process / "schedstat").split()
    if len(schedule) == 3:
        values["queued_us"] = int(schedule[1]) / 1000
    # The name is in parentheses and may hold spaces and parentheses itself: count from the last one.
    # What follows it is field 3 of proc_pid_stat(5).
    rest = _text(process / "stat").rpartition(")")[2].split()
    if len(rest) > 15 - 3:
        tick = os.sysconf("SC_CLK_TCK")
        values |= {
            "minor_faults": int(rest[10 - 3]),
            "major_faults": int(rest[12 - 3]),
            "user_s": int(rest[14 - 3]) / tick,
            "system_s": int(rest[15 - 3]) / tick,
        }
    return values


_RUSAGE_INFO_V2 = 2
# struct rusage_info_v2 of <sys/resource.h>: a 16-byte uuid and eighteen 64-bit fields.
_RUSAGE_V2 = struct.Struct("16s18Q")


def _darwin(pid: int) -> Values:
    buffer = ctypes.create_string_buffer(_RUSAGE_V2.size)
    try:
        failed = ctypes.CDLL(None).proc_pid_rusage(pid, _RUSAGE_INFO_V2, buffer)
    except (AttributeError, OSError):
        return {}
    return {} if failed else _rusage_v2(buffer.raw)


def _rusage_v2(raw: bytes) -> Values:
    """CPU times are left out: they count in units that differ between Intel and Apple processors."""
    fields = _RUSAGE_V2.unpack(raw)[1:]
    return {"major_faults": fields[4], "rss_bytes": fields[6], "read_bytes": fields[16]}
