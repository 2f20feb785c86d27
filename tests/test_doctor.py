from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from gguf_builder import moe
from test_machine import QUIET

from toolkit.bench import disk, storage
from toolkit.bench.disk import MEMORY_FILESYSTEMS, mount_of
from toolkit.bench.limits import Available, Method
from toolkit.bench.storage import Speed
from toolkit.cli import cli
from toolkit.doctor import fix, observe
from toolkit.doctor.activity import Activity, Process, watch
from toolkit.doctor.diagnose import diagnose
from toolkit.doctor.finding import Finding, Severity
from toolkit.doctor.kernel import Feature
from toolkit.doctor.observe import Measured, Power, Settings, Swap
from toolkit.doctor.predict import Prediction, predict
from toolkit.doctor.report import as_text
from toolkit.doctor.rules import findings
from toolkit.model.layout import read_model

MIB = 1024**2
GIB = 1024**3
linux = pytest.mark.skipif(sys.platform != "linux", reason="counted on Linux only")


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    mount = mount_of(tmp_path)
    if mount is None or mount.filesystem in MEMORY_FILESYSTEMS:
        pytest.skip("the temporary folder is not on a disk")
    return tmp_path


def speed(mib_s: float | None, pattern: storage.Pattern = "random", from_disk: float | None = 1.0) -> Speed:
    return Speed(
        pattern=pattern,
        block_bytes=MIB,
        readers=1,
        direct=True,
        mib_s=mib_s,
        nbytes=MIB,
        seconds=1.0,
        from_disk=from_disk,
        why=None if mib_s else "refused",
    )


SETTINGS = Settings(
    root=Path("/"),
    path=Path("/models/m.gguf"),
    elsewhere=(),
    facts=QUIET,
    read_ahead_file=Path("/sys/class/bdi/259:0/read_ahead_kb"),
    available=Available(bytes=8 * GIB, source="MemAvailable in /proc/meminfo"),
    budget=Method(name="cgroup-v2", parent=Path("/sys/fs/cgroup")),
    budget_refused=None,
    swaps=(),
    power=Power(profile="performance", profiles=(), on_battery=None),
    numa_balancing=0,
    io_uring_disabled=0,
    kernel={"io-uring": Feature(works=True)},
)
MEASURED = Measured(
    speeds={"random-1m": speed(1400.0)},
    memory_mib_s=9000.0,
    activity=Activity(seconds=1.0, device_mib_s=0.0, readers=(), inference=()),
)


def found(
    key: str, settings: dict[str, Any] | None = None, *, facts: dict[str, Any] | None = None, **measured: Any
) -> Finding:
    seen = dataclasses.replace(SETTINGS, **(settings or {}), facts=dataclasses.replace(QUIET, **(facts or {})))
    everything = findings(seen, dataclasses.replace(MEASURED, **measured), None, None)
    (one,) = (finding for finding in everything if finding.key == key)
    return one


# --- findings


def test_a_quiet_machine_is_all_right_or_does_not_tell() -> None:
    severities = {f.key: f.severity for f in findings(SETTINGS, MEASURED, None, None)}
    assert set(severities.values()) <= {Severity.OK, Severity.UNKNOWN}
    assert {
        "read-ahead",
        "disk",
        "disk-speed",
        "filesystem",
        "page-size",
        "memory",
        "memory-budget",
    } <= severities.keys()
    assert {"swap", "huge-pages", "governor", "power-mode", "numa", "lock-limit", "io-uring"} <= severities.keys()
    assert {"virtualization", "other-readers", "other-inference"} <= severities.keys()


def storage_with(**change: Any) -> dict[str, Any]:
    return {"storage": dataclasses.replace(QUIET.storage, **change)}


