"""Memory budgets: run a child under a limit, prove that the limit bites, read back what it did."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal

import psutil  # type: ignore[import-untyped]

from toolkit.bench import cgroup
from toolkit.bench.cgroup import PROC, ROOT, Hierarchy
from toolkit.console import GIB, MIB, note
from toolkit.errors import BenchError

RUN = Path("/run")

_GROUP = re.compile(r"moe-madv-(\d+)-\d+$")
_counter = itertools.count()

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(I?B)?|B)?\s*", re.IGNORECASE)

MethodName = Literal["cgroup-v2", "cgroup-v1", "systemd-system", "systemd-user", "none"]


def parse_size(text: str | int) -> int:
    """Bytes from `1.5GiB`, `2G` (binary, as cgroups read it), `1500MB` (decimal) or a plain number."""
    nbytes = 0
    if match := _SIZE.fullmatch(str(text)):
        number, prefix, suffix = match.groups()
        base = 1000 if (suffix or "").upper() == "B" else 1024
        nbytes = int(Decimal(number) * base ** ("KMGT".index(prefix.upper()) + 1 if prefix else 0))
    if nbytes <= 0:
        raise BenchError(f"not a size: {text!r}", hint="write a number above zero with a unit: 2.5GiB, 512M, 1500MB")
    return nbytes


# --- How much memory a run may plan with


@dataclass(frozen=True, kw_only=True)
class Available:
    """Memory a new process can get, and the file that says so."""

    bytes: int
    source: str


def available_memory(*, root: Path = ROOT, proc: Path = PROC) -> Available:
    """Smallest of MemAvailable and the room under each memory limit on our own cgroup path.

    Clean file cache counts as available in both, since the kernel drops it on demand.
    """
    for line in cgroup.read_text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found = Available(bytes=int(line.split()[1]) * 1024, source=f"MemAvailable in {proc / 'meminfo'}")
            break
    else:
        found = Available(bytes=psutil.virtual_memory().available, source="operating system (psutil)")
    hierarchy = Hierarchy.find(root)
    if hierarchy is None or not (proc / "self/cgroup").exists():
        return found
    for group in hierarchy.path_of("self", proc):
        limit = hierarchy.limit(group)
        if limit is None:
            continue
        room = max(0, limit - (hierarchy.unreclaimable(group) or 0))
        if room < found.bytes:
            found = Available(bytes=room, source=f"memory limit of {limit / GIB:.2f} GiB in {group}")
    return found


# --- Budgets


@dataclass(frozen=True, kw_only=True)
class Method:
    """How this machine can limit a child's memory."""

    name: MethodName
    parent: Path | None = None  # cgroup methods: the group under which budgets are made
    why: str = ""  # for "none": what is missing


def detect(*, root: Path = ROOT, proc: Path = PROC, run: Path = RUN) -> Method:
    """The best way to limit memory here. It is a promise of the file system, so prove it before use.

    Groups go as high as permissions allow: fewer ancestors, fewer limits that are not ours.
    """
    hierarchy = Hierarchy.find(root)
    if sys.platform != "linux" or hierarchy is None:
        return Method(name="none", why=f"no cgroup memory controller under {root}")
    for group in reversed(hierarchy.path_of("self", proc)):
        if hierarchy.version == 1 and os.access(group, os.W_OK):
            return Method(name="cgroup-v1", parent=group)
        if hierarchy.version == 2 and _delegates_memory(group) and os.access(group / "cgroup.procs", os.W_OK):
            return Method(name="cgroup-v2", parent=group)
    # A user manager only has what systemd delegates to it, and on v1 that is never memory.
    user = f"user.slice/user-{os.getuid()}.slice/user@{os.getuid()}.service"
    if shutil.which("systemd-run") and hierarchy.version == 2:
        if os.getuid() == 0 and (run / "systemd/system").is_dir():
            return Method(name="systemd-system")
        if "memory" in cgroup.words(hierarchy.mount / user / "cgroup.controllers"):
            return Method(name="systemd-user")
    return Method(name="none", why=f"no right to make a memory group under {hierarchy.mount}")


