from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.bench.cgroup import Hierarchy
from toolkit.bench.disk import MEMORY_FILESYSTEMS, mount_of
from toolkit.bench.limits import (
    Budget,
    Method,
    available_memory,
    detect,
    memory_budget,
    parse_size,
    prove_enforced,
    remove_group,
    sweep,
)
from toolkit.errors import BenchError

GIB = 1024**3
MIB = 1024**2
V1_UNLIMITED = 9223372036854771712
TOUCH = "import sys; print('started', flush=True); b'\\1' * int(sys.argv[1]); print('survived', flush=True)"


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n", encoding="utf-8")
    return root


def meminfo(available_gib: float) -> str:
    return f"MemTotal:  33554432 kB\nMemAvailable:  {int(available_gib * GIB) // 1024} kB\nSwapTotal: 0 kB"


# --- sizes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1.5GiB", 1_610_612_736),
        ("2G", 2_147_483_648),
        ("1500MB", 1_500_000_000),
        ("512 MiB", 536_870_912),
        ("64k", 65_536),
        ("1tb", 1_000_000_000_000),
        ("100B", 100),
        ("2684354560", 2_684_354_560),
        (4096, 4096),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1G", "2.5.1G", "G", "1e9", "1 GiB extra", "0.1", "١G", -4096])
def test_a_bad_size_is_named_with_an_example(text: str | int) -> None:
    with pytest.raises(BenchError, match="not a size") as error:
        parse_size(text)
    assert repr(text) in str(error.value)
    assert "2.5GiB" in str(error.value)


# --- available memory


def test_the_limit_of_a_parent_group_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "cg",
        {
            "cgroup.controllers": "cpu memory",
            "a/memory.max": 2 * GIB,
            "a/memory.current": GIB // 2,
            "a/b/memory.max": "max",
            "a/b/memory.current": GIB // 2,
        },
    )
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/a/b", "meminfo": meminfo(20)})
    found = available_memory(root=root, proc=proc)
    assert found.bytes == 1_610_612_736  # 2 GiB less the 0.5 GiB in use
    assert str(root / "a") in found.source
    assert "2.00 GiB" in found.source


def test_clean_file_cache_is_available(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "cg",
        {
            "cgroup.controllers": "memory",
            "a/memory.max": 2 * GIB,
            "a/memory.current": 2 * GIB - 4096,
            "a/memory.stat": f"file {2 * GIB}\ninactive_file {3 * GIB // 2}\nfile_dirty {GIB // 4}",
        },
    )
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/a", "meminfo": meminfo(20)})
    # 1.5 GiB of file pages less 0.25 GiB still to be written, and the 4096 free bytes
    assert available_memory(root=root, proc=proc).bytes == 1_342_177_280 + 4096


def test_the_huge_number_of_v1_is_no_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "cg",
        {
            "memory/memory.limit_in_bytes": V1_UNLIMITED,
            "memory/job/memory.limit_in_bytes": V1_UNLIMITED,
            "memory/job/memory.usage_in_bytes": GIB,
        },
    )
    proc = tree(tmp_path / "proc", {"self/cgroup": "3:cpu:/x\n4:memory:/job\n0::/", "meminfo": meminfo(5)})
    found = available_memory(root=root, proc=proc)
    assert found.bytes == 5 * GIB
    assert found.source.startswith("MemAvailable")


def test_v1_usage_includes_children_so_their_cache_does_too(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "cg",
        {
            "memory/memory.limit_in_bytes": 4 * GIB,
            "memory/memory.usage_in_bytes": 3 * GIB,
            "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}",
        },
    )
    # A container without its own cgroup namespace reads a host path that its mount does not show.
    proc = tree(tmp_path / "proc", {"self/cgroup": "4:cpuset,memory:/docker/0123", "meminfo": meminfo(30)})
    assert available_memory(root=root, proc=proc).bytes == 3 * GIB


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "cgroup.controllers": "memory",
            "a/memory.max": 8 * GIB,
            "a/memory.high": GIB,
            "a/memory.current": 0,
        },
    )
    hierarchy = Hierarchy.find(root)
    assert hierarchy is not None
    assert hierarchy.limit(root / "a") == GIB


