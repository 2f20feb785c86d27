"""What is read of a machine beside a worker. The machines are small trees of files, the GPUs a script."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_machine import link, tree

from toolkit.bench.disk import Storage, storage_of
from toolkit.bench.sampler import MOST_VALUES, SERIES, Watch, summarize
from toolkit.bench.sensors import Reading, Sensors, power_mode, sensors

MIB = 1024**2
GIB = 1024**3
NOWHERE = Storage(**dict.fromkeys((f.name for f in dataclasses.fields(Storage)), None) | {"parts": ()})  # type: ignore[arg-type]


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks for the processes in /proc")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No nvidia-smi but one that a test puts there."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with an NVMe disk, two packages, four cores and sensors, some of them with nothing behind them."""
    base = tree(
        tmp_path / "root",
        {
            "proc/self/mountinfo": "27 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw",
            "proc/meminfo": "MemTotal: 65871244 kB\nMemAvailable: 2048 kB\nSwapTotal: 1000 kB\nSwapFree: 400 kB",
            # 3rd, 7th and 10th field: 2048 sectors read, 4096 written, 700 ms busy
            "sys/devices/pci0/nvme0n1/stat": "    10 0 2048 5 20 0 4096 6 0 700 11 0 0 0 0",
            "sys/devices/pci0/nvme0n1/size": 1000,
            "sys/devices/pci0/nvme0n1/nvme0n1p2/partition": 2,
            "sys/devices/pci0/nvme0n1/device/hwmon/hwmon0/temp1_input": 61850,
            "sys/class/hwmon/hwmon0/name": "nvme",
            "sys/class/hwmon/hwmon0/temp1_input": 61850,
            "sys/class/hwmon/hwmon1/name": "coretemp",
            "sys/class/hwmon/hwmon1/temp1_input": 55000,
            "sys/class/hwmon/hwmon1/temp2_input": 57500,
            "sys/class/hwmon/hwmon2/name": "nct6775",
            "sys/class/hwmon/hwmon2/temp1_input": 127500,
            "sys/class/hwmon/hwmon2/temp2_input": -62000,
            "sys/class/thermal/thermal_zone0/temp": 41000,
            "sys/class/powercap/intel-rapl:0/name": "package-0",
            "sys/class/powercap/intel-rapl:0/energy_uj": 900,
            "sys/class/powercap/intel-rapl:0/max_energy_range_uj": 1000,
            "sys/class/powercap/intel-rapl:0:0/name": "core",
            "sys/class/powercap/intel-rapl:0:0/energy_uj": 5,
            "sys/class/powercap/intel-rapl:1/name": "package-1",
            "sys/class/powercap/intel-rapl:1/energy_uj": 100,
            "sys/class/powercap/intel-rapl:1/max_energy_range_uj": 1000,
            "sys/class/powercap/intel-rapl:2/name": "psys",
            "sys/class/powercap/intel-rapl:2/energy_uj": 7,
            **{f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_cur_freq": 1_000_000 * (n + 1) for n in range(4)},
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
            "sys/firmware/acpi/platform_profile": "balanced",
            "sys/firmware/acpi/platform_profile_choices": "low-power balanced performance",
            "sys/class/power_supply/BAT0/type": "Battery",
            "sys/class/power_supply/BAT0/status": "Discharging",
        },
    )
    link(base / "sys/dev/block/259:2", base / "sys/devices/pci0/nvme0n1/nvme0n1p2")
    link(base / "sys/class/block/nvme0n1", base / "sys/devices/pci0/nvme0n1")
    return base


def opened(root: Path, **more: Any) -> Sensors:
    with sensors(storage_of(Path("/model.gguf"), root=root), root=root, cores={0, 1, 2}, **more) as found:
        return found


# --- What is read


def test_a_machine_that_tells_everything(root: Path) -> None:
    found = opened(root, platform="linux")
    tree(root, {"sys/class/powercap/intel-rapl:0/energy_uj": 50, "sys/class/powercap/intel-rapl:1/energy_uj": 130})
    assert found.read().values == {
        "disk_read_bytes": 2048 * 512,
        "disk_written_bytes": 4096 * 512,
        "disk_busy_ms": 700,
        "available_bytes": 2 * MIB,
        "swap_used_bytes": 600 * 1024,
        "temperature_c": 57.5,  # neither the disk's nor what cannot be
        "disk_temperature_c": 61.85,
        "cpu_mhz": 2000,  # of 1, 2 and 3 GHz; the fourth core is not ours
        # the first package went on from 900 through 1000 to 50, the second from 100 to 130
        "cpu_energy_uj": 150 + 30,
    }
    assert power_mode(root=root) == {"governor": "powersave", "profile": "balanced", "on_battery": True}


def test_temperatures_are_asked_for_now_and_then_only(root: Path) -> None:
    found = opened(root, platform="linux")
    assert found.read().values["temperature_c"] == 57.5
    tree(root, {"sys/class/hwmon/hwmon1/temp2_input": 80000, "proc/meminfo": "MemAvailable: 1024 kB"})
    second = found.read().values
    assert (second["temperature_c"], second["available_bytes"]) == (57.5, MIB)
    for _ in range(9):
        last = found.read().values
    assert last["temperature_c"] == 80


def test_energy_that_only_root_may_read_is_not_told(root: Path) -> None:
    for n in (0, 1):
        (root / f"sys/class/powercap/intel-rapl:{n}/energy_uj").unlink()
    assert "cpu_energy_uj" not in opened(root, platform="linux").read().values


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_tell_nothing_and_fail_at_nothing(root: Path, platform: str) -> None:
    with sensors(NOWHERE, root=root, platform=platform) as found, Watch(found, period_s=0.01) as watch:
        watch.mark("tg1")
    seen = watch.observed("tg1", 1.0)
    assert seen == {"readings": 1, "swap_delta_bytes": None, **dict.fromkeys(SERIES)}


def test_an_empty_tree_tells_nothing_either(tmp_path: Path) -> None:
    with sensors(NOWHERE, root=tmp_path, platform="linux") as found:
        assert found.read().values == {}
    assert power_mode(root=tmp_path) == {"governor": None, "profile": None, "on_battery": None}


# --- GPUs

SMI = """#!{python}
import os, sys, time
open({pid!r}, "w").write(str(os.getpid()))
open({args!r}, "w").write(" ".join(sys.argv[1:]))
if {child}:
    os.fork()
while True:
    for line in {lines!r}:
        print(line, flush=True)
    time.sleep({every})
"""


def fake_smi(tmp_path: Path, *lines: str, every: float = 0.05, child: bool = False) -> Path:
    """nvidia-smi that says these lines again and again; returns the file that will hold its process id."""
    pid, program = tmp_path / "pid", tmp_path / "bin/nvidia-smi"
    values = {"pid": str(pid), "args": str(tmp_path / "args"), "lines": lines, "every": every, "child": child}
    program.write_text(SMI.format(python=sys.executable, **values), encoding="utf-8")
    program.chmod(0o755)
    return pid


def eventually(found: Sensors) -> dict[str, float]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if values := dict(found.read().values):
            return values
        time.sleep(0.02)
    return {}


def members(group: int) -> list[str]:
    """State letters of all processes of a group that are not yet over."""
    stats = [p.rpartition(")")[2].split() for p in _stats()]
    return [words[0] for words in stats if int(words[2]) == group and words[0] not in "ZX"]


def _stats() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            yield path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue


@LINUX
def test_gpus_are_summed_up_and_their_program_ends_with_the_context(tmp_path: Path) -> None:
    lines = ("0, 37, 1024, 60.50, 41", "1, 93, 512, [N/A], 66", "no line of a GPU")
    pid = fake_smi(tmp_path, *lines, child=True)
    with sensors(NOWHERE, platform="darwin") as found:
        deadline = time.monotonic() + 20
        while len(values := eventually(found)) and values["gpu_util_percent"] != 93 and time.monotonic() < deadline:
            time.sleep(0.02)
        group = int(pid.read_text(encoding="utf-8"))
        assert members(group)
    assert values == {
        "gpu_util_percent": 93,
        "gpu_memory_bytes": 1536 * MIB,
        "gpu_power_w": 60.5,
        "gpu_temperature_c": 66,
    }
    asked = (tmp_path / "args").read_text(encoding="utf-8")
    assert asked.startswith("--query-gpu=index,utilization.gpu,memory.used,power.draw,temperature.gpu ")
    assert asked.endswith(" -lms 500")
    assert members(group) == []
    assert [t for t in threading.enumerate() if t is not threading.main_thread()] == []


@LINUX
def test_the_program_ends_when_a_run_fails(tmp_path: Path) -> None:
    pid = fake_smi(tmp_path, "0, 1, 1, 1, 1")
    with pytest.raises(ValueError, match="broken"), sensors(NOWHERE, platform="darwin") as found:
        assert eventually(found)
        raise ValueError("broken")
    assert members(int(pid.read_text(encoding="utf-8"))) == []


def test_a_program_that_fails_at_once_is_no_gpu(tmp_path: Path) -> None:
    program = tmp_path / "bin/nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not talk to the driver.'\nexit 9\n")
    program.chmod(0o755)
    with sensors(NOWHERE, platform="darwin") as found:
        assert found.read().values == {}


