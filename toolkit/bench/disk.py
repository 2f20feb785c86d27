"""The file system and block device under a path, as the kernel describes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_PRIVATE_OPTIONS = frozenset(
    {"addr", "aname", "clientaddr", "domain", "mountaddr", "name", "prefixpath", "source", "subvol", "unc"}
    | {"user", "username", "lowerdir", "upperdir", "workdir"}
)


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of mountinfo: where a file system is mounted, and from what."""

    point: str
    device: str  # major:minor of the superblock; 0:N where no block device is behind it
    filesystem: str
    source: str
    options: str


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The file system and block device under a path; None where the system does not tell."""

    filesystem: str | None
    mount_options: str | None
    device: str | None  # kernel name of the whole device that the file system sits on: nvme0n1, dm-0
    parts: tuple[str, ...]  # physical devices below a dm, md or multi-disk stack
    model: str | None
    size_bytes: int | None
    rotational: bool | None
    read_ahead_kb: int | None  # as the kernel applies it to this file system
    max_sectors_kb: int | None
    loop_on: str | None  # for a loop device: the file system that holds its file
    loop_direct_io: bool | None  # whether its reads bypass the page cache


def read(path: Path) -> str | None:
    """The text of a proc or sys file; None when it is missing or may not be read."""
    try:
        # Firmware strings end in NUL bytes.
        return path.read_text(encoding="utf-8", errors="replace").strip("\0 \n\t")
    except OSError:
        return None


def integer(path: Path) -> int | None:
    """The non-negative number in a proc or sys file; None when there is none."""
    text = read(path)
    return int(text) if text and text.isdecimal() else None


def mounts(proc: Path = Path("/proc")) -> list[Mount]:
    """All mounts this process sees, in the order of mountinfo; empty where there is none."""
    found = []
    for line in (read(proc / "self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        _, _, device, _, point, options, *_ = left.split()
        filesystem, source, superblock = (*right.split(" "), "")[:3]
        found.append(
            Mount(
                point=_unescape(point),
                device=device,
                filesystem=filesystem,
                source=_unescape(source),
                options=f"{options},{superblock}" if superblock else options,
            )
        )
    return found


def _unescape(text: str) -> str:
    """mountinfo writes space, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def mount_of(path: Path, *, proc: Path = Path("/proc")) -> Mount | None:
    """The mount that holds a path: the longest mount point above it, of stacked ones the last."""
    real = path.resolve()
    above = {str(p) for p in (real, *real.parents)}
    holding = [m for m in mounts(proc) if m.point in above]
    return max(reversed(holding), key=lambda m: len(m.point), default=None)


def storage_of(path: Path, *, root: Path = Path("/")) -> Storage:
    """The file system and device under a path that may not exist yet."""
    mount = mount_of(path, proc=root / "proc")
    disk = None if mount is None else _disk(mount, root)
    parts = _leaves(disk) if disk else []
    models = [model for part in parts if (model := read(part / "device/model"))]

    def queue(name: str) -> int | None:
        return None if disk is None else integer(disk / name)

    sectors = queue("size")  # sysfs counts 512-byte sectors on every disk
    backing = None if disk is None else read(disk / "loop/backing_file")
    below = mount_of(Path(backing), proc=root / "proc") if backing else None
    window = _read_ahead_file(mount, disk, root / "sys") if mount else None
    return Storage(
        filesystem=mount.filesystem if mount else None,
        mount_options=_public(mount.options) if mount else None,
        device=disk.name if disk else None,
        parts=tuple(part.name for part in parts if part != disk),
        model=" + ".join(models) or None,
        size_bytes=None if sectors is None else sectors * 512,
        rotational=_flag(queue("queue/rotational")),
        read_ahead_kb=integer(window) if window else None,
        max_sectors_kb=queue("queue/max_sectors_kb"),
        loop_on=below.filesystem if below else None,
        loop_direct_io=_flag(queue("loop/dio")),
    )


def _flag(number: int | None) -> bool | None:
    return None if number is None else bool(number)


def _public(options: str) -> str:
    """Mount options without those that tell who or where: results are published."""
    kept = (option for option in options.split(",") if option.partition("=")[0] not in _PRIVATE_OPTIONS)
    return ",".join(dict.fromkeys(kept))


def _disk(mount: Mount, root: Path) -> Path | None:
    """The sysfs folder of the whole device that a file system sits on."""
    entry = root / "sys/dev/block" / mount.device
    if not entry.exists():
        # btrfs and others number their superblocks 0:N; the source still names a device. It may be a
        # link such as /dev/mapper/x -> ../dm-0, and sysfs knows the kernel's name only.
        entry = root / "sys/class/block" / (root / mount.source.lstrip("/")).resolve().name
        if not mount.source.startswith("/dev/") or not entry.exists():
            return None
    entry = entry.resolve()
    return entry.parent if (entry / "partition").exists() else entry


def _leaves(disk: Path) -> list[Path]:
    """The devices at the bottom of a dm or md stack; a plain disk is its own."""
    below = []
    for slave in sorted(disk.glob("slaves/*")):
        real = slave.resolve()
        below += _leaves(real.parent if (real / "partition").exists() else real)
    return list(dict.fromkeys(below)) or [disk]


def read_ahead_file(path: Path, *, root: Path = Path("/")) -> Path | None:
    """The sysfs file that holds the read-ahead window of the file system under a path; None: not known."""
    mount = mount_of(path, proc=root / "proc")
    return None if mount is None else _read_ahead_file(mount, _disk(mount, root), root / "sys")


def _read_ahead_file(mount: Mount, disk: Path | None, sys_: Path) -> Path | None:
    """The window of the superblock's own bdi. A stack uses its top device's, whatever lies below.

    NFS, FUSE and the like own a bdi under their 0:N number. btrfs owns one per file system, named by
    count: it is only known when there is a single one.
    """
    bdi = sys_ / "class/bdi"
    if mount.filesystem == "btrfs":
        own = list(bdi.glob("btrfs-*"))
        return own[0] / "read_ahead_kb" if len(own) == 1 else None
    own_number = bdi / mount.device / "read_ahead_kb"
    if disk is None or integer(own_number) is not None:
        return own_number if own_number.exists() else None
    return disk / "queue/read_ahead_kb"


def bytes_read(device: str, *, root: Path = Path("/")) -> int | None:
    """Bytes that everybody together has read from a block device so far; None where sysfs has no count."""
    words = (read(root / "sys/class/block" / device / "stat") or "").split()
    return int(words[2]) * 512 if len(words) > 2 else None  # the third field counts 512-byte sectors


def temperature_c(storage: Storage, *, root: Path = Path("/")) -> float | None:
    """Degrees of the hottest device under a file system, as its own sensor says; None without one."""
    found = []
    for name in storage.parts or (storage.device or "none",):
        device = root / "sys/class/block" / name / "device"
        # NVMe controllers hold their sensor themselves, SATA disks (drivetemp) one level below.
        for sensor in (*device.glob("hwmon*/temp1_input"), *device.glob("hwmon/hwmon*/temp1_input")):
            milli_c = integer(sensor)
            found += [] if milli_c is None else [milli_c / 1000]
    return max(found, default=None)