def _delegates_memory(group: Path) -> bool:
    """Whether children of a v2 group get the memory controller, or may be given it.

    Only the true root (the one without cgroup.type) may hold processes and share out controllers.
    """
    if not os.access(group, os.W_OK):
        return False
    if "memory" in cgroup.words(group / "cgroup.subtree_control"):
        return True
    free = not (group / "cgroup.type").exists() or not cgroup.words(group / "cgroup.procs")
    return free and "memory" in cgroup.words(group / "cgroup.controllers")


class Budget:
    """A memory limit for child processes started through `command`; made by `memory_budget`."""

    def __init__(self, nbytes: int | None, method: Method, *, root: Path = ROOT, proc: Path = PROC) -> None:
        limited = nbytes is not None and method.name != "none"
        self.nbytes = nbytes if limited else None
        self.method: MethodName = method.name if limited else "none"
        self.name = f"moe-madv-{os.getpid()}-{next(_counter)}"
        # Under systemd-run the group is known once `effective` has seen the child in it.
        self.group = method.parent / self.name if limited and method.parent else None
        self._hierarchy = Hierarchy.find(root)
        self._proc = proc

    def command(self, argv: Sequence[str | Path]) -> list[str]:
        """The same command, entering the group before it is executed: every page it touches is charged."""
        args = [str(a) for a in argv]
        if self.method in ("systemd-system", "systemd-user"):
            scope = ["systemd-run", "--scope", "--quiet", "--collect", f"--unit={self.name}"]
            if self.method == "systemd-user":
                scope.insert(1, "--user")
            return [*scope, "-p", f"MemoryMax={self.nbytes}", "-p", "MemorySwapMax=0", "--", *args]
        if self.group is not None:
            return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.group / "cgroup.procs"), *args]
        return args

    def effective(self, pid: int) -> int | None:
        """Smallest limit in bytes on the path of the group the process is in now; None: unlimited.

        Ask once the child has said something: until then it may not have entered its group.
        """
        return self._on_path(pid, Hierarchy.limit)

    def swap_limit(self, pid: int) -> int | None:
        """Bytes of swap the process may use on top of its memory; None: unlimited. Ours is 0."""
        return self._on_path(pid, Hierarchy.swap_limit)

    def _on_path(self, pid: int, read: Callable[[Hierarchy, Path], int | None]) -> int | None:
        if self._hierarchy is None:
            return None
        try:
            path = self._hierarchy.path_of(pid, self._proc)
        except OSError as e:
            raise BenchError(f"process {pid} has ended, its memory limit cannot be read") from e
        if self.group is None and self.method != "none" and path[0].name == f"{self.name}.scope":
            self.group = path[0]
        return cgroup.smallest(read(self._hierarchy, group) for group in path)

    def stat(self) -> dict[str, int | None]:
        """What the group went through: bytes now and at the peak, page and event counts; None: not told.

        cgroup groups answer until the budget is closed; a systemd scope ends with its process.
        """
        group = self.group or Path("/nonexistent")
        v1 = self._hierarchy is not None and self._hierarchy.version == 1
        stat, events = cgroup.stat(group), cgroup.stat(group, "memory.oom_control" if v1 else "memory.events")
        return {
            "file_bytes": stat.get("cache" if v1 else "file"),
            "anon_bytes": stat.get("rss" if v1 else "anon"),
            "refault_file_pages": stat.get("workingset_refault_file"),
            "major_faults": stat.get("pgmajfault"),
            "peak_bytes": cgroup.number(group / ("memory.max_usage_in_bytes" if v1 else "memory.peak")),
            "oom_kills": events.get("oom_kill"),
        }

    def _open(self, parent: Path) -> None:
        assert self.group is not None and self.nbytes is not None and self._hierarchy is not None
        try:
            if self._hierarchy.version == 1:
                self.group.mkdir()
                _set(self.group / "memory.limit_in_bytes", self.nbytes)
                _set(self.group / "memory.swappiness", 0)
                memsw = self.group / "memory.memsw.limit_in_bytes"
                if memsw.exists():  # absent when the kernel does not account for swap
                    _set(memsw, self.nbytes)
            else:
                if "memory" not in cgroup.words(parent / "cgroup.subtree_control"):
                    _set(parent / "cgroup.subtree_control", "+memory")
                self.group.mkdir()
                _set(self.group / "memory.max", self.nbytes)
                if (self.group / "memory.swap.max").exists():
                    _set(self.group / "memory.swap.max", 0)
        except OSError as e:
            remove_group(self.group)
            what = f"cannot make a {self.method} memory budget: {e.strerror}"
            raise BenchError(what, where=e.filename or self.group) from e
        if (kept := self._hierarchy.limit(self.group)) is None or kept > self.nbytes:
            remove_group(self.group)
            raise BenchError(f"a limit of {self.nbytes} bytes reads back as {kept}", where=self.group)

    def _close(self) -> None:
        if self.method in ("systemd-system", "systemd-user"):
            scope = ["--user"] if self.method == "systemd-user" else []
            stop = ["systemctl", *scope, "stop", "--quiet", f"{self.name}.scope"]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the scope is normally gone with its process
                subprocess.run(stop, capture_output=True, check=False, timeout=30)
        elif self.group is not None and not remove_group(self.group):
            note(f"could not remove {self.group}; the next run will try again")


