from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from toolkit.bench import hunt as hunting
from toolkit.bench.disk import MEMORY_FILESYSTEMS, mount_of
from toolkit.bench.suspects import Stretch, Verdict, judge
from toolkit.cli import cli
from toolkit.errors import BenchError

MIB = 1024**2
GIB = 1024**3
SIZE = 64 * MIB


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    mount = mount_of(tmp_path)
    if sys.platform != "linux" or mount is None or mount.filesystem in MEMORY_FILESYSTEMS:
        pytest.skip("the temporary folder is not on a disk of Linux")
    return tmp_path


def stretch(mib_s: float, **change: Any) -> Stretch:
    """One GiB of the second pass over the file at a given speed; reads of 8 MiB, all alike."""
    base = Stretch(
        part="trace",
        block=2,
        file=0,
        direct=True,
        start_s=0.0,
        offset=0,
        nbytes=GIB,
        seconds=1024 / mib_s,
        slowest_read_s=8 / mib_s,
        read_block=8 * MIB,
        from_disk=1.0,
        others_bytes=0,
        disk_c=None,
        machine_c=None,
    )
    return dataclasses.replace(base, **change)


def passes(first: list[float], second: list[float], **change: Any) -> list[Stretch]:
    """Two passes over the same places, one second after the other."""
    return [
        stretch(v, block=number, offset=i * GIB, start_s=float(i + (number - 1) * len(first)), **change)
        for number, values in ((1, first), (2, second))
        for i, v in enumerate(values)
    ]


def pairs(part: str, a: list[float], b: list[float], **of_b: Any) -> list[Stretch]:
    """`a` past the cache from the file, `b` as told, pair by pair."""
    rows = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        rows += [stretch(x, part=part, block=i), stretch(y, part=part, block=i, **of_b)]
    return rows


def verdict(suspect: str, stretches: list[Stretch], no_other: str | None = None) -> tuple[Verdict, str]:
    (found,) = (j for j in judge(stretches, no_other=no_other) if j.suspect == suspect)
    return found.verdict, found.evidence


YES, NO, UNKNOWN = Verdict.CONFIRMED, Verdict.NOT_CONFIRMED, Verdict.CANNOT_TELL
STEADY = [1000.0, 1010.0, 990.0, 1005.0, 995.0]


# --- verdicts


def test_nothing_measured_tells_nothing() -> None:
    found = judge([], no_other="no file on another device was given")
    assert [j.suspect for j in found] == [
        *("cached-path", "second-reading", "slow-place", "pauses"),
        *("slowing", "heat", "other-readers", "other-device"),
    ]
    assert {j.verdict for j in found} == {UNKNOWN}


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        ([500.0, 510.0, 490.0, 505.0], YES),  # half
        ([990.0, 1000.0, 980.0, 1010.0], NO),
        ([700.0, 1200.0, 600.0, 1100.0], UNKNOWN),  # the interval holds both answers
    ],
)
def test_cached_reading_against_reading_past_the_cache(cached: list[float], expected: Verdict) -> None:
    rows = pairs("cached-or-not", [1000.0, 1020.0, 980.0, 1010.0], cached, direct=False)
    assert verdict("cached-path", rows)[0] is expected


def test_cached_readings_that_came_from_memory_are_void() -> None:
    rows = pairs("cached-or-not", STEADY, [9000.0] * 5, direct=False, from_disk=0.0)
    assert verdict("cached-path", rows) == (UNKNOWN, "5 cached readings came from memory")


@pytest.mark.parametrize(
    ("other", "expected"), [([1540.0, 1550.0, 1530.0, 1545.0, 1535.0], YES), (STEADY, NO), ([400.0] * 5, NO)]
)
def test_device_against_device(other: list[float], expected: Verdict) -> None:
    assert verdict("other-device", pairs("devices", STEADY, other, file=1))[0] is expected


def test_one_device_under_both_files_is_no_comparison() -> None:
    assert verdict("other-device", [], "both files are on the same device (vda)")[0] is UNKNOWN


def test_a_cache_below_shows_in_the_second_reading_only() -> None:
    assert verdict("second-reading", passes(STEADY, [3 * v for v in STEADY]))[0] is YES
    assert verdict("second-reading", passes(STEADY, STEADY[::-1]))[0] is NO
    assert verdict("second-reading", passes(STEADY[:3], STEADY[:3]))[0] is UNKNOWN
    assert verdict("slowing", passes(STEADY, [3 * v for v in STEADY]))[0] is NO


