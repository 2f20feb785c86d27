"""A real stall: one layer's experts on a device that is throttled to a crawl."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from click.testing import CliRunner
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from toolkit import results
from toolkit.bench import header, lab, machine, stalls
from toolkit.bench.plan import Conditions
from toolkit.bench.run import run
from toolkit.bench.select import arms_by_name
from toolkit.bench.stalls import Cause
from toolkit.bench.tokens import prescribed
from toolkit.cli import cli
from toolkit.config import patches_dir
from toolkit.console import MIB
from toolkit.errors import MachineError
from toolkit.model.layout import read_model
from toolkit.model.synth import prescription
from toolkit.patch.series import load_series
from toolkit.patch.upstream import load_pin

pytestmark = pytest.mark.build

SLOW = 2  # the layer on the throttled device
NAME = f"blk.{SLOW}.ffn_gate_exps.weight"
RATE = 200_000  # bytes per second; one expert of the layer has 110 KB


@contextlib.contextmanager
def throttled(folder: Path, bytes_per_second: int) -> Iterator[None]:
    """Reads of this process and its children from the folder's device, held to a rate by the blkio controller."""
    group = Path("/sys/fs/cgroup/blkio")
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(","):
            group /= path.lstrip("/")
    setting = group / "blkio.throttle.read_bps_device"
    if not os.access(setting, os.W_OK):
        pytest.skip("no blkio controller of version 1 to throttle a device with")
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    setting.write_text(f"{device} {bytes_per_second}\n", encoding="utf-8")
    try:
        yield
    finally:
        setting.write_text(f"{device} 0\n", encoding="utf-8")


def _shard(reader: GGUFReader, path: Path, number: int, wanted: Sequence[str], *, keys: bool) -> None:
    """Some tensors of a model as shard `number` of two; the first one carries all keys."""
    writer = GGUFWriter(path, "qwen3moe")
    for field in reader.fields.values() if keys else ():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", 2)
    writer.add_int32("split.tensors.count", len(reader.tensors))
    for tensor in reader.tensors:
        if tensor.name in wanted:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=gguf.GGMLQuantizationType(tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with path.open("rb") as f:
        os.fsync(f.fileno())


@pytest.fixture
def on_two_disks(tiny: Path, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The model `tiny` in two shards, and the folder on the lab's disk that holds the experts of layer SLOW."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs root and Linux")
    reader = GGUFReader(tiny)
    names = [tensor.name for tensor in reader.tensors]
    slow = [name for name in names if name.startswith(f"blk.{SLOW}.") and "_exps" in name]
    first, second = (tmp_path / f"two-{n:05d}-of-00002.gguf" for n in (1, 2))
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(lab.fast_disk(4 * MIB, read_ahead_kb=128))
        except MachineError as e:
            pytest.skip(str(e))
        _shard(reader, first, 0, [name for name in names if name not in slow], keys=True)
        _shard(reader, disk / second.name, 1, slow, keys=False)
        second.symlink_to(disk / second.name)
        yield first, disk


def test_a_layer_on_a_crawling_disk_is_a_storage_stall_with_its_name(
    on_two_disks: tuple[Path, Path], both_wheels: Path, tmp_path: Path
) -> None:
    model, disk = on_two_disks
    out = tmp_path / "run.jsonl"
    pin, series = load_pin(), load_series(patches_dir())
    # the model fits in memory: it must neither be read at the load nor do without the cache
    arms = [
        replace(arm, env=arm.env | {"MOE_MADV_LOAD": "off", "MOE_MADV_CACHE_MIB": "4"})
        for arm in arms_by_name(["hint", "cache"], pin, series, both_wheels)
    ]
    layout, tokens = read_model(model), prescribed(prescription(model), 24, 4)
    conditions = Conditions(blocks=1, n_batch=512, n_ubatch=512, cold=True, n_threads=2, timeline=True)
    facts = machine.facts(model)
    head = header.make(layout, arms, tokens, conditions, facts, pin=pin.commit, series=series.digest)
    with throttled(disk, RATE):
        run(layout, arms, tokens, conditions, out, head)

    (found,) = results.read([out])
    assert {row["status"] for row in found.samples} == {"ok"}
    for arm in ("hint", "cache"):
        (row,) = (row for row in found.samples if (row["arm"], row["test"]) == (arm, "pp24"))
        (stall,) = (stall for stall in stalls.find([row]) if stall.what == "layer")
        assert (stall.index, stall.layer, stall.cause) == (SLOW, NAME, Cause.STORAGE), stall
        assert {len(column) for column in row["token_counters"].values()} == {1}
        assert stall.ms >= 1000 * row["timeline"][SLOW]["bytes"] / RATE / 2

    shown = CliRunner().invoke(cli, ["bench", "stalls", str(out), "--json"], catch_exceptions=False)
    told = {(s["arm"], s["test"], s["layer"], s["cause"]) for s in json.loads(shown.stdout)["stalls"]}
    assert told >= {(arm, "pp24", NAME, "storage") for arm in ("hint", "cache")}