@contextlib.contextmanager
def memory_budget(
    nbytes: int | None, *, method: Method | None = None, root: Path = ROOT, proc: Path = PROC
) -> Iterator[Budget]:
    """A fresh group limited to `nbytes` with no swap, removed with all its processes at the end.

    Without a number, or where nothing can limit memory, `budget.method` is "none" and commands run as
    they are. Groups left by killed runs are removed first. Raises BenchError if a limit is refused.
    """
    method = method or detect(root=root, proc=proc)
    budget = Budget(nbytes, method, root=root, proc=proc)
    if budget.group is not None and method.parent is not None:
        sweep(method.parent, proc=proc)
        budget._open(method.parent)
    try:
        yield budget
    finally:
        budget._close()


def sweep(parent: Path, *, proc: Path = PROC) -> None:
    """Remove the groups of runs whose process is gone."""
    for group in parent.glob("moe-madv-*"):
        match = _GROUP.match(group.name)
        if match and not (proc / match[1]).exists():
            remove_group(group)


def remove_group(group: Path, *, attempts: int = 50) -> bool:
    """Kill what is left in a group and remove it; False when the kernel keeps it busy for 5 s."""
    for _ in range(attempts):
        for word in cgroup.words(group / "cgroup.procs"):
            # 0 stands for a process of another PID namespace; kill(0) would hit our own group.
            if int(word) > 0:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(word), signal.SIGKILL)
        with contextlib.suppress(OSError):
            # v1: drop cached pages now, or they stay charged to a group without a name.
            if (group / "memory.force_empty").exists():
                _set(group / "memory.force_empty", 0)
        try:
            group.rmdir()
        except FileNotFoundError:
            return True
        except OSError as e:
            if e.errno != errno.EBUSY:
                return False
            time.sleep(0.1)
        else:
            return True
    return False


def _set(path: Path, value: int | str) -> None:
    path.write_text(f"{value}\n", encoding="utf-8")


# --- Proof

_PROBE_LIMIT = 48 * MIB
_PROBE_TOUCH = 128 * MIB
_PROBE = "import sys; print('started', flush=True); b'\\1' * int(sys.argv[1]); print('survived', flush=True)"


def prove_enforced(method: Method, *, root: Path = ROOT, proc: Path = PROC) -> None:
    """Let a child touch 128 MiB under a limit of 48 MiB; raises BenchError unless the kernel kills it.

    Managers accept limits that nothing enforces: no delegation, hybrid hierarchies, swap left open.
    """
    if method.name == "none":
        raise BenchError(f"no memory limit is possible: {method.why}", hint="run without a memory budget")
    with memory_budget(_PROBE_LIMIT, method=method, root=root, proc=proc) as budget:
        argv = budget.command([sys.executable, "-I", "-S", "-c", _PROBE, str(_PROBE_TOUCH)])
        try:
            done = subprocess.run(argv, capture_output=True, encoding="utf-8", check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise BenchError(f"memory limit by {method.name} could not be tested: {e}") from e
    if "started" not in done.stdout:
        raise BenchError(
            f"no process can be started under a memory limit by {method.name}: {done.stderr.strip()}",
            hint="run without a memory budget; the row will say so",
        )
    if "survived" in done.stdout or done.returncode not in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise BenchError(
            f"limit accepted and not enforced by {method.name}: a child limited to {_PROBE_LIMIT // MIB} MiB "
            f"touched {_PROBE_TOUCH // MIB} MiB and ended with {done.returncode}",
            hint="run as root, or without a memory budget; the row will say so",
        )