def test_a_place_that_is_slow_twice_is_the_place_and_one_that_is_slow_once_is_a_pause() -> None:
    twice = passes([1000, 1000, 28, 1000, 1000], [1000, 1000, 30, 1000, 1000])
    found, evidence = verdict("slow-place", twice)
    assert (found, evidence.split(";")[0]) == (YES, "28 and 30 MiB/s at 2.00 GiB")
    assert verdict("pauses", twice)[0] is NO
    once = passes([1000, 1000, 28, 1000, 1000], [1000.0] * 5)
    assert verdict("slow-place", once)[0] is NO
    assert verdict("pauses", once)[0] is YES


def test_one_long_read_is_a_pause_even_in_a_fast_stretch() -> None:
    rows = passes(STEADY, STEADY)
    rows[3] = dataclasses.replace(rows[3], slowest_read_s=4.2)
    found, evidence = verdict("pauses", rows)
    assert found is YES
    assert evidence.startswith("longest read 4200 ms, typical 8 ms")
    assert "at 3.00 GiB" in evidence


def test_getting_slower_is_told_from_slow_places() -> None:
    uneven = [1000.0, 900.0, 800.0, 700.0, 600.0]  # the file's end is on slower tracks: no change over time
    assert verdict("slowing", passes(uneven, uneven))[0] is NO
    found, evidence = verdict("slowing", passes(STEADY, [0.5 * v for v in STEADY]))
    assert found is YES
    # half as fast five seconds later, in nine seconds: 0.5 ** (9 / 5) - 1
    assert evidence.startswith("-71%")


def heated(values: list[float], degrees: list[float], key: str = "disk_c") -> list[Stretch]:
    rows = passes(values[:4], values[4:])
    changes: list[dict[str, Any]] = [{key: c} for c in degrees]
    return [dataclasses.replace(row, **change) for row, change in zip(rows, changes, strict=True)]


def test_heat_needs_a_sensor_and_warmth() -> None:
    warming = [40.0, 42.0, 45.0, 50.0, 60.0, 70.0, 80.0, 85.0]
    falling = [1000.0, 1000.0, 1000.0, 900.0, 700.0, 500.0, 400.0, 300.0]
    assert verdict("heat", passes(STEADY, STEADY)) == (UNKNOWN, "no temperature sensor can be read")
    assert verdict("heat", heated(falling, warming))[0] is YES
    assert verdict("heat", heated([1000.0, 1010.0] * 4, warming))[0] is NO
    assert verdict("heat", heated([1000.0, 1010.0] * 4, [41.0] * 8))[0] is NO
    assert verdict("heat", heated(falling, [41.0] * 8))[0] is UNKNOWN
    assert "the disk has no sensor" in verdict("heat", heated(falling, warming, "machine_c"))[1]


def test_other_readers_are_what_the_device_read_beyond_us() -> None:
    assert verdict("other-readers", passes(STEADY, STEADY, others_bytes=GIB))[0] is YES
    found, evidence = verdict("other-readers", passes(STEADY, STEADY, others_bytes=MIB))
    assert (found, evidence) == (NO, "10 MiB by others while we read 10240 MiB: 0.1%")
    assert verdict("other-readers", passes(STEADY, STEADY, others_bytes=None))[0] is UNKNOWN


# --- the hunt on real files


def real_file(path: Path) -> Path:
    with path.open("wb") as f:
        f.write(os.urandom(SIZE))
        f.flush()
        os.fsync(f.fileno())
    return path


def test_a_hunt_reads_the_whole_file_twice_and_keeps_every_step(on_disk: Path) -> None:
    file, out = real_file(on_disk / "m.gguf"), on_disk / "out" / "s.json"
    done = CliRunner().invoke(cli, ["bench", "storage", str(file), "--out", str(out), "--json"])
    assert (done.exit_code, done.exception) == (0, None)
    data = json.loads(done.stdout)
    assert data == json.loads(out.read_text(encoding="utf-8"))
    assert (data["kind"], data["state"], data["file"]) == ("storage", "complete", "m.gguf")
    trace = [s for s in data["stretches"] if s["part"] == "trace"]
    for number in (1, 2):
        read = [(s["offset"], s["nbytes"]) for s in trace if s["block"] == number]
        assert read == [(offset, 4 * MIB) for offset in range(0, SIZE, 4 * MIB)]
    order = [s["direct"] for s in data["stretches"] if s["part"] == "cached-or-not"]
    assert order == ([True, False, False, True] * 3 if data["direct"] else [])
    assert {s["verdict"] for s in data["suspects"]} <= {"confirmed", "not confirmed", "cannot tell"}
    assert str(on_disk) not in done.stdout
    text = CliRunner().invoke(cli, ["bench", "storage", str(file), "--minutes", "0.01"]).stdout
    assert "other-device" in text


