"""What this machine and the model's disk are, as far as they change a result."""

from __future__ import annotations

import mmap
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from toolkit.bench.disk import MEMORY_FILESYSTEMS, Storage, read, storage_of
from toolkit.console import GIB, MIB
from toolkit.errors import MachineError

_NETWORK_FILESYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "drvfs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs"}
)
# From here on one fault can read more than a typical expert matrix; Linux defaults to 128.
LARGE_READ_AHEAD_KB = 1024


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Stored once per machine and compared between rows; holds no host name and no user name."""

    name: str  # folder under results/
    cpu: str
    logical_cores: int
    usable_cores: int  # by CPU affinity
    memory_bytes: int
    swap_bytes: int
    memlock_bytes: int | None  # what may be locked in memory; None: all, or unknown
    os: str
    kernel: str
    page_size: int
    governor: str | None
    transparent_hugepages: str | None
    virtualization: tuple[str, ...]  # of "vm", "container", "wsl1", "wsl2"
    numa_nodes: int
    numa_policy: str | None
    storage: Storage


def facts(path: Path, *, root: Path = Path("/")) -> MachineFacts:
    """Facts of the machine and of the storage under `path`; `root` holds proc, sys and etc."""
    proc, sys_ = root / "proc", root / "sys"
    meminfo = dict(line.split(":", 1) for line in (read(proc / "meminfo") or "").splitlines() if ":" in line)
    memory = _kib(meminfo.get("MemTotal")) or int(psutil.virtual_memory().total)
    swap = _kib(meminfo.get("SwapTotal"))
    cpuinfo = read(proc / "cpuinfo") or ""
    cpu = _cpu_model(cpuinfo, root)
    cores = len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or os.cpu_count() or 1
    kernel = read(proc / "sys/kernel/osrelease") or platform.release()
    return MachineFacts(
        name=machine_name(cpu, cores, memory),
        cpu=cpu,
        logical_cores=cores,
        usable_cores=usable_cores(),
        memory_bytes=memory,
        swap_bytes=int(psutil.swap_memory().total) if swap is None else swap,
        memlock_bytes=_memlock(proc),
        os=_os_name(root),
        kernel=kernel,
        page_size=mmap.PAGESIZE,
        governor=governor(sys_),
        transparent_hugepages=_selected(read(sys_ / "kernel/mm/transparent_hugepage/enabled")),
        virtualization=_virtualization(root, cpuinfo, kernel),
        numa_nodes=len(list(sys_.glob("devices/system/node/node[0-9]*"))) or 1,
        numa_policy=_numa_policy(proc),
        storage=storage_of(path, root=root),
    )


# --- CPU, memory and system


def machine_name(cpu: str, cores: int, memory_bytes: int) -> str:
    """A folder name such as `xeon-2c-24g`; MOE_MADV_MACHINE replaces it."""
    if chosen := os.environ.get("MOE_MADV_MACHINE"):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", chosen):
            raise MachineError(
                f"MOE_MADV_MACHINE is not usable as a folder name: {chosen!r}",
                hint="use letters, digits, '-', '_' and '.', starting with a letter or digit",
            )
        return chosen
    text = re.sub(r"\((r|tm)\)|@.*|\b(with|w/).*", " ", cpu.lower())
    text = re.sub(r"\b(\d+th gen|\S+-cores?|intel|amd|cpu|processor)\b", " ", text)
    words = re.findall(r"[a-z0-9]+", text)[:5]
    return "-".join([*(words or ["cpu"]), f"{cores}c", f"{round(memory_bytes / GIB)}g"])


def _kib(text: str | None) -> int | None:
    return None if text is None else int(text.split()[0]) * 1024


def _selected(text: str | None) -> str | None:
    """The bracketed word of `always [madvise] never`."""
    match = re.search(r"\[(.+?)\]", text or "")
    return match[1] if match else None


def _cpu_model(cpuinfo: str, root: Path) -> str:
    if match := re.search(r"^(?:model name|cpu model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
        return match[1].strip()
    # arm64 prints no model name; boards say what they are in the device tree.
    board = read(root / "proc/device-tree/model")
    return board or platform.processor() or platform.machine() or "unknown"


def usable_core_numbers() -> set[int]:
    """Cores this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many these are."""
    return len(usable_core_numbers())


def _memlock(proc: Path) -> int | None:
    """RLIMIT_MEMLOCK, which a process with CAP_IPC_LOCK (number 14) may pass."""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", read(proc / "self/status") or "", re.MULTILINE)
    if sys.platform == "win32" or (capabilities and int(capabilities[1], 16) >> 14 & 1):
        return None
    import resource  # POSIX only

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _os_name(root: Path) -> str:
    match = re.search(r'^PRETTY_NAME="?(.*?)"?$', read(root / "etc/os-release") or "", re.MULTILINE)
    return match[1] if match else platform.platform(terse=True)


def governor(sys_: Path) -> str | None:
    """The governor of the cores' clocks; several are listed."""
    paths = sys_.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    return ", ".join(sorted({g for path in paths if (g := read(path))})) or None


@dataclass(frozen=True, kw_only=True)
class Power:
    """What limits the clock beside the governor; None where the system does not tell."""

    profile: str | None  # of the firmware: performance, balanced, low-power, ...
    profiles: tuple[str, ...]  # those that can be chosen
    on_battery: bool | None