def test_read_ahead_says_how_it_is_changed_and_put_back() -> None:
    one = found("read-ahead", facts=storage_with(read_ahead_kb=8192))
    assert (one.severity, one.value, one.fixable) == (Severity.WARNING, 8192, True)
    assert one.command == "sh -c 'echo 128 > /sys/class/bdi/259:0/read_ahead_kb'"
    assert one.undo == "sh -c 'echo 8192 > /sys/class/bdi/259:0/read_ahead_kb'"
    assert "8192 KiB" in one.effect
    assert found("read-ahead", facts=storage_with(read_ahead_kb=0)).severity is Severity.WARNING
    assert not found("read-ahead", {"read_ahead_file": None}, facts=storage_with(read_ahead_kb=8192)).fixable
    assert found("read-ahead", facts=storage_with(read_ahead_kb=None)).severity is Severity.UNKNOWN


def test_a_model_in_memory_and_one_on_a_network_weigh_differently() -> None:
    assert found("filesystem", facts=storage_with(filesystem="tmpfs")).severity is Severity.PROBLEM
    assert found("filesystem", facts=storage_with(filesystem="nfs4")).severity is Severity.WARNING
    loop = found("disk", facts=storage_with(device="loop0", loop_on="ext4", loop_direct_io=False))
    assert (loop.command, loop.undo) == ("losetup --direct-io=on /dev/loop0", "losetup --direct-io=off /dev/loop0")


def test_swap_goes_only_where_there_is_room_and_comes_back_with_its_priority() -> None:
    swaps = (
        Swap(file="/dev/sda2", used_bytes=GIB, priority=-2),
        Swap(file="/swap file", used_bytes=0, priority=5),
    )
    one = found("swap", {"swaps": swaps, "budget": Method(name="none", why="x")}, facts={"swap_bytes": 2 * GIB})
    assert one.severity is Severity.WARNING
    assert one.command == "swapoff /dev/sda2; swapoff '/swap file'"
    assert one.undo == "swapon /dev/sda2; swapon -p 5 '/swap file'"
    assert found("swap", {"swaps": swaps}, facts={"swap_bytes": 2 * GIB}).severity is Severity.NOTE
    little = {"swaps": swaps, "available": Available(bytes=GIB, source="MemAvailable")}
    assert found("swap", little, facts={"swap_bytes": 2 * GIB}).command is None


def test_several_governors_are_not_changed_since_one_word_cannot_put_them_back() -> None:
    one = found("governor", facts={"governor": "powersave"})
    assert one.fixable
    assert one.undo is not None and "echo powersave" in one.undo
    mixed = found("governor", facts={"governor": "performance, powersave"})
    assert (mixed.severity, mixed.fixable) == (Severity.WARNING, False)


def test_power_numa_and_huge_pages() -> None:
    slow = Power(profile="low-power", profiles=("low-power", "performance"), on_battery=True)
    one = found("power-mode", {"power": slow})
    assert one.command == "sh -c 'echo performance > /sys/firmware/acpi/platform_profile'"
    assert one.undo == "sh -c 'echo low-power > /sys/firmware/acpi/platform_profile'"
    assert "battery" in one.effect
    assert (
        found("power-mode", {"power": Power(profile=None, profiles=(), on_battery=None)}).severity is Severity.UNKNOWN
    )
    assert found("numa", {"numa_balancing": 1}, facts={"numa_nodes": 2}).undo == (
        "sh -c 'echo 1 > /proc/sys/kernel/numa_balancing'"
    )
    assert found("huge-pages", facts={"transparent_hugepages": "always"}).severity is Severity.NOTE


def test_limits_of_memory_and_kernel_features() -> None:
    limited = Available(bytes=GIB, source="memory limit of 2.00 GiB in /sys/fs/cgroup/x")
    assert found("memory", {"available": limited}).severity is Severity.NOTE
    refused = found("memory-budget", {"budget_refused": "limit accepted and not enforced"})
    assert (refused.severity, refused.what) == (Severity.WARNING, "limit accepted and not enforced")
    off = {"kernel": {"io-uring": Feature(works=False, why="Operation not permitted")}, "io_uring_disabled": 2}
    one = found("io-uring", off)
    assert (one.severity, one.fixable) == (Severity.NOTE, False)
    assert one.undo == "sh -c 'echo 2 > /proc/sys/kernel/io_uring_disabled'"
    absent = {"kernel": {"psi": Feature(works=None, why="a call of Linux")}}
    assert found("psi", absent).what == "n/a (a call of Linux)"


