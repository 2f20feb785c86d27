from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.bench import counters
from toolkit.bench.counters import delta, snapshot
from toolkit.bench.disk import MEMORY_FILESYSTEMS, mount_of

MIB = 1024**2
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the real /proc")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A process whose name holds spaces and parentheses, as proc_pid_stat(5) prints it."""
    process = tmp_path / "proc/77"
    process.mkdir(parents=True)
    fields = "S 1 77 77 0 -1 4194560 1234 999 56 888 250 50 7 8 20 0 1 0 100 1000000 2500"
    files = {
        "77/stat": f"77 (a (b) 1 2 3) x) {fields}\n",
        "77/io": "rchar: 11\nwchar: 22\nread_bytes: 4096000\nwrite_bytes: 0\n",
        "77/schedstat": "300000000 7000500 41\n",
        "uptime": "17006.47 10053.13\n",
        "77/status": "Name:\ta\nVmRSS:\t   10000 kB\nVmSwap:\t      16 kB\n",
        "meminfo": "MemTotal: 1000 kB\nMemAvailable:     800 kB\nSwapFree:  20 kB\nHugePages_Total: 0\n",
    }
    for name, text in files.items():
        (tmp_path / "proc" / name).write_text(text, encoding="utf-8")
    (tmp_path / "proc/pressure").mkdir()
    (tmp_path / "proc/pressure/io").write_text(
        "some avg10=0.00 avg60=0.10 avg300=0.13 total=4005985\nfull avg10=0.00 avg60=0.00 avg300=0.10 total=3404365\n",
        encoding="utf-8",
    )
    (tmp_path / "proc/pressure/memory").write_text(
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=123\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=45\n",
        encoding="utf-8",
    )
    for n, temperature in enumerate(("41000", "67500", "broken")):
        zone = tmp_path / f"sys/class/thermal/thermal_zone{n}"
        zone.mkdir(parents=True)
        (zone / "temp").write_text(f"{temperature}\n", encoding="utf-8")
    return tmp_path / "proc"


@linux
def test_every_field_is_read_from_its_file(proc: Path) -> None:
    found = snapshot(77, proc=proc, sys_root=proc.parent / "sys")
    tick = os.sysconf("SC_CLK_TCK")
    assert found.read_bytes == 4_096_000
    assert (found.minor_faults, found.major_faults) == (1234, 56)
    assert (found.user_s, found.system_s) == (250 / tick, 50 / tick)
    assert (found.rss_bytes, found.swap_bytes) == (10_240_000, 16_384)
    assert (found.psi_io_some_us, found.psi_io_full_us) == (4_005_985, 3_404_365)
    assert (found.psi_memory_some_us, found.idle_s, found.queued_us) == (123, 10053.13, 7000.5)
    assert (found.mem_available_bytes, found.swap_free_bytes) == (819_200, 20_480)
    assert found.temperature_c == 67.5


@linux
def test_what_cannot_be_read_is_none_and_stays_none_in_a_difference(proc: Path) -> None:
    (proc / "77/io").unlink()
    (proc / "77/stat").write_text("77 (gone", encoding="utf-8")
    (proc / "pressure/io").unlink()
    before = snapshot(77, proc=proc, sys_root=proc)
    assert before.read_bytes is None
    assert before.minor_faults is before.user_s is None
    assert before.psi_io_some_us is before.temperature_c is None
    assert before.rss_bytes == 10_240_000
    (proc / "77/io").write_text("read_bytes: 5\n", encoding="utf-8")
    (proc / "meminfo").write_text("MemAvailable: 700 kB\nSwapFree: 12 kB\n", encoding="utf-8")
    after = snapshot(77, proc=proc, sys_root=proc)
    change = delta(before, after)
    assert change.read_bytes is None
    assert change.rss_bytes == 0
    assert change.swap_free_bytes == -8192
    assert change.time_s >= 0
    assert after.mem_available_bytes == 716_800


@linux
def test_a_process_that_is_gone_has_no_counters(proc: Path) -> None:
    found = snapshot(78, proc=proc)
    assert found.read_bytes is found.major_faults is found.rss_bytes is found.user_s is None
    assert found.mem_available_bytes == 819_200


@linux
def test_bytes_of_page_faults_are_counted(tmp_path: Path) -> None:
    mount = mount_of(tmp_path)
    if mount is None or mount.filesystem in MEMORY_FILESYSTEMS:
        pytest.skip("the temporary folder is in memory")
    data = tmp_path / "data"
    data.write_bytes(os.urandom(8 * MIB))
    fd = os.open(data, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    before = snapshot()
    assert len(os.pread(fd, 8 * MIB, 0)) == 8 * MIB
    os.close(fd)
    change = delta(before, snapshot())
    if change.read_bytes is None:
        pytest.skip("this kernel has no /proc/<pid>/io")
    assert change.read_bytes >= 8 * MIB


@linux
def test_cpu_time_and_faults_of_a_child() -> None:
    code = "x = b'\\1' * (64 << 20); n = sum(range(10**7)); print(n, flush=True); input()"
    argv = [sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = snapshot(child.pid)
        child.communicate(b"\n")
    assert found.rss_bytes is not None and found.rss_bytes >= 64 * MIB
    assert found.minor_faults is not None and found.minor_faults > 0
    assert found.user_s is not None and found.user_s > 0


def test_the_file_loads_alone_in_a_bare_interpreter() -> None:
    code = (
        "import importlib.util as u, sys\n"
        "spec = u.spec_from_file_location('counters', sys.argv[1])\n"
        "module = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(module.delta(module.snapshot(), module.snapshot()).time_s >= 0, 'toolkit' in sys.modules)\n"
    )
    argv = [sys.executable, "-I", "-S", "-c", code, str(counters.__file__)]
    done = subprocess.run(argv, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == "True False\n"


def test_the_macos_record_is_unpacked_by_position() -> None:
    # 100 user, 101 system, two wake-ups, 104 page-ins, 105 wired, 106 resident, ... 116 disk read, 117 written
    record = struct.pack("=16s18Q", b"u" * 16, *range(100, 118))
    assert counters._rusage_v2(record) == {"major_faults": 104, "rss_bytes": 106, "read_bytes": 116}