def power(sys_: Path) -> Power:
    """As the firmware and the power supplies say."""
    firmware = sys_ / "firmware/acpi"
    supplies = list(sys_.glob("class/power_supply/*"))
    batteries = [
        read(s / "status") for s in supplies if read(s / "type") == "Battery" and read(s / "scope") != "Device"
    ]
    return Power(
        profile=read(firmware / "platform_profile"),
        profiles=tuple((read(firmware / "platform_profile_choices") or "").split()),
        on_battery="Discharging" in batteries if supplies else None,
    )


def _virtualization(root: Path, cpuinfo: str, kernel: str) -> tuple[str, ...]:
    found = []
    if "microsoft" in kernel.lower():
        found.append("wsl2" if "wsl2" in kernel.lower() else "wsl1")
    elif re.search(r"^flags\s*:.*\bhypervisor\b", cpuinfo, re.MULTILINE):
        found.append("vm")
    groups = read(root / "proc/1/cgroup") or ""
    marks = (root / ".dockerenv", root / "run/.containerenv")
    if any(m.exists() for m in marks) or re.search(r"docker|kubepods|containerd|lxc|libpod", groups):
        found.append("container")
    return tuple(found)


def _numa_policy(proc: Path) -> str | None:
    """The memory policy of this process, e.g. `default` or `interleave:0-1` (second word of a mapping)."""
    words = (read(proc / "self/numa_maps") or "").split(maxsplit=2)
    return words[1] if len(words) > 1 else None


# --- What it means for a result


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Something about this machine that changes a result."""

    topic: str  # what it is about: filesystem, disk, read-ahead, swap, numa, governor, ...
    text: str  # one plain sentence that says how


def warnings(facts: MachineFacts) -> list[str]:
    """One plain sentence per condition that changes a result, saying how."""
    return [condition.text for condition in conditions(facts)]


def conditions(facts: MachineFacts) -> list[Condition]:
    """Everything about the machine and the model's disk that changes a result; several may share a topic."""
    disk = facts.storage
    kind, device, virtual = disk.filesystem or "", disk.device or "", facts.virtualization
    found = [
        (
            "filesystem",
            kind in MEMORY_FILESYSTEMS,
            f"The model is on {kind}: its pages are memory, so no run can be cold and no disk is measured.",
        ),
        (
            "filesystem",
            kind in _NETWORK_FILESYSTEMS,
            f"The model is on {kind}, served by another system: its cache and the link decide the read "
            "times, and a cold run is cold on this side only.",
        ),
        (
            "filesystem",
            kind.startswith("fuse"),
            f"The model is on {kind}: each read passes a user process, which costs CPU time and may cache.",
        ),
        (
            "filesystem",
            kind == "overlay",
            "The model is on an overlay: the disk below it, and so its read-ahead, is not known here.",
        ),
        (
            "disk",
            disk.loop_on in MEMORY_FILESYSTEMS,
            f"{device} is a loop device on {disk.loop_on}: reads have the speed of memory, not of a disk.",
        ),
        (
            "disk",
            disk.loop_on not in (None, *MEMORY_FILESYSTEMS) and not disk.loop_direct_io,
            f"{device} is a loop device and its file may be cached: an evicted model can come from memory.",
        ),
        ("disk", device.startswith(("ram", "zram", "pmem")), f"{device} is memory: no disk is measured."),
        (
            "disk",
            bool(disk.rotational) and not virtual,  # virtual disks often call themselves rotating
            f"{device} is a rotating disk: seeks, not bytes, decide the decode time.",
        ),
        (
            "read-ahead",
            (disk.read_ahead_kb or 0) >= LARGE_READ_AHEAD_KB,
            f"Read-ahead is {disk.read_ahead_kb} KiB: a page fault of the stock arm reads up to that much, "
            "mostly of experts that were not selected; compare only rows with the same setting.",
        ),
        (
            "swap",
            facts.swap_bytes > 0,
            f"Swap is on ({facts.swap_bytes / GIB:.1f} GiB): memory without a budget can move there, "
            "and reading it back counts as disk time.",
        ),
        (
            "numa",
            facts.numa_nodes > 1,
            f"There are {facts.numa_nodes} memory nodes (policy {facts.numa_policy or 'unknown'}): a page "
            "stays on the node that read it first, so prefetching and earlier runs decide later speed; pin all "
            "arms alike with numactl.",
        ),
        (
            "governor",
            facts.governor not in (None, "performance"),
            f"The CPU governor is {facts.governor}: the clock follows the load, so short runs start slow.",
        ),
        (
            "cores",
            facts.usable_cores < facts.logical_cores,
            f"Only {facts.usable_cores} of {facts.logical_cores} cores may be used: more threads are slower.",
        ),
        (
            "lock-limit",
            facts.memlock_bytes is not None,
            f"At most {(facts.memlock_bytes or 0) / MIB:.2f} MiB can be locked (ulimit -l): an arm that locks "
            "more fails.",
        ),
        (
            "virtualization",
            bool({"wsl1", "wsl2"} & set(virtual)),
            "This is WSL: Windows may cache the disk, so a cold run is cold on the Linux side only.",
        ),
        (
            "virtualization",
            "vm" in virtual,
            "This is a virtual machine: the host may cache the disk and share the cores, so expect noise.",
        ),
        (
            "virtualization",
            "container" in virtual,
            "This is a container: its host's other work shares the disk, the page cache and the cores.",
        ),
    ]
    return [Condition(topic=topic, text=text) for topic, holds, text in found if holds]
