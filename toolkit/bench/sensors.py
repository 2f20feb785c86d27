"""What a machine tells of itself at one moment, cheaply: counters and gauges of disk, memory, cores and GPUs.

On Linux from sysfs and proc, which takes well under a millisecond; GPUs from one `nvidia-smi` that keeps running. What
cannot be read is absent, never an error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from toolkit.bench import disk, machine
from toolkit.bench.disk import Storage, integer, read
from toolkit.console import MIB

# Temperatures change slowly, and a disk asks its controller for them: they are read at every tenth turn.
_SENSOR_TURNS = 10
_PLAUSIBLE_C = range(1, 126)  # sensors with nothing behind them say 0, 127 or -273
_DISK_CHIPS = ("nvme", "drivetemp")
_MOST_CORES = 4
_LOWEST_PRIORITY = 19
_GPU_FIELDS = ("index", "utilization.gpu", "memory.used", "power.draw", "temperature.gpu")
_GPU_PERIOD_MS = 500
_GPU_STALE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was read at one time of the monotonic clock; what is unknown is absent.

    Counters: disk_busy_ms, disk_read_bytes, disk_written_bytes, cpu_energy_uj. Gauges: cpu_mhz (mean of a few of our
    cores), available_bytes (MemAvailable), swap_used_bytes, temperature_c (hottest sensor, the disks' apart),
    disk_temperature_c, gpu_util_percent (busiest), gpu_memory_bytes and gpu_power_w (all together), gpu_temperature_c
    (hottest).
    """

    time_s: float
    values: Mapping[str, float]


class Sensors:
    """All that this machine can tell; `read` never raises."""

    def __init__(self, linux: _Linux | None, gpus: _Gpus | None) -> None:
        self._linux, self._gpus = linux, gpus

    def read(self) -> Reading:
        now = time.monotonic()
        values = self._linux.values() if self._linux else {}
        return Reading(time_s=now, values=values | (self._gpus.latest(now) if self._gpus else {}))


@contextlib.contextmanager
def sensors(
    storage: Storage,
    *,
    root: Path = Path("/"),
    platform: str = sys.platform,
    cores: Collection[int] | None = None,
) -> Iterator[Sensors]:
    """The sensors of this machine and of the device under a model; nvidia-smi runs while the context is open.

    `cores` are those whose clock counts, by default those that we may run on; `root` holds proc and sys.
    """
    ours = machine.usable_core_numbers() if cores is None else cores
    with _nvidia_smi() as gpus:
        yield Sensors(_Linux(storage, root, ours) if platform == "linux" else None, gpus)


def power_mode(*, root: Path = Path("/")) -> dict[str, Any]:
    """What limits the clock at this moment: governor, the firmware's profile, whether on battery; None: not told."""
    power = machine.power(root / "sys")
    return {"governor": machine.governor(root / "sys"), "profile": power.profile, "on_battery": power.on_battery}