def test_only_readers_of_this_disk_count_where_the_disk_counts() -> None:
    reader = Process(pid=7, name="backup", read_mib_s=300.0)
    elsewhere = Activity(seconds=1.0, device_mib_s=0.0, readers=(reader,), inference=())
    assert found("other-readers", activity=elsewhere).severity is Severity.OK
    here = dataclasses.replace(elsewhere, device_mib_s=300.0)
    one = found("other-readers", activity=here)
    assert (one.severity, one.what) == (Severity.WARNING, "300 MiB/s by others: backup (7) 300 MiB/s")
    unseen = found("other-readers", activity=dataclasses.replace(here, readers=()))
    assert "nobody visible" in unseen.what
    second = found(
        "other-inference", activity=dataclasses.replace(here, inference=(Process(pid=9, name="llama-server"),))
    )
    assert (second.severity, second.command, second.fixable) == (Severity.WARNING, "kill 9", False)


def test_figures_that_are_not_the_disks_are_marked() -> None:
    assert found("disk-speed", speeds={}).severity is Severity.UNKNOWN
    assert "refused" in found("disk-speed", speeds={"random-1m": speed(None)}).what
    cached = {"random-1m": speed(9000.0, from_disk=0.2)}
    assert "random-1m" in found("disk-speed", speeds=cached).effect
    poor = {"sequential": speed(400.0, "sequential"), "bypassing-8m": speed(1400.0, "sequential")}
    assert found("disk-speed", speeds=poor).severity is Severity.WARNING


# --- prediction

# Appendix of sizes: three routed layers of 8 experts with 24,576 bytes each, two taken per token.
ROUTED_TOTAL, ROUTED_PER_TOKEN = 3 * 8 * 24576, 147_456


def predicted(tmp_path: Path, room: int, speeds: dict[str, Speed], memory_mib_s: float | None = 1000.0) -> Prediction:
    """With `room` bytes for experts beside the always used weights and the 256 MiB of the process."""
    layout = read_model(moe().write(tmp_path / "m.gguf"))
    always = layout.nbytes() - ROUTED_TOTAL - 4 * 64 * 16  # type: ignore[operator]  # F32 token_embd is tied: used whole
    memory = always + 4 * 64 * 16 + 256 * MIB + room
    return predict(layout, memory, speeds, memory_mib_s)