def after(steps: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something when so many steps have been reported."""
    left = iter(range(steps - 1))

    def note(text: str) -> None:
        if next(left, None) is None:
            action()

    monkeypatch.setattr(hunting, "note", note)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_keeps_what_was_measured(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = real_file(on_disk / "m"), on_disk / "s.json"
    after(3, interrupt, monkeypatch)
    done = CliRunner().invoke(cli, ["bench", "storage", str(file), "--out", str(out)])
    assert done.exit_code == 130
    assert "cached-path" in done.stdout
    data = json.loads(out.read_text(encoding="utf-8"))
    assert (data["state"], len(data["stretches"])) == ("interrupted", 3)


def test_a_file_that_shrinks_ends_the_hunt_and_not_its_results(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = real_file(on_disk / "m"), on_disk / "s.json"
    after(4, lambda: os.truncate(file, 0), monkeypatch)
    done = CliRunner().invoke(cli, ["bench", "storage", str(file), "--out", str(out)])
    assert isinstance(done.exception, BenchError)
    assert "became shorter" in done.exception.what
    assert "cached-path" in done.stdout
    data = json.loads(out.read_text(encoding="utf-8"))
    assert (data["state"], len(data["stretches"])) == ("failed", 4)


def test_results_that_cannot_be_written_any_more_do_not_end_the_hunt(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = real_file(on_disk / "m"), on_disk / "out"

    def replace_by_a_file() -> None:
        if folder.is_dir():
            shutil.rmtree(folder)
            folder.write_bytes(b"")

    after(2, replace_by_a_file, monkeypatch)
    hunt = hunting.run(hunting.prepare(file, None, minutes=1.0), folder / "s.json")
    assert hunt.state == "complete"
    assert sum(s.nbytes for s in hunt.stretches if s.part == "trace") == 2 * SIZE


@pytest.mark.parametrize("kind", ["missing", "small", "folder"])
def test_files_that_tell_nothing_are_refused(kind: str, on_disk: Path) -> None:
    path = on_disk / "x"
    if kind == "small":
        path.write_bytes(b"1234")
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(BenchError) as e:
        hunting.prepare(path, None, minutes=1.0)
    assert e.value.where == str(path)


def test_two_files_on_one_disk_are_not_compared(on_disk: Path) -> None:
    hunt = hunting.prepare(real_file(on_disk / "a"), real_file(on_disk / "b"), minutes=1.0)
    assert "same device" in (hunt.no_other or "")


# --- two devices, one of them throttled


@pytest.fixture
def two_disks(tmp_path: Path) -> Iterator[tuple[Path, Path, list[str]]]:
    """Two loop devices on memory with a file each, and a command prefix under which the first gives 40 MiB/s."""
    group = Path("/sys/fs/cgroup/blkio") / f"moe-madv-test-{os.getpid()}"
    tools = ("losetup", "mkfs.ext4", "mount", "umount")
    if os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, tools)) or not group.parent.is_dir():
        pytest.skip("needs root, loop devices and a blkio cgroup (v1)")
    images = Path("/dev/shm") / group.name
    undo: list[list[str]] = []
    try:
        images.mkdir()
        group.mkdir()
        files, loops = [], []
        for name in ("slow", "fast"):
            image, folder = images / name, tmp_path / name
            folder.mkdir()
            with image.open("wb") as f:
                f.truncate(SIZE + 32 * MIB)
            subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
            show = ["losetup", "--find", "--show", str(image)]
            made = subprocess.run(show, capture_output=True, encoding="utf-8", check=False)
            if made.returncode != 0:
                pytest.skip(f"no loop device: {made.stderr.strip()}")
            loops.append(made.stdout.strip())
            undo.insert(0, ["losetup", "--detach", loops[-1]])
            subprocess.run(["mount", loops[-1], str(folder)], check=True)
            undo.insert(0, ["umount", str(folder)])
            files.append(real_file(folder / "m"))
        number = Path("/sys/class/block", Path(loops[0]).name, "dev").read_text(encoding="utf-8").strip()
        throttle = group / "blkio.throttle.read_bps_device"
        throttle.write_text(f"{number} {40 * MIB}\n", encoding="utf-8")
        yield files[0], files[1], ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        for command in undo:
            subprocess.run(command, check=False)
        shutil.rmtree(images, ignore_errors=True)
        if group.is_dir():
            group.rmdir()


def test_the_slower_of_two_devices_is_named(two_disks: tuple[Path, Path, list[str]]) -> None:
    slow, fast, prefix = two_disks

    def run(file: Path, other: Path) -> dict[str, str]:
        command = [sys.executable, "-m", "toolkit", "bench", "storage", str(file), "--other", str(other), "--json"]
        done = subprocess.run([*prefix, *command], capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stderr
        return {s["suspect"]: s["verdict"] for s in json.loads(done.stdout)["suspects"]}

    assert run(slow, fast)["other-device"] == "confirmed"
    assert run(fast, slow)["other-device"] == "not confirmed"
