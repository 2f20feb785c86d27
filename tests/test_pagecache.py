from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.bench import pagecache
from toolkit.bench.disk import MEMORY_FILESYSTEMS, mount_of
from toolkit.bench.pagecache import EvictResult, Mapper, Residency, evict, mappers, residency
from toolkit.errors import BenchError

MIB = 1024**2
PAGE = mmap.PAGESIZE
linux = pytest.mark.skipif(sys.platform != "linux", reason="page residency is measured on Linux only")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    mount = mount_of(tmp_path)
    if mount is None or mount.filesystem in MEMORY_FILESYSTEMS:
        pytest.skip("the temporary folder is not on a disk")
    return tmp_path


def random_file(path: Path, size: int) -> Path:
    path.write_bytes(os.urandom(size))
    return path


MAP = """
import mmap, sys
with open(sys.argv[1], "rb") as f:
    m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
for i in range(0, int(sys.argv[2]), mmap.PAGESIZE):
    m[i]
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def mapped(disk: Path) -> Iterator[tuple[Path, int]]:
    """A resident 16 MiB file of which another process holds the first 4 MiB mapped, and its pid."""
    path = random_file(disk / "model part 1.gguf", 16 * MIB)
    argv = [sys.executable, "-I", "-S", "-c", MAP, str(path), str(4 * MIB)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mapped\n"
        yield path, holder.pid
        holder.communicate()


@linux
def test_a_freshly_written_file_is_emptied_and_proved_cold(disk: Path) -> None:
    path = random_file(disk / "model.gguf", 16 * MIB)
    assert residency(path).resident == 16 * MIB
    result = evict([path])
    assert result == EvictResult(
        resident_before=16 * MIB, resident_after=0, total=16 * MIB, method="fadvise", why_warm=None
    )
    assert result.cold
    assert residency(path).fraction == 0


@linux
def test_mapped_pages_stay_and_the_process_is_named(mapped: tuple[Path, int]) -> None:
    path, pid = mapped
    result = evict([path])
    assert not result.cold
    assert result.resident_after is not None and result.resident_after >= 4 * MIB
    assert [m.pid for m in result.mappers] == [pid]
    assert result.why_warm is not None
    assert f"mapped by process {pid} (" in result.why_warm
    assert Path(sys.executable).name in result.why_warm


@linux
def test_once_unmapped_the_rest_goes(disk: Path) -> None:
    path = random_file(disk / "model.gguf", 16 * MIB)
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert sum(view[i] for i in range(0, 4 * MIB, PAGE)) >= 0
        held = evict([path])
        assert [m.pid for m in held.mappers] == [os.getpid()]
    assert held.resident_after is not None and held.resident_after >= 4 * MIB
    assert evict([path]).cold


@linux
def test_the_parts_of_a_split_model_count_together(disk: Path) -> None:
    parts = [random_file(disk / f"m-0000{n}-of-00002.gguf", n * MIB + 5) for n in (1, 2)]
    assert residency(*parts).total == 3 * MIB + 10
    assert residency(*parts).resident == 3 * MIB + 10
    result = evict(parts)
    assert (result.resident_before, result.resident_after, result.cold) == (3 * MIB + 10, 0, True)


@linux
@pytest.mark.parametrize("size", [0, 1, PAGE, 3 * PAGE + 17, 2 * MIB])
def test_both_calls_count_the_same_pages(disk: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = random_file(disk / "f", size)
    by_cachestat = residency(path)
    monkeypatch.setattr(pagecache, "_cachestat", lambda fd, size: None)
    assert residency(path) == Residency(resident=size, total=size, method="mincore")
    assert by_cachestat.resident == size
    assert evict([path]).cold


@linux
def test_mincore_works_through_a_file_in_chunks(disk: Path) -> None:
    path = random_file(disk / "f", 8 * PAGE + 1)
    evict([path])
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: only what is asked for
        assert len(os.pread(fd, 1, 2 * PAGE) + os.pread(fd, 1, 8 * PAGE)) == 2
        # The last, one-byte page is counted whole, which must not make up for a missing one.
        assert pagecache._mincore(fd, 8 * PAGE + 1, chunk=2 * PAGE) == 2 * PAGE
        assert pagecache._mincore(fd, 8 * PAGE + 1) == 2 * PAGE
    finally:
        os.close(fd)


@linux
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs root to become nobody")
def test_who_may_not_ask_gets_unknown_instead_of_all_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagecache, "_cachestat", lambda fd, size: None)
    with tempfile.NamedTemporaryFile() as f:
        path = Path(f.name)
        f.write(b"x" * PAGE)
        f.flush()
        path.chmod(0o644)
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                found, result = residency(path), evict([path])
                answer = f"{found.resident} {found.method} {result.cold} {result.why_warm}"
                os.write(writable, answer.encode())
            finally:
                os._exit(0)
        os.close(writable)
        os.waitpid(child, 0)
        with os.fdopen(readable, encoding="utf-8") as pipe:
            text = pipe.read()
    assert text.startswith("None unknown False ")
    assert "only the owner or a writer" in text or "tmpfs" in text


@linux
def test_on_tmpfs_no_run_can_be_cold() -> None:
    mount = mount_of(Path("/dev/shm"))
    if mount is None or mount.filesystem != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as f:
        f.write(b"x" * (4 * PAGE))
        f.flush()
        result = evict([Path(f.name)])
    assert (result.cold, result.method, result.resident_after) == (False, "none", 4 * PAGE)
    assert result.why_warm is not None
    assert "no cold run is possible" in result.why_warm


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_nothing_is_called_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    path = random_file(tmp_path / "f", 1000)

    monkeypatch.setattr(sys, "platform", platform)
    found, result = residency(path), evict([path])
    assert (found.resident, found.fraction, found.total, found.method) == (None, None, 1000, "unknown")
    assert (result.cold, result.method, result.resident_after) == (False, "none", None)
    assert result.why_warm is not None
    assert platform in result.why_warm


@linux
def test_the_kernel_switch_is_used_only_when_asked_and_says_when_it_is_refused(
    mapped: tuple[Path, int], tmp_path: Path
) -> None:
    path, _ = mapped
    switch = tmp_path / "proc/sys/vm/drop_caches"
    refused = evict([path], drop_caches=True, proc=tmp_path / "proc")
    assert refused.method == "fadvise"
    assert refused.why_warm is not None
    assert "drop_caches was refused: No such file" in refused.why_warm
    switch.parent.mkdir(parents=True)
    switch.write_text("", encoding="utf-8")
    assert evict([path], proc=tmp_path / "proc").method == "fadvise"
    assert switch.read_text(encoding="utf-8") == ""
    asked = evict([path], drop_caches=True, proc=tmp_path / "proc")
    assert (asked.method, asked.cold) == ("drop_caches", False)
    assert switch.read_text(encoding="utf-8") == "1\n"


def test_mappers_are_found_by_name_or_by_device_and_inode(tmp_path: Path) -> None:
    path = random_file(tmp_path / "model (1).gguf", 10)
    stat = path.stat()
    number = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x} {stat.st_ino}"
    maps = {
        5: f"7f0000000000-7f0000001000 r--s 00000000 00:99 1    {path.resolve()}\n",
        40: f"7f0000000000-7f0000001000 r--s 00000000 {number}    /other/name/in/a/container\n",
        300: "7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n7f00-7f01 r--p 00000000 00:99 7 /other\n",
    }
    for pid, text in maps.items():
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/maps").write_text(text, encoding="utf-8")
        (tmp_path / f"proc/{pid}/cmdline").write_bytes(b"llama-server\0-m\0x\0")
    (tmp_path / "proc/6").mkdir()  # ended while we looked
    assert mappers([path], proc=tmp_path / "proc") == (
        Mapper(pid=5, command="llama-server -m x"),
        Mapper(pid=40, command="llama-server -m x"),
    )


@pytest.mark.parametrize("name", ["missing.gguf", "."])
def test_a_path_that_is_no_file_is_one_clear_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(BenchError) as error:
        evict([tmp_path / name])
    assert error.value.where == str(tmp_path / name)