def test_a_prediction_is_the_arithmetic_it_states(tmp_path: Path) -> None:
    speeds = {"random-128k": speed(100.0), "random-1m": speed(200.0), "sequential": speed(9000.0, "sequential")}
    p = predicted(tmp_path, ROUTED_TOTAL // 5, speeds)
    assert not p.fits
    assert p.read_bytes_per_token is not None and p.always_used_bytes is not None
    # a fifth of the experts: 74 % hits at best, 20 % when all are equally likely
    assert p.read_bytes_per_token == pytest.approx((0.26 * ROUTED_PER_TOKEN, 0.8 * ROUTED_PER_TOKEN), rel=1e-4)
    compute_s = (p.always_used_bytes + ROUTED_PER_TOKEN) / MIB / 1000
    read_s = 0.26 * ROUTED_PER_TOKEN / MIB / 200, 0.8 * ROUTED_PER_TOKEN / MIB / 100
    assert p.tokens_per_s == pytest.approx((1 / (3 * compute_s + read_s[1]), 1 / max(compute_s, read_s[0])), rel=1e-4)
    assert p.limit == ("disk" if read_s[0] > compute_s else "compute")
    assert any("equally likely" in text for text in p.assumptions)


def test_what_fits_reads_nothing_and_what_cannot_stay_is_read_again(tmp_path: Path) -> None:
    whole = predicted(tmp_path, 100 * MIB, {})
    assert (whole.fits, whole.read_bytes_per_token) == (True, (0.0, 0.0))
    assert whole.tokens_per_s is not None and whole.limit == "compute"
    none = predicted(tmp_path, -1, {"random-1m": speed(100.0)})
    assert none.always_used_bytes is not None
    assert none.read_bytes_per_token == pytest.approx((none.always_used_bytes + ROUTED_PER_TOKEN,) * 2)


def test_without_a_speed_nothing_is_predicted(tmp_path: Path) -> None:
    assert predicted(tmp_path, 0, {}).tokens_per_s is None
    assert predicted(tmp_path, 0, {"random-1m": speed(None)}).tokens_per_s is None
    assert predicted(tmp_path, 0, {"random-1m": speed(100.0)}, memory_mib_s=None).tokens_per_s is None


# --- real readings


@linux
def test_speeds_of_a_real_file_come_from_the_disk_and_end_at_their_bound(on_disk: Path) -> None:
    path = on_disk / "f"
    path.write_bytes(os.urandom(24 * MIB))
    with storage.opened(path, direct=False) as fd:
        os.fsync(fd)
        storage.drop(fd)
    random = storage.speed(path, pattern="random", block=128 * 1024, readers=4, max_bytes=4 * MIB)
    if random.why is not None:
        pytest.skip(random.why)
    assert (random.nbytes, random.from_disk) == (4 * MIB, 1.0)
    cached = storage.speed(path, pattern="sequential", block=MIB, direct=False)
    assert (cached.nbytes, cached.from_disk) == (24 * MIB, 1.0)
    tiny = storage.speed(path, pattern="sequential", block=32 * MIB)
    assert (tiny.mib_s, tiny.why) == (None, f"the file is smaller than {32 * MIB} bytes")
    assert (storage.random_read_mib_s(path, seconds=0.1) or 0) > 0


@linux
def test_a_hole_is_not_taken_for_a_fast_disk(on_disk: Path) -> None:
    path = on_disk / "hole"
    with path.open("wb") as f:
        f.truncate(16 * MIB)
    found = storage.speed(path, pattern="sequential", block=MIB)
    if found.why is not None:
        pytest.skip(found.why)
    assert found.from_disk == 0.0


@linux
def test_files_of_sysfs_about_a_disk(tmp_path: Path) -> None:
    block = tmp_path / "sys/class/block/nvme0n1"
    sensor = block / "device/hwmon3/temp1_input"
    sensor.parent.mkdir(parents=True)
    (block / "stat").write_text("  57  3  2106  1  9 0 8 0 0 0 1\n", encoding="utf-8")
    sensor.write_text("48850\n", encoding="utf-8")
    assert disk.bytes_read("nvme0n1", root=tmp_path) == 2106 * 512
    assert disk.bytes_read("sdz", root=tmp_path) is None
    place = dataclasses.replace(QUIET.storage, device="dm-0", parts=("nvme0n1", "sdb"))
    assert disk.temperature_c(place, root=tmp_path) == 48.85
    assert disk.temperature_c(dataclasses.replace(place, parts=(), device="sdb"), root=tmp_path) is None


READER = """
import mmap, os, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
buffer = mmap.mmap(-1, 1 << 20)
held = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ)
while True:
    os.preadv(fd, [buffer], 0)
    print("read", flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def reader(on_disk: Path) -> Iterator[int]:
    """The pid of a process that reads about 40 MiB/s past the cache and has a GGUF file mapped."""
    path = on_disk / "x.gguf"
    path.write_bytes(os.urandom(MIB))
    argv = [sys.executable, "-I", "-S", "-c", READER, str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        if child.stdout.readline() != b"read\n":
            pytest.skip("no direct reads on this file system")
        yield child.pid
        child.kill()


@linux
def test_a_reader_and_a_holder_of_a_model_are_found(reader: int) -> None:
    seen = watch(None, seconds=0.5)
    assert reader in {p.pid for p in seen.readers}
    assert reader in {p.pid for p in seen.inference}
    assert os.getpid() not in {p.pid for p in (*seen.readers, *seen.inference)}


# --- changing things


@pytest.fixture
def fake_root(tmp_path: Path) -> Path:
    """A system with one disk whose read-ahead is 4096 KiB."""
    root = tmp_path / "root"
    for name, text in {
        "proc/self/mountinfo": "27 1 254:0 / / rw - ext4 /dev/vda rw",
        "sys/class/bdi/254:0/read_ahead_kb": "4096",
        "sys/devices/vda/queue/read_ahead_kb": "4096",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n", encoding="utf-8")
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block/254:0").symlink_to(root / "sys/devices/vda")
    return root


@linux
def test_consent_changes_a_setting_and_the_undo_command_puts_it_back(fake_root: Path) -> None:
    file = fake_root / "sys/class/bdi/254:0/read_ahead_kb"

    def examine() -> tuple[Finding, ...]:
        seen = observe.settings(Path("/models"), root=fake_root)
        return tuple(findings(seen, MEASURED, None, None))

    refused = fix.apply(examine(), lambda finding: False)
    assert [(c.key, c.done, c.why) for c in refused] == [("read-ahead", False, "declined")]
    assert file.read_text(encoding="utf-8") == "4096\n"
    (change,) = fix.apply(examine(), lambda finding: finding.key == "read-ahead")
    assert (change.done, file.read_text(encoding="utf-8")) == (True, "128\n")
    assert fix.apply(examine(), lambda finding: True) == []
    subprocess.run(["sh", "-c", change.undo], check=True)
    assert file.read_text(encoding="utf-8") == "4096\n"


@linux
def test_a_command_that_fails_is_told_and_ends_nothing() -> None:
    broken = Finding(
        key="a", severity=Severity.WARNING, what="x", effect="y", command="echo no >&2; exit 3", undo="true"
    )
    works = dataclasses.replace(broken, key="b", command="true")
    note_only = dataclasses.replace(works, key="c", severity=Severity.NOTE)
    changes = fix.apply([broken, works, note_only], lambda finding: True)
    assert [(c.key, c.done) for c in changes] == [("a", False), ("b", True)]
    assert "exit code 3" in (changes[0].why or "")


# --- the command


def test_the_command_reports_everything_and_changes_nothing(tmp_path: Path) -> None:
    model = moe().write(tmp_path / "m.gguf")
    before = disk.storage_of(model)
    done = CliRunner().invoke(cli, ["doctor", str(model), "--no-read", "--json"])
    assert (done.exit_code, done.exception) == (0, None)
    data = json.loads(done.stdout)
    assert {"machine", "findings", "speeds", "memory_mib_s", "model", "changes"} == data.keys()
    assert (data["speeds"], data["changes"]) == ({}, [])
    assert (data["model"]["routed_bytes_per_token"], data["model"]["fits"]) == (ROUTED_PER_TOKEN, True)
    assert all(f["what"] and f["effect"] for f in data["findings"])
    assert disk.storage_of(model) == before
    text = CliRunner().invoke(cli, ["doctor", str(model), "--no-read"]).stdout
    assert f"next: moe-madv bench run {model} --oversubscribe 2.5" in text


@pytest.mark.parametrize("options", [["--yes"], ["--fix"], ["--budget", "1GiB"]])
def test_options_that_need_another_are_refused(options: list[str]) -> None:
    done = CliRunner().invoke(cli, ["doctor", *options])
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == click.UsageError.exit_code


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_do_not_tell_and_do_not_crash(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What those systems lack is taken away; what is left must do."""
    model = moe().write(tmp_path / "m.gguf")
    layout = read_model(model)
    for name in ("O_DIRECT", "preadv", "posix_fadvise", "sched_getaffinity", "O_CLOEXEC", "getuid", "geteuid"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    report = diagnose(layout, root=tmp_path / "nothing")
    by_key = {f.key: f for f in report.findings}
    for key in ("read-ahead", "disk", "filesystem", "disk-speed", "governor", "huge-pages", "power-mode", "psi"):
        assert by_key[key].severity is Severity.UNKNOWN, key
    assert by_key["io-uring"].what == f"n/a (a call of Linux, this is {platform})"
    assert not any(f.fixable for f in report.findings)
    assert report.prediction is not None and report.prediction.fits
    assert "n/a" in as_text(report)
