"""Time in which a thread was blocked: the arithmetic, fixtures of /proc, and real reads past the page cache."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from toolkit.bench import blocked
from toolkit.bench.blocked import Moment, blocked_ns, io_wait, now
from toolkit.bench.disk import MEMORY_FILESYSTEMS, mount_of

MIB = 1024**2
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the real /proc")


def moment(wall: int, running: int = 0, queued: int | None = 0) -> Moment:
    return Moment(wall=wall, running=running, queued=queued)


def test_what_is_neither_running_nor_queued_is_blocked() -> None:
    assert blocked_ns(moment(1000, 400, 50), moment(1900, 600, 150)) == 900 - 200 - 100
    # the clocks are read one after the other
    assert blocked_ns(moment(1000, 400), moment(1900, 1310)) == 0
    assert blocked_ns(moment(1000, 400, None), moment(1900, 600, None)) is None


def test_the_spans_add_up_and_a_reason_stands_where_they_mean_nothing() -> None:
    spans = [(moment(0), moment(2 * 10**9, 5 * 10**8)), (moment(5 * 10**9), moment(6 * 10**9, 0, 10**9))]
    assert io_wait(spans, n_gpu_layers=0, remote=False) == {"io_wait_s": 1.5, "io_wait_why": None}
    untold = io_wait([*spans, (moment(0), moment(1, 0, None))], n_gpu_layers=0, remote=False)
    assert untold["io_wait_s"] is None and "schedstat" in untold["io_wait_why"]
    assert io_wait(spans, n_gpu_layers=99, remote=False)["io_wait_why"] == "the thread waits for the GPU too"
    assert io_wait(spans, n_gpu_layers=99, remote=True)["io_wait_why"] == "its layers are on other machines"


@pytest.mark.parametrize(
    ("line", "queued"),
    [("300000000 7000500 41\n", 7_000_500), ("0 0 0\n", 0), ("1 2\n", None), ("a b c\n", None), (None, None)],
)
def test_the_kernels_line_is_read_by_position(tmp_path: Path, line: str | None, queued: int | None) -> None:
    if line is not None:
        (tmp_path / "thread-self").mkdir()
        (tmp_path / "thread-self/schedstat").write_text(line, encoding="utf-8")
    assert now(tmp_path).queued == queued


@linux
def test_threads_that_read_past_the_page_cache_are_blocked(tmp_path: Path) -> None:
    mount = mount_of(tmp_path)
    if mount is None or mount.filesystem in MEMORY_FILESYSTEMS:
        pytest.skip("the temporary folder is in memory")
    data = tmp_path / "data"
    data.write_bytes(os.urandom(8 * MIB))
    fd = os.open(data, os.O_RDONLY | os.O_DIRECT)
    os.fsync(fd)
    found: list[tuple[int, int | None]] = []

    def read() -> None:
        before = now()
        with mmap.mmap(-1, MIB) as buffer:
            n_bytes = sum(os.preadv(fd, [buffer], i * MIB) for i in range(8))
        found.append((n_bytes, blocked_ns(before, now())))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert [n_bytes for n_bytes, _ in found] == [8 * MIB] * 2
    assert all(ns is not None and ns > 0 for _, ns in found)


def test_the_file_loads_alone_in_a_bare_interpreter() -> None:
    code = (
        "import importlib.util as u, sys\n"
        "spec = u.spec_from_file_location('blocked', sys.argv[1])\n"
        "module = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(module.now().wall > 0, 'toolkit' in sys.modules)\n"
    )
    argv = [sys.executable, "-I", "-S", "-c", code, str(blocked.__file__)]
    done = subprocess.run(argv, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == "True False\n"