# --- Summed up


def readings(*times: float, **columns: list[float]) -> list[Reading]:
    return [
        Reading(time_s=t, values={name: column[i] for name, column in columns.items()}) for i, t in enumerate(times)
    ]


def test_rates_are_of_what_lies_between_two_readings() -> None:
    data = readings(
        100.0,
        100.5,
        101.0,
        102.0,
        disk_busy_ms=[0, 500, 600, 1000],  # 100 %, 20 %, 40 %
        disk_read_bytes=[0, 10 * MIB, 10 * MIB, 40 * MIB],
        cpu_energy_uj=[0, 20e6, 30e6, 40e6],
        available_bytes=[9 * GIB, 4 * GIB, 2 * GIB, 3 * GIB],
        swap_used_bytes=[1000, 1000, 4096, 2000],
    )
    found = summarize(data, 100.0, 102.0, series=True)
    assert found["readings"] == 3
    assert found["disk_util_percent"] == {"min": 20, "mean": 50, "max": 100, "values": [100, 20, 40]}
    assert found["disk_read_mib_s"] == {"min": 0, "mean": 20, "max": 30, "values": [20, 0, 30]}
    assert found["cpu_power_w"] == {"min": 10, "mean": 20, "max": 40, "values": [40, 20, 10]}
    assert found["disk_write_mib_s"] is None
    # four digits of 2 GiB; the reading before the test is none of its own
    assert found["available_bytes"]["min"] == 2_147_000_000
    assert found["available_bytes"]["max"] == 4_295_000_000
    assert found["swap_delta_bytes"] == 3096
    assert found["every_s"] == 0.6667


