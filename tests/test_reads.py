"""Ways to read: the slices, that every way gives the right bytes, figures by hand, refusals, and the disk of memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from toolkit import cli as command_line
from toolkit.bench import lab, reads
from toolkit.bench.disk import mounts, storage_of
from toolkit.bench.reads import METHODS, Plan, Row, build_helper, figures, measure, slices
from toolkit.errors import BenchError, MachineError, ToolkitError

LINUX = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler")

PLAN = Plan(
    methods=tuple(METHODS),
    readers=(1, 3),
    slice_bytes=100_000,
    group=4,
    window=65536,
    seconds=0.02,
    blocks=1,
    budget=None,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "model.gguf"
    path.write_bytes(np.random.default_rng(0).bytes(3_000_001))
    return path


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_helper(tmp_path_factory.mktemp("home"))


# --- Slices and their order


@pytest.mark.parametrize(
    ("size", "slice_bytes", "group"), [(3_000_001, 100_000, 4), (1 << 24, 4096, 7), (99_999, 1, 1)]
)
def test_slices_are_whole_groups_inside_the_file_and_apart(size: int, slice_bytes: int, group: int) -> None:
    plan = replace(PLAN, slice_bytes=slice_bytes, group=group)
    found = np.sort(slices(size, plan, 0))
    assert len(found) % group == 0
    # All that fit with a page between them, but for the last group.
    assert len(found) + group > size // (-(-slice_bytes // 4096) * 4096 + 4096)
    assert found[0] > 0
    assert found[-1] + slice_bytes <= size
    assert np.all(np.diff(found) >= slice_bytes)
    assert np.all(found % 32 == 0)
    assert np.all(found % 4096 != 0)
    assert np.array_equal(slices(size, plan, 0), slices(size, plan, 0))
    if len(found) > 20:
        assert not np.array_equal(slices(size, plan, 0), slices(size, plan, 1))


@LINUX
def test_every_second_block_runs_backwards(data: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "run_process", lambda *_, **__: subprocess.CompletedProcess([], 77, "", "no such call"))
    monkeypatch.setattr(reads, "build_helper", lambda home: home / "reads")
    rows = list(measure(data, replace(PLAN, blocks=4), home, progress=lambda text: None))
    order = [[(r["method"], r["readers"]) for r in rows[1:] if r["block"] == b] for b in range(4)]
    assert all(sorted(o) == sorted((m, n) for m in METHODS for n in (1, 3)) for o in order)
    assert (order[0], order[2]) == (order[1][::-1], order[3][::-1])
    assert order[0] != order[2]
    assert [r["position"] for r in rows[1:17]] == list(range(16))


# --- The reader


@LINUX
@pytest.mark.parametrize("readers", [1, 3, 7])
@pytest.mark.parametrize("method", METHODS)
def test_every_way_reads_the_bytes_that_were_asked_for(helper: Path, data: Path, method: str, readers: int) -> None:
    offsets = slices(data.stat().st_size, PLAN, 0).tolist()
    content = np.frombuffer(data.read_bytes(), dtype=np.uint8)
    sums = [int(content[at : at + PLAN.slice_bytes].sum(dtype=np.uint64)) for at in offsets]
    argv = [helper, method, data, PLAN.slice_bytes, readers, 60, 65536, 4, "check"]
    done = subprocess.run(
        list(map(str, argv)), input="\n".join(map(str, offsets)), capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode == 77:
        pytest.skip(done.stderr)
    found = json.loads(done.stdout)
    assert found["checksum"] == sum((i + 1) * s for i, s in enumerate(sums))
    assert found["groups"] == len(offsets) // 4
    assert found["bytes"] == len(offsets) * PLAN.slice_bytes
    assert 0 < found["group_p50_s"] <= found["group_p95_s"] <= found["seconds"]


@LINUX
def test_a_sample_ends_after_the_group_in_which_its_time_is_over(helper: Path, data: Path) -> None:
    offsets = slices(data.stat().st_size, PLAN, 0).tolist()
    argv = [helper, "pread", data, PLAN.slice_bytes, 2, 0, 65536, 4]
    done = subprocess.run(
        list(map(str, argv)), input="\n".join(map(str, offsets)), capture_output=True, encoding="utf-8", check=True
    )
    assert json.loads(done.stdout)["groups"] == 0


@LINUX
@pytest.mark.parametrize(
    ("args", "offsets", "what"),
    [
        (["sideways", "FILE", "100", "1", "1", "65536", "1"], "32", "there is no method sideways"),
        (["pread", "FILE", "100", "1", "1", "65536", "1"], "2999950", "a slice ends behind the file"),
        (["pread", "FILE.missing", "100", "1", "1", "65536", "1"], "32", "open: No such file"),
        (["pread", "FILE"], "", "usage: reads METHOD"),
    ],
)
def test_the_reader_refuses_what_it_cannot_read(
    helper: Path, data: Path, args: list[str], offsets: str, what: str
) -> None:
    argv = [str(helper), *(a.replace("FILE", str(data)) for a in args)]
    done = subprocess.run(argv, input=offsets, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode in (1, 2)
    assert what in done.stderr


def test_a_compiler_that_fails_or_lacks_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(MachineError, match="does not compile"):
        build_helper(tmp_path)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no C compiler"):
        build_helper(tmp_path)
    assert not list((tmp_path / "tools").glob("reads-*"))


# --- Figures


def rows(*samples: Row) -> list[Row]:
    head = {
        "kind": "reads",
        "format": 1,
        "file": "model.gguf",
        "file_bytes": 8 << 30,
        "plan": {
            "methods": ["direct", "uring"],
            "readers": [1, 4],
            "slice_bytes": 884736,
            "group": 24,
            "window": 131072,
            "seconds": 1.0,
            "blocks": 2,
            "budget": 5 << 29,
        },
        "storage": {"filesystem": "ext4", "model": None, "device": "loop0", "loop_on": "tmpfs", "read_ahead_kb": 128},
        "kernel": "6.1",
        "cores": 2,
    }
    return [head, *samples]


def sample(method: str, readers: int, mib: float, seconds: float, **more: Any) -> Row:
    nbytes = int(mib * (1 << 20))
    done = {"groups": 2, "bytes": nbytes, "seconds": seconds, "cpu_s": mib / 1024, "read_bytes": nbytes * 5 // 4}
    times = {"group_p50_s": 0.010, "group_p95_s": 0.020}
    row = {"kind": "sample", "method": method, "readers": readers, "cold": True, "status": "done"}
    return {**row, **done, **times, **more}


def test_figures_by_hand() -> None:
    found = figures(
        rows(
            sample("direct", 1, 1000, 1.0),
            sample("direct", 1, 2000, 0.5, group_p50_s=0.030),
            sample("direct", 4, 3000, 1.0),
            {"kind": "sample", "method": "uring", "readers": 1, "cold": True, "status": "skipped", "reason": "no call"},
            sample("uring", 4, 0, 1.0, groups=0),
        )
    )
    assert [(f.method, f.readers, f.n_blocks) for f in found] == [
        ("direct", 1, 2),
        ("direct", 4, 1),
        ("uring", 1, 0),
        ("uring", 4, 0),
    ]
    first, second, third, fourth = found
    # 1000 and 4000 MiB/s: logs are log 2000 -+ log 2, their standard error is log 2, t at 97.5 % for 1 is 12.706.
    assert first.mib_s == pytest.approx(2000)
    assert first.ci95 == pytest.approx((2000 / 2**12.7062, 2000 * 2**12.7062), rel=1e-4)
    assert (first.amplification, first.cpu_s_per_gib) == (pytest.approx(1.25), pytest.approx(1.0))
    assert (first.group_p50_ms, first.group_p95_ms) == (pytest.approx(20.0), pytest.approx(20.0))
    assert (second.mib_s, second.ci95) == (pytest.approx(3000), None)
    assert (third.mib_s, third.why) == (None, "no call")
    assert (fourth.mib_s, fourth.why) == (None, "no whole group")


def test_the_tables_show_the_best_readers_and_why_a_way_is_missing() -> None:
    skipped = {
        "kind": "sample",
        "method": "uring",
        "readers": 1,
        "cold": False,
        "status": "skipped",
        "reason": "no call",
    }
    page = reads.as_markdown(rows(sample("direct", 1, 1000, 1.0), sample("direct", 4, 3000, 1.0), skipped))
    assert "| MiB/s | 1 reader | 4 readers |" in page
    assert "| direct | 1000 | 3000 |" in page
    assert "| uring | - | - |" in page
    assert "| direct | 4 | 3000 | 1.25 | 1.00 | 10.0 | 20.0 |" in page
    assert "no call" in page
    assert "ext4 on loop0 on tmpfs (lab), read-ahead 128 KiB" in page
    assert "memory budget 2.50 GiB" in page
    assert "1 of 3 samples did not start cold" in page


# --- The command


def bench_reads(*args: object) -> Result:
    return CliRunner().invoke(command_line.cli, ["bench", "reads", *map(str, args)])


@LINUX
def test_the_command_measures_writes_and_prints(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "reads.jsonl"
    small = ["--slice", "100000", "--group", "2", "--seconds", "0.01", "--blocks", "2", "--readers", "2"]
    done = bench_reads(data, *small, "--methods", "pread,willneed", "--out", out, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    head, *samples = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert (head["kind"], head["file"], head["plan"]["window"] >= 131072) == ("reads", "model.gguf", True)
    assert len(samples) == 4
    assert [f["method"] for f in report["figures"]] == ["pread", "willneed"]
    assert all(s["status"] == "done" and s["groups"] >= 1 for s in samples)
    again = bench_reads(data, *small, "--out", out)
    assert isinstance(again.exception, BenchError)
    assert "the file exists" in again.exception.what


@LINUX
@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["FILE", "--methods", "pread,magic"], "there is no way magic to read"),
        (["FILE", "--readers", "1,0"], "0 readers"),
        (["FILE", "--readers", "1,1000"], "1000 readers"),
        (["FILE", "--window", "5000"], "no whole pages"),
        (["FILE", "--group", "100"], "one group of slices needs"),
        (["FILE", "--slice", "tiny"], "not a size"),
        (["FILE.missing"], "not a file"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_anything_is_built(
    data: Path, home: Path, args: list[str], what: str
) -> None:
    done = bench_reads(*(a.replace("FILE", str(data)) for a in args))
    assert isinstance(done.exception, ToolkitError)
    assert what in done.exception.what
    assert not (home / "tools").exists()


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ([], "give FILE or --lab SIZE"),
        (["x", "--lab", "1GiB"], "give FILE or --lab SIZE"),
        (["x", "--lab-read-ahead", "128"], "blockdev --setra"),
        (["x", "--readers", "one"], "is not a list of numbers"),
    ],
)
def test_options_that_exclude_each_other(args: list[str], what: str) -> None:
    done = bench_reads(*args)
    assert done.exit_code == 2
    assert what in done.stderr


# --- The disk made of memory


def lab_folders() -> list[Path]:
    return [Path(m.point) for m in mounts() if "moe-madv-lab-" in m.point]


@pytest.fixture
def lab_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs Linux and root")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        with lab.fast_disk(1 << 20, read_ahead_kb=128):
            pass
    except ToolkitError as e:
        pytest.skip(f"no disk can be made here: {e.what}")
    yield
    assert not [f for f in lab_folders() if tmp_path in f.parents]


@pytest.mark.usefixtures("lab_possible")
def test_a_disk_of_memory_holds_the_file_and_is_gone_afterwards(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    nbytes = (40 << 20) + 5
    with lab.fast_disk(nbytes, read_ahead_kb=256) as folder:
        lab.fill(folder / "data", nbytes)
        assert (folder / "data").stat().st_size == nbytes
        storage = storage_of(folder)
        assert (storage.filesystem, storage.loop_on, storage.read_ahead_kb) == ("ext4", "tmpfs", 256)
        assert signal.getsignal(signal.SIGTERM) != handler
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.usefixtures("lab_possible")
def test_the_disk_is_gone_after_an_error_and_after_sigterm(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lab.fast_disk(1 << 20, read_ahead_kb=128):
        _ = 1 // 0
    with pytest.raises(SystemExit) as e, lab.fast_disk(1 << 20, read_ahead_kb=128):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert e.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("lab_possible")
def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    child = (
        "import os, signal, sys, tempfile; from toolkit.bench import lab; tempfile.tempdir = sys.argv[1]\n"
        "with lab.fast_disk(1 << 20, read_ahead_kb=128): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", child, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left / "disk" in lab_folders()
    with lab.fast_disk(1 << 20, read_ahead_kb=128):
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_of_memory_needs_root_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MachineError, match="Linux and root"), lab.fast_disk(1 << 20, read_ahead_kb=128):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(lab.shutil, "which", lambda tool, path: "/bin/true")
    with pytest.raises(MachineError, match="and 1 more are needed"), lab.fast_disk(1 << 50, read_ahead_kb=128):
        pass