# --- detection


def test_hybrid_machines_limit_memory_through_v1(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "cg",
        {
            "unified/cgroup.controllers": "hugetlb",
            "memory/memory.limit_in_bytes": V1_UNLIMITED,
            "memory/tasks": "",
        },
    )
    proc = tree(tmp_path / "proc", {"self/cgroup": "4:memory:/\n0::/"})
    assert detect(root=root, proc=proc) == Method(name="cgroup-v1", parent=root / "memory")


def test_v2_uses_the_highest_group_that_hands_memory_down(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "cg",
        {
            "cgroup.controllers": "cpu memory",
            "cgroup.type": "domain",
            "cgroup.procs": "1",
            "cgroup.subtree_control": "cpu",
            "user/cgroup.controllers": "memory",
            "user/cgroup.type": "domain",
            "user/cgroup.procs": "",
            "user/cgroup.subtree_control": "memory",
            "user/app/cgroup.type": "domain",
            "user/app/cgroup.procs": "7",
        },
    )
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/user/app"})
    assert detect(root=root, proc=proc) == Method(name="cgroup-v2", parent=root / "user")


def test_the_true_v2_root_may_hand_memory_down_although_it_holds_processes(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "cg",
        {
            "cgroup.controllers": "memory",
            "cgroup.procs": "1\n2",
            "cgroup.subtree_control": "",
            "s/cgroup.procs": "2",
        },
    )
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/s"})
    assert detect(root=root, proc=proc) == Method(name="cgroup-v2", parent=root)


@pytest.fixture
def undelegated(tmp_path: Path) -> tuple[Path, Path]:
    """A container's v2 root: memory exists, but its own processes stand in the way of sharing it out."""
    user = f"user.slice/user-{os.getuid()}.slice/user@{os.getuid()}.service"
    root = tree(
        tmp_path / "cg",
        {
            "cgroup.controllers": "memory",
            "cgroup.type": "domain",
            "cgroup.procs": "1",
            "cgroup.subtree_control": "",
            f"{user}/cgroup.controllers": "memory pids",
        },
    )
    return root, tree(tmp_path / "proc", {"self/cgroup": "0::/"})


