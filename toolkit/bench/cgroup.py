"""Where the memory controller of this machine lives, and what its groups say. Reads only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")

# v1 writes "no limit" as LONG_MAX rounded down to a page; no machine has an exbibyte.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """Where the memory controller lives; on hybrid systems a v2 tree may exist without it."""

    version: Literal[1, 2]
    mount: Path

    @classmethod
    def find(cls, root: Path) -> Hierarchy | None:
        """The hierarchy under the cgroup mount `root`, or None where memory is not controlled."""
        if (root / "memory/memory.limit_in_bytes").exists():
            return cls(version=1, mount=root / "memory")
        for mount in (root, root / "unified"):
            if "memory" in words(mount / "cgroup.controllers") or (mount / "memory.max").exists():
                return cls(version=2, mount=mount)
        return None

    def path_of(self, pid: int | str, proc: Path) -> list[Path]:
        """The groups that hold a process, innermost first, up to the mount.

        Without a cgroup namespace a container reads host paths that do not exist under its mount;
        those are left out, and the mount itself is then the container's group.
        """
        for line in (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            mine = "memory" in controllers.split(",") if self.version == 1 else controllers == ""
            if mine and ".." not in name.split("/"):
                group = self.mount / name.strip("/")
                chain = [group, *group.parents]
                return [g for g in chain[: chain.index(self.mount) + 1] if g.is_dir()]
        return [self.mount]

    def limit(self, group: Path) -> int | None:
        """Bytes at which the kernel starts to reclaim from this group alone; None: no limit."""
        names = ("memory.limit_in_bytes",) if self.version == 1 else ("memory.max", "memory.high")
        return smallest(number(group / name) for name in names)

    def swap_limit(self, group: Path) -> int | None:
        """Bytes of swap this group may use beside its memory; None: no limit."""
        if self.version == 2:
            return number(group / "memory.swap.max")
        both, memory = number(group / "memory.memsw.limit_in_bytes"), self.limit(group)
        return None if both is None else both - (memory or 0)

    def unreclaimable(self, group: Path) -> int | None:
        """Bytes in use that are not clean file cache; cache can be dropped, so it is no less available."""
        used = number(group / ("memory.usage_in_bytes" if self.version == 1 else "memory.current"))
        if used is None:
            return None
        values = stat(group)
        names = ("inactive_file", "active_file", "dirty" if self.version == 1 else "file_dirty")
        # The total_ fields of v1 include the groups below, as its usage does.
        inactive, active, dirty = (values.get(f"total_{n}", values.get(n, 0)) for n in names)
        return max(0, used - max(0, inactive + active - dirty))


def read_text(path: Path) -> str:
    """The text of a file; empty when it is missing or may not be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def words(path: Path) -> list[str]:
    return read_text(path).split()


def number(path: Path) -> int | None:
    """The value of a limit or usage file; None when it is missing or says "no limit"."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None


def stat(group: Path, file: str = "memory.stat") -> dict[str, int]:
    """A file of `name number` lines."""
    rows = (line.split() for line in read_text(group / file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def smallest(values: Iterable[int | None]) -> int | None:
    return min((v for v in values if v is not None), default=None)