def give_way(thread: int) -> None:
    """Give a thread (Linux) or process the lowest priority: it takes next to nothing from threads that compute."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, _LOWEST_PRIORITY)


# --- Linux


class _Linux:
    """The files that tell what the machine does, found once."""

    def __init__(self, storage: Storage, root: Path, cores: Collection[int]) -> None:
        self._storage, self._root = storage, root
        sys_ = root / "sys"
        self._meminfo = root / "proc/meminfo"
        self._disk = sys_ / "class/block" / storage.device / "stat" if storage.device else None
        self._clocks = _clocks(sys_, cores)
        self._packages = [
            _Package(folder)
            for folder in sorted(sys_.glob("class/powercap/intel-rapl:*"))
            if (read(folder / "name") or "").startswith("package")
        ]
        chips = [folder for folder in sys_.glob("class/hwmon/hwmon*") if read(folder / "name") not in _DISK_CHIPS]
        self._thermal = [
            *sys_.glob("class/thermal/thermal_zone*/temp"),
            *(sensor for chip in chips for sensor in chip.glob("temp*_input")),
        ]
        self._degrees: dict[str, float] = {}
        self._turn = 0

    def values(self) -> dict[str, float]:
        if self._turn % _SENSOR_TURNS == 0:
            self._degrees = self._temperatures()
        self._turn += 1
        return {**self._io(), **self._memory(), **self._energy(), **self._clock(), **self._degrees}

    def _io(self) -> dict[str, float]:
        """Fields 3, 7 and 10 of the kernel's Documentation/block/stat: sectors of 512 bytes, milliseconds."""
        words = (read(self._disk) or "").split() if self._disk else []
        if len(words) < 10:
            return {}
        return {
            "disk_read_bytes": int(words[2]) * 512,
            "disk_written_bytes": int(words[6]) * 512,
            "disk_busy_ms": int(words[9]),
        }

    def _memory(self) -> dict[str, float]:
        lines = [line.split() for line in (read(self._meminfo) or "").splitlines()]
        kib = {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
        found: dict[str, float] = {}
        if "MemAvailable:" in kib:
            found["available_bytes"] = kib["MemAvailable:"] * 1024
        if "SwapTotal:" in kib and "SwapFree:" in kib:
            found["swap_used_bytes"] = (kib["SwapTotal:"] - kib["SwapFree:"]) * 1024
        return found

    def _energy(self) -> dict[str, float]:
        known = [uj for package in self._packages if (uj := package.used_uj()) is not None]
        return {"cpu_energy_uj": sum(known)} if known and len(known) == len(self._packages) else {}

    def _clock(self) -> dict[str, float]:
        khz = [value for clock in self._clocks if (value := integer(clock)) is not None]
        return {"cpu_mhz": sum(khz) / len(khz) / 1000} if khz else {}

    def _temperatures(self) -> dict[str, float]:
        milli_c = [value for sensor in self._thermal if (value := integer(sensor)) is not None]
        known = {
            "temperature_c": max((m / 1000 for m in milli_c if m // 1000 in _PLAUSIBLE_C), default=None),
            "disk_temperature_c": disk.temperature_c(self._storage, root=self._root),
        }
        return {name: value for name, value in known.items() if value is not None}


def _clocks(sys_: Path, cores: Collection[int]) -> list[Path]:
    """The clocks of a few of these cores, evenly spread: on some machines each reading interrupts its core."""
    files = [sys_ / f"devices/system/cpu/cpu{n}/cpufreq/scaling_cur_freq" for n in sorted(cores)]
    there = [file for file in files if file.exists()]
    return there[:: max(1, -(-len(there) // _MOST_CORES))]


class _Package:
    """The energy counter of one processor package (RAPL), which starts again when it is full."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = integer(folder / "max_energy_range_uj") or 0
        self._last = self._base = integer(self._file)
        self._rounds = 0

    def used_uj(self) -> int | None:
        """Microjoules since the first reading; None where only root may ask."""
        now = integer(self._file)
        if now is None or self._last is None or self._base is None:
            return None
        self._rounds += now < self._last
        self._last = now
        return now - self._base + self._rounds * self._range


# --- GPUs


class _Gpus:
    """The last line of nvidia-smi about each GPU."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, list[float | None]]] = {}

    def listen(self, lines: IO[bytes]) -> None:
        """Follow the output to its end."""
        with lines:
            for line in lines:
                index, *rest = (word.strip() for word in line.decode("utf-8", "replace").split(","))
                if len(rest) == len(_GPU_FIELDS) - 1 and index.isdecimal():
                    self._said[index] = (time.monotonic(), [_first_number(word) for word in rest])

    def latest(self, now_s: float) -> dict[str, float]:
        """What the GPUs said last, all of them together; nothing once they are silent."""
        said = [values for time_s, values in list(self._said.values()) if now_s - time_s <= _GPU_STALE_S]
        columns = [[value for value in column if value is not None] for column in zip(*said, strict=True)]
        if not columns:
            return {}
        util, memory, power, heat = columns
        known = {
            "gpu_util_percent": max(util, default=None),
            "gpu_memory_bytes": sum(memory) * MIB if memory else None,
            "gpu_power_w": sum(power) if power else None,
            "gpu_temperature_c": max(heat, default=None),
        }
        return {name: value for name, value in known.items() if value is not None}


def _first_number(text: str) -> float | None:
    """`63.2` of `63.2 W`; None of `[N/A]`."""
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        return None


@contextlib.contextmanager
def _nvidia_smi() -> Iterator[_Gpus | None]:
    """GPUs as nvidia-smi tells of them while the context is open; None without it.

    Its whole group is killed at the end. Should this process be killed, its next line meets a closed pipe.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        yield None
        return
    argv = [program, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    process = subprocess.Popen(
        [*argv, "-lms", str(_GPU_PERIOD_MS)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    gpus = _Gpus()
    listener = threading.Thread(target=gpus.listen, args=(process.stdout,), daemon=True)
    listener.start()
    try:
        give_way(process.pid)
        yield gpus
    finally:
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
        listener.join()