def test_without_a_usable_group_the_method_is_none_and_says_why(
    undelegated: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    root, proc = undelegated
    found = detect(root=root, proc=proc, run=tmp_path)
    assert found.name == "none"
    assert str(root) in found.why
    assert detect(root=tmp_path / "missing", proc=proc).name == "none"


def test_systemd_run_is_used_where_systemd_can_enforce(
    undelegated: tuple[Path, Path], stub_systemd_run: Path, tmp_path: Path
) -> None:
    root, proc = undelegated
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    expected = "systemd-system" if os.getuid() == 0 else "systemd-user"
    assert detect(root=root, proc=proc, run=tmp_path / "run").name == expected


# --- commands and groups, on fake trees


@pytest.fixture
def stub_systemd_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemd-run that accepts every property, ignores it and runs the command."""
    stub = tmp_path / "bin/systemd-run"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n', encoding="utf-8")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    return stub


ARGS = ["a b", "c'\"$HOME", "", "*", "--", "new\nline"]
ECHO = [sys.executable, "-I", "-S", "-c", "import os, sys; print([os.getpid(), *sys.argv[1:]])"]


def test_the_child_enters_the_group_before_it_runs_and_keeps_its_arguments(tmp_path: Path) -> None:
    budget = Budget(64 * MIB, Method(name="cgroup-v1", parent=tmp_path / "with space"), root=tmp_path)
    assert budget.group is not None
    budget.group.mkdir(parents=True)
    done = subprocess.run(budget.command([*ECHO, *ARGS]), capture_output=True, encoding="utf-8", check=True)
    entered = int((budget.group / "cgroup.procs").read_text(encoding="utf-8"))
    assert done.stdout == f"{[entered, *ARGS]}\n"


def test_a_systemd_scope_asks_for_memory_without_swap(tmp_path: Path) -> None:
    budget = Budget(64 * MIB, Method(name="systemd-user"), root=tmp_path)
    command = budget.command(["worker", "--flag"])
    assert command[:3] == ["systemd-run", "--user", "--scope"]
    assert command[-6:] == ["MemoryMax=67108864", "-p", "MemorySwapMax=0", "--", "worker", "--flag"]


@pytest.mark.parametrize(("nbytes", "method"), [(None, "cgroup-v1"), (GIB, "none")])
def test_no_number_or_no_method_is_reported_as_none(tmp_path: Path, nbytes: int | None, method: str) -> None:
    chosen = Method(name="none") if method == "none" else Method(name="cgroup-v1", parent=tmp_path)
    with memory_budget(nbytes, method=chosen, root=tmp_path) as budget:
        assert budget.method == "none"
        assert budget.nbytes is None
        assert budget.command(["x", "y z"]) == ["x", "y z"]
        assert set(budget.stat().values()) == {None}
    assert list(tmp_path.iterdir()) == []


def test_the_effective_limit_is_the_smallest_on_the_path_of_the_process(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "cg",
        {
            "cgroup.controllers": "memory",
            "a/memory.max": GIB,
            "a/memory.swap.max": "max",
            "a/b/memory.max": 2 * GIB,
            "a/b/memory.swap.max": "max",
            "free/memory.max": "max",
        },
    )
    proc = tree(tmp_path / "proc", {"11/cgroup": "0::/a/b", "12/cgroup": "0::/free"})
    budget = Budget(2 * GIB, Method(name="systemd-user"), root=root, proc=proc)
    assert budget.effective(11) == GIB
    assert budget.swap_limit(11) is None  # swap was left open
    assert budget.effective(12) is None
    with pytest.raises(BenchError, match="process 13 has ended"):
        budget.effective(13)


def test_groups_of_dead_runs_are_swept_and_others_stay(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"41/cgroup": "0::/"})
    names = ["moe-madv-41-0", "moe-madv-42-0", "moe-madv-42-17", "moe-madv-42-0-x", "other-42-0"]
    for name in names:
        (tmp_path / "cg" / name).mkdir(parents=True)
    sweep(tmp_path / "cg", proc=proc)
    left = sorted(p.name for p in (tmp_path / "cg").iterdir())
    assert left == ["moe-madv-41-0", "moe-madv-42-0-x", "other-42-0"]


def test_processes_of_another_pid_namespace_are_left_alone(tmp_path: Path) -> None:
    group = tree(tmp_path / "g", {"cgroup.procs": "0\n0"})
    assert remove_group(group) is False  # kill(0) would have ended this test
    assert group.exists()


# --- enforcement


def test_a_limit_that_nothing_enforces_is_an_error(stub_systemd_run: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="accepted and not enforced by systemd-user") as error:
        prove_enforced(Method(name="systemd-user"), root=tmp_path)
    assert "48 MiB touched 128 MiB" in str(error.value)


def test_no_method_proves_nothing() -> None:
    with pytest.raises(BenchError, match="no memory limit is possible: no right"):
        prove_enforced(Method(name="none", why="no right"))


def test_a_manager_that_cannot_start_the_child_is_no_proof(stub_systemd_run: Path, tmp_path: Path) -> None:
    stub_systemd_run.write_text("#!/bin/sh\necho no bus >&2\nexit 1\n", encoding="utf-8")
    with pytest.raises(BenchError, match=r"no process can be started .*no bus"):
        prove_enforced(Method(name="systemd-user"), root=tmp_path)


def test_a_group_that_cannot_be_made_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    parent = tmp_path / "gone"  # removed between detection and use
    root = tree(tmp_path / "cg", {"memory/memory.limit_in_bytes": V1_UNLIMITED})
    method = Method(name="cgroup-v1", parent=parent)
    with (
        pytest.raises(BenchError, match="memory budget: No such file"),
        memory_budget(MIB, method=method, root=root),
    ):
        pass
    assert not parent.exists()


# --- for real


@pytest.fixture
def method() -> Iterator[Method]:
    found = detect()
    if found.parent is None:
        pytest.skip(f"no memory group can be made here: {found.why or found.name}")
    before = set(found.parent.glob(f"moe-madv-{os.getpid()}-*"))
    yield found
    assert set(found.parent.glob(f"moe-madv-{os.getpid()}-*")) == before


def touch(budget: Budget, nbytes: int) -> subprocess.CompletedProcess[str]:
    argv = budget.command([sys.executable, "-I", "-S", "-c", TOUCH, str(nbytes)])
    return subprocess.run(argv, capture_output=True, encoding="utf-8", check=False)


def test_the_kernel_enforces_the_limit_here(method: Method) -> None:
    prove_enforced(method)
    with memory_budget(64 * MIB, method=method) as budget:
        assert budget.method == method.name
        killed = touch(budget, 128 * MIB)
        stat = budget.stat()
    assert (killed.stdout, killed.returncode) == ("started\n", -9)
    assert stat["oom_kills"] == 1
    with memory_budget(64 * MIB, method=method) as budget:
        lived = touch(budget, 24 * MIB)
        stat = budget.stat()
    assert (lived.stdout, lived.returncode) == ("started\nsurvived\n", 0)
    assert stat["oom_kills"] == 0
    if stat["peak_bytes"] is not None:  # memory.peak of v2 came with Linux 5.19
        assert 24 * MIB <= stat["peak_bytes"] <= 64 * MIB


def test_the_limit_reads_back_from_the_child_and_file_pages_are_charged(method: Method, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(os.urandom(8 * MIB))
    fd = os.open(data, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    read = "import sys; n = len(open(sys.argv[1], 'rb').read()); print(n, flush=True); sys.stdin.read()"
    with memory_budget(96 * MIB, method=method) as budget:
        argv = budget.command([sys.executable, "-I", "-S", "-c", read, str(data)])
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert int(child.stdout.readline()) == 8 * MIB
            assert budget.effective(child.pid) == 96 * MIB
            swap = budget.swap_limit(child.pid)
            charged = budget.stat()["file_bytes"]
            child.communicate()
    assert swap in (0, None)  # None: this kernel does not account for swap
    assert charged is not None
    if _on_disk(tmp_path):
        assert charged >= 8 * MIB


def _on_disk(path: Path) -> bool:
    mount = mount_of(path)
    return mount is not None and mount.filesystem not in MEMORY_FILESYSTEMS


def test_leftover_processes_are_killed_with_the_group(method: Method) -> None:
    with memory_budget(64 * MIB, method=method) as budget:
        child = subprocess.Popen(budget.command(["/bin/sh", "-c", "echo in; sleep 600"]), stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        group = budget.group
        child.stdout.close()
    assert child.wait(timeout=30) == -9
    assert group is not None
    assert not group.exists()


def test_the_next_run_sweeps_the_group_of_a_killed_run(method: Method) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    assert method.parent is not None
    stale = method.parent / f"moe-madv-{dead.pid}-0"
    stale.mkdir()
    argv = ["/bin/sh", "-c", f"echo $$ > {stale}/cgroup.procs && echo in && exec sleep 600"]
    orphan = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert orphan.stdout is not None
    orphan.stdout.readline()
    orphan.stdout.close()
    with memory_budget(64 * MIB, method=method):
        assert not stale.exists()
    assert orphan.wait(timeout=30) == -9


def test_two_budgets_at_once_are_two_groups(method: Method) -> None:
    with memory_budget(64 * MIB, method=method) as one, memory_budget(32 * MIB, method=method) as two:
        assert one.group != two.group
        assert one.group is not None and two.group is not None
        assert one.group.is_dir() and two.group.is_dir()


def test_an_error_inside_still_removes_the_group(method: Method) -> None:
    with pytest.raises(RuntimeError, match="inside"), memory_budget(64 * MIB, method=method) as budget:
        raise RuntimeError("inside")
    assert budget.group is not None
    assert not budget.group.exists()