def test_each_test_gets_its_own_stretch() -> None:
    data = readings(0.0, 0.5, 1.0, 1.5, 2.0, cpu_mhz=[1, 2, 3, 4, 5])
    assert summarize(data, 0.0, 1.0)["cpu_mhz"] == {"min": 2, "mean": 2.5, "max": 3}
    assert summarize(data, 1.0, 2.0)["cpu_mhz"] == {"min": 4, "mean": 4.5, "max": 5}
    # a stretch shorter than the readings has the last of them
    assert summarize(data, 1.49, 1.5)["cpu_mhz"] == {"min": 4, "mean": 4, "max": 4}
    assert summarize(data[:1], 0.0, 1.0)["cpu_mhz"] is None


def test_a_disk_is_never_busier_than_all_the_time() -> None:
    assert summarize(readings(0.0, 0.5, disk_busy_ms=[0, 508]), 0.0, 0.5)["disk_util_percent"]["max"] == 100


def test_a_long_series_is_averaged_and_keeps_its_extremes() -> None:
    n = 2 * MOST_VALUES + 1
    heat = [50.0] * (n + 1)
    heat[7] = 90.0
    found = summarize(readings(*(i / 2 for i in range(n + 1)), temperature_c=heat), 0.0, n / 2, series=True)
    values = found["temperature_c"]["values"]
    # 241 readings, three to a value; the seventh is the first of the third value
    assert (len(values), found["every_s"]) == (81, 1.5)
    assert values[2] == 63.33
    assert (found["temperature_c"]["min"], found["temperature_c"]["max"]) == (50, 90)


# --- While a worker runs


class Counting(Sensors):
    """Sensors that count how often they are read."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.n = 0

    def read(self) -> Reading:
        self.n += 1
        return Reading(time_s=time.monotonic(), values={"cpu_mhz": self.n})


def test_a_watch_reads_by_itself_and_ends(tmp_path: Path) -> None:
    seen = Counting()
    with Watch(seen, period_s=0.01) as watch:
        deadline = time.monotonic() + 20
        while seen.n < 5 and time.monotonic() < deadline:
            time.sleep(0.005)
        watch.mark("pp4")
        watch.mark("tg4")
    assert seen.n >= 7
    assert [t for t in threading.enumerate() if t is not threading.main_thread()] == []
    times = [reading.time_s for reading in watch.readings]
    assert times == sorted(times)
    first, second = watch.observed("pp4", 60.0), watch.observed("tg4", 0.0)
    assert first is not None and second is not None
    assert first["cpu_mhz"]["max"] + 1 <= second["cpu_mhz"]["max"]
    assert watch.observed("tg9", 1.0) is None


def test_a_mark_replaces_a_reading_just_before_it() -> None:
    seen = Counting()
    watch = Watch(seen, period_s=1000.0)
    watch._take(regular=False)
    watch._take(regular=True)
    watch.mark("tg1")
    # the first stays, the regular one was too close to the mark
    assert [reading.values["cpu_mhz"] for reading in watch.readings] == [1, 3]
    watch.mark("tg2")
    assert [reading.values["cpu_mhz"] for reading in watch.readings] == [1, 3, 4]


def test_this_machine_is_read_without_an_error() -> None:
    with sensors(storage_of(Path(__file__)), cores=range(os.cpu_count() or 1)) as found:
        values = found.read().values
    assert values.keys() <= {*SERIES, "disk_busy_ms", "disk_read_bytes", "disk_written_bytes", "cpu_energy_uj"}
    if sys.platform == "linux":
        assert values["available_bytes"] > 0
