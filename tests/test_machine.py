from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from toolkit.bench.disk import Storage, mount_of, mounts, storage_of
from toolkit.bench.machine import MachineFacts, facts, machine_name, warnings
from toolkit.errors import MachineError

GIB = 1024**3


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n", encoding="utf-8")
    return root


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
30 27 253:0 / /srv rw,noatime - xfs /dev/mapper/vg-models rw,logbufs=8
31 27 0:50 / /data rw,relatime - btrfs /dev/nvme0n1p3 rw,compress=zstd:3,subvol=/data
32 27 0:44 / /mnt/nas rw,relatime - nfs4 nas:/export rw,vers=4.2,rsize=1048576,clientaddr=10.0.0.7,addr=10.0.0.1
33 27 0:45 / /mnt/c rw,noatime - 9p C:\\134 rw,cache=mmap,aname=drvfs
34 27 0:46 / /my\\040models rw - tmpfs tmpfs rw,size=1g
35 27 7:0 / /lab rw - ext4 /dev/loop0 rw
36 27 259:2 /home /stack rw - ext4 /dev/nvme0n1p2 rw
37 36 0:47 / /stack rw - tmpfs none rw
38 27 0:48 / /merged rw - overlay overlay rw,lowerdir=/layers/a,workdir=/layers/w
39 27 0:49 / /srv/ssh rw - fuse.sshfs me@host:/ rw,user_id=0
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An NVMe disk with three partitions, a dm device on two of them, a loop device on tmpfs."""
    root = tree(
        tmp_path,
        {
            "proc/self/mountinfo": MOUNTS.rstrip(),
            "proc/self/numa_maps": "55d506ec3000 interleave:0-1 file=/usr/bin/python3 mapped=2 N0=2",
            "proc/1/cgroup": "0::/kubepods/besteffort/pod1",
            "proc/sys/kernel/osrelease": "6.8.0-40-generic",
            "proc/meminfo": "MemTotal: 65871244 kB\nMemFree: 5 kB\nSwapTotal: 2097152 kB",
            "proc/cpuinfo": "\n\n".join(
                f"processor\t: {n}\nmodel name\t: AMD EPYC 7763 64-Core Processor\nflags\t\t: fpu hypervisor lm"
                for n in range(4)
            ),
            "etc/os-release": 'NAME="X"\nPRETTY_NAME="Some Linux 1.2 (Name)"\nID=x',
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "sys/devices/system/node/node0/cpulist": "0-1",
            "sys/devices/system/node/node1/cpulist": "2-3",
            "sys/devices/system/node/online": "0-1",
            "sys/devices/pci0/nvme0n1/size": 1000215216,
            "sys/devices/pci0/nvme0n1/device/model": "Fast SSD 512G  ",
            "sys/devices/pci0/nvme0n1/queue/read_ahead_kb": 128,
            "sys/devices/pci0/nvme0n1/queue/rotational": 0,
            "sys/devices/pci0/nvme0n1/queue/max_sectors_kb": 512,
            "sys/devices/pci0/nvme0n1/nvme0n1p2/partition": 2,
            "sys/devices/pci0/nvme0n1/nvme0n1p3/partition": 3,
            "sys/devices/pci1/sda/size": 7814037168,
            "sys/devices/pci1/sda/device/model": "Big Disk",
            "sys/devices/pci1/sda/queue/rotational": 1,
            "sys/devices/virtual/block/dm-0/size": 2097152,
            "sys/devices/virtual/block/dm-0/queue/read_ahead_kb": 4096,
            "sys/devices/virtual/block/dm-0/queue/rotational": 1,
            "sys/devices/virtual/block/dm-0/queue/max_sectors_kb": 256,
            "sys/devices/virtual/block/loop0/size": 2048,
            "sys/devices/virtual/block/loop0/loop/backing_file": "/my models/disk.img",
            "sys/devices/virtual/block/loop0/loop/dio": 0,
            "sys/class/bdi/0:44/read_ahead_kb": 15360,
            "sys/class/bdi/btrfs-1/read_ahead_kb": 4096,
        },
    )
    sys_ = root / "sys"
    link(sys_ / "dev/block/259:2", sys_ / "devices/pci0/nvme0n1/nvme0n1p2")
    link(sys_ / "dev/block/253:0", sys_ / "devices/virtual/block/dm-0")
    link(sys_ / "dev/block/7:0", sys_ / "devices/virtual/block/loop0")
    link(sys_ / "class/block/nvme0n1p3", sys_ / "devices/pci0/nvme0n1/nvme0n1p3")
    link(sys_ / "devices/virtual/block/dm-0/slaves/nvme0n1p3", sys_ / "devices/pci0/nvme0n1/nvme0n1p3")
    link(sys_ / "devices/virtual/block/dm-0/slaves/sda", sys_ / "devices/pci1/sda")
    return root


# --- mounts and disks


@pytest.mark.parametrize(
    ("path", "filesystem", "point"),
    [
        ("/models/model.gguf", "ext4", "/"),
        ("/srv/model.gguf", "xfs", "/srv"),
        ("/srv/ssh/model.gguf", "fuse.sshfs", "/srv/ssh"),
        ("/srvother/model.gguf", "ext4", "/"),
        ("/mnt/nas", "nfs4", "/mnt/nas"),
        ("/my models/a b.gguf", "tmpfs", "/my models"),
        ("/stack/m", "tmpfs", "/stack"),
    ],
)
def test_the_longest_and_last_mount_point_holds_the_path(root: Path, path: str, filesystem: str, point: str) -> None:
    found = mount_of(Path(path), proc=root / "proc")
    assert found is not None
    assert (found.filesystem, found.point) == (filesystem, point)


def test_escapes_in_mountinfo_are_undone(root: Path) -> None:
    sources = {m.point: m.source for m in mounts(root / "proc")}
    assert sources["/mnt/c"] == "C:\\"
    assert "/my models" in sources


def test_a_partition_reports_the_queue_of_its_disk(root: Path) -> None:
    assert storage_of(Path("/home/m.gguf"), root=root) == Storage(
        filesystem="ext4",
        mount_options="rw,relatime,errors=remount-ro",
        device="nvme0n1",
        parts=(),
        model="Fast SSD 512G",
        size_bytes=512_110_190_592,
        rotational=False,
        read_ahead_kb=128,
        max_sectors_kb=512,
        loop_on=None,
        loop_direct_io=None,
    )


def test_a_stack_reports_the_read_ahead_of_its_top_and_the_models_below(root: Path) -> None:
    found = storage_of(Path("/srv/m.gguf"), root=root)
    assert (found.device, found.parts) == ("dm-0", ("nvme0n1", "sda"))
    assert (found.read_ahead_kb, found.max_sectors_kb) == (4096, 256)
    assert found.model == "Fast SSD 512G + Big Disk"
    assert found.size_bytes == GIB


def test_file_systems_with_their_own_window_report_that(root: Path) -> None:
    btrfs = storage_of(Path("/data/m.gguf"), root=root)
    assert (btrfs.device, btrfs.read_ahead_kb) == ("nvme0n1", 4096)
    nfs = storage_of(Path("/mnt/nas/m.gguf"), root=root)
    assert (nfs.device, nfs.read_ahead_kb) == (None, 15360)
    tree(root, {"sys/class/bdi/btrfs-2/read_ahead_kb": 128})
    assert storage_of(Path("/data/m.gguf"), root=root).read_ahead_kb is None  # which of the two is unknown


def test_published_mount_options_name_nobody_and_no_place(root: Path) -> None:
    assert storage_of(Path("/mnt/nas/m"), root=root).mount_options == "rw,relatime,vers=4.2,rsize=1048576"
    assert storage_of(Path("/merged/m"), root=root).mount_options == "rw"


def test_a_loop_device_says_what_its_file_is_on(root: Path) -> None:
    found = storage_of(Path("/lab/m"), root=root)
    assert (found.device, found.loop_on, found.loop_direct_io) == ("loop0", "tmpfs", False)


def test_without_proc_and_sys_everything_is_unknown(tmp_path: Path) -> None:
    found = dataclasses.asdict(storage_of(Path("/m"), root=tmp_path))
    assert found.pop("parts") == ()
    assert set(found.values()) == {None}


# --- the machine


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        ("Intel(R) Xeon(R) Processor", "xeon-2c-24g"),
        ("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz", "xeon-e5-2680-v4-2c-24g"),
        ("12th Gen Intel(R) Core(TM) i7-12700K", "core-i7-12700k-2c-24g"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "ryzen-9-7950x-2c-24g"),
        ("AMD Ryzen 7 PRO 7840U w/ Radeon 780M Graphics", "ryzen-7-pro-7840u-2c-24g"),
        ("Apple M2 Max", "apple-m2-max-2c-24g"),
        ("", "cpu-2c-24g"),
    ],
)
def test_machine_names(cpu: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_MADV_MACHINE", raising=False)
    assert machine_name(cpu, 2, 25_276_510_208) == name


def test_the_name_can_be_chosen_but_must_be_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_MADV_MACHINE", "lab-box.2")
    assert machine_name("any", 1, GIB) == "lab-box.2"
    for bad in ("../x", "a/b", "my box", ".hidden"):
        monkeypatch.setenv("MOE_MADV_MACHINE", bad)
        with pytest.raises(MachineError, match="MOE_MADV_MACHINE"):
            machine_name("any", 1, GIB)


def test_facts_of_a_fake_machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_MADV_MACHINE", raising=False)
    found = facts(Path("/srv/m.gguf"), root=root)
    assert found.name == "epyc-7763-4c-63g"  # 65871244 KiB are 62.8 GiB
    assert (found.cpu, found.logical_cores) == ("AMD EPYC 7763 64-Core Processor", 4)
    assert (found.memory_bytes, found.swap_bytes) == (67_452_153_856, 2_147_483_648)
    assert (found.os, found.kernel) == ("Some Linux 1.2 (Name)", "6.8.0-40-generic")
    assert found.governor == "performance, powersave"
    assert found.transparent_hugepages == "madvise"
    assert found.virtualization == ("vm", "container")
    assert (found.numa_nodes, found.numa_policy) == (2, "interleave:0-1")
    assert found.storage.device == "dm-0"


def test_an_arm_board_is_named_by_its_device_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_MADV_MACHINE", raising=False)
    root = tree(
        tmp_path,
        {"proc/cpuinfo": "processor : 0\nprocessor : 1\nBogoMIPS : 108", "proc/meminfo": "MemTotal: 8388608 kB"},
    )
    (root / "proc/device-tree").mkdir()
    (root / "proc/device-tree/model").write_bytes(b"Small Board 5\0")
    assert facts(Path("/m"), root=root).name == "small-board-5-2c-8g"


@pytest.mark.skipif(sys.platform != "linux", reason="lock limits and capabilities of Linux")
def test_the_lock_limit_counts_only_without_the_capability(tmp_path: Path) -> None:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    plain = tree(tmp_path / "a", {"proc/self/status": "Name:\tx\nCapEff:\t0000000000000000"})
    able = tree(tmp_path / "b", {"proc/self/status": "Name:\tx\nCapEff:\t0000000000004000"})
    assert facts(Path("/m"), root=plain).memlock_bytes == (None if limit == resource.RLIM_INFINITY else limit)
    assert facts(Path("/m"), root=able).memlock_bytes is None


@pytest.mark.parametrize(
    ("release", "expected"),
    [("5.15.90.1-microsoft-standard-WSL2", ("wsl2",)), ("4.4.0-19041-Microsoft", ("wsl1",)), ("6.1.0", ())],
)
def test_wsl_is_told_by_its_kernel(tmp_path: Path, release: str, expected: tuple[str, ...]) -> None:
    root = tree(tmp_path, {"proc/sys/kernel/osrelease": release, "proc/cpuinfo": "processor : 0"})
    assert facts(Path("/m"), root=root).virtualization == expected


def test_facts_of_this_machine_are_json(tmp_path: Path) -> None:
    found = facts(tmp_path / "not written yet.gguf")
    stored = json.loads(json.dumps(dataclasses.asdict(found)))
    assert stored["logical_cores"] >= 1
    assert stored["memory_bytes"] > 0
    assert stored["page_size"] in (4096, 16384, 65536)
    if sys.platform == "linux":
        assert stored["storage"]["filesystem"]
        assert stored["kernel"] == os.uname().release
    assert all(sentence.endswith(".") for sentence in warnings(found))


# --- warnings

QUIET = MachineFacts(
    name="x",
    cpu="x",
    logical_cores=8,
    usable_cores=8,
    memory_bytes=64 * GIB,
    swap_bytes=0,
    memlock_bytes=None,
    os="x",
    kernel="x",
    page_size=4096,
    governor="performance",
    transparent_hugepages="madvise",
    virtualization=(),
    numa_nodes=1,
    numa_policy="default",
    storage=Storage(
        filesystem="ext4",
        mount_options="rw",
        device="nvme0n1",
        parts=(),
        model="x",
        size_bytes=10**12,
        rotational=False,
        read_ahead_kb=128,
        max_sectors_kb=512,
        loop_on=None,
        loop_direct_io=None,
    ),
)


def test_a_quiet_machine_has_nothing_to_warn_of() -> None:
    assert warnings(QUIET) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"filesystem": "tmpfs", "device": None, "read_ahead_kb": None}, "no run can be cold"),
        ({"filesystem": "nfs4"}, "served by another system"),
        ({"filesystem": "9p"}, "served by another system"),
        ({"filesystem": "cifs"}, "served by another system"),
        ({"filesystem": "fuse.sshfs"}, "user process"),
        ({"filesystem": "overlay"}, "overlay"),
        ({"loop_on": "tmpfs", "loop_direct_io": False}, "speed of memory"),
        ({"loop_on": "ext4", "loop_direct_io": False}, "may be cached"),
        ({"device": "zram0"}, "is memory"),
        ({"rotational": True}, "rotating disk"),
        ({"read_ahead_kb": 8192}, "Read-ahead is 8192 KiB"),
    ],
)
def test_each_kind_of_storage_is_told_by_one_sentence(change: dict[str, object], words: str) -> None:
    storage = dataclasses.replace(QUIET.storage, **change)  # type: ignore[arg-type]
    (sentence,) = warnings(dataclasses.replace(QUIET, storage=storage))
    assert words in sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"swap_bytes": 2 * GIB}, "Swap is on (2.0 GiB)"),
        ({"numa_nodes": 2}, "2 memory nodes (policy default)"),
        ({"governor": "powersave"}, "governor is powersave"),
        ({"usable_cores": 4}, "Only 4 of 8 cores"),
        ({"memlock_bytes": 65536}, "At most 0.06 MiB can be locked"),
        ({"virtualization": ("vm",)}, "virtual machine"),
        ({"virtualization": ("wsl2",)}, "WSL"),
        ({"virtualization": ("container",)}, "container"),
    ],
)
def test_each_condition_of_the_machine_is_told_by_one_sentence(change: dict[str, object], words: str) -> None:
    (sentence,) = warnings(dataclasses.replace(QUIET, **change))  # type: ignore[arg-type]
    assert words in sentence


def test_a_direct_loop_and_a_virtual_rotating_disk_are_no_news() -> None:
    loop = dataclasses.replace(QUIET.storage, loop_on="ext4", loop_direct_io=True)
    assert warnings(dataclasses.replace(QUIET, storage=loop)) == []
    virtual = dataclasses.replace(QUIET.storage, rotational=True)
    (sentence,) = warnings(dataclasses.replace(QUIET, storage=virtual, virtualization=("vm",)))
    assert "rotating" not in sentence
