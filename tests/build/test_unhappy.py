"""The runtime where things go wrong or come at once: what is computed is what the unpatched build computes."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from probe import CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_IPC_LOCK, probe
from test_stall_lab import _shard

from toolkit.bench import lab
from toolkit.bench.pagecache import evict
from toolkit.bench.plan import STOCK, Arm
from toolkit.bench.select import arms_by_name
from toolkit.config import patches_dir
from toolkit.console import MIB
from toolkit.errors import CommandError, MachineError
from toolkit.model.layout import Access, read_model
from toolkit.model.synth import prescription
from toolkit.patch.series import load_series
from toolkit.patch.upstream import load_pin
from toolkit.process import run

pytestmark = pytest.mark.build

AHEAD = ("hint", "overlap", "cache")
# as for a model larger than memory: not read at the load, and more experts than the cache or the page cache may hold
LARGE = {"MOE_MADV_LOAD": "off", "MOE_MADV_CACHE_MIB": "2"}
PROMPT, TOKENS = 20, 6  # in two batches, the second one smaller


@pytest.fixture(scope="module")
def arms(both_wheels: Path) -> Mapping[str, Arm]:
    names = [STOCK, "off", *AHEAD]
    found = arms_by_name(names, load_pin(), load_series(patches_dir()), both_wheels)
    return dict(zip(names, found, strict=True))


def tokens_of(model: Path) -> dict[str, Any]:
    tokens = prescription(model).tokens
    return {"prompt": list(tokens[:PROMPT]), "tokens": list(tokens[PROMPT : PROMPT + TOKENS])}


def ask(arm: Arm, scenario: str, model: Path, env: dict[str, str] | None = None, **job: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"model": str(model), "n_threads": 1, **tokens_of(model), **job}
    return probe(arm, scenario, LARGE | (env or {}), **settings)


@pytest.fixture(scope="module")
def expected(arms: Mapping[str, Arm], tiny: Path, tiny_shared: Path) -> tuple[str, str]:
    """What the unpatched build computes alone of the tokens of `tiny`: with `tiny`, and with `tiny_shared`."""
    pairs = [ask(arms[STOCK], "alone", path, **tokens_of(tiny))["logits"] for path in (tiny, tiny_shared)]
    assert all(first == second for first, second in pairs)
    assert pairs[0] != pairs[1]
    return pairs[0][0], pairs[1][0]


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("mode", AHEAD)
def test_contexts_of_two_models_compute_at_the_same_time(
    mode: str, n_threads: int, arms: Mapping[str, Arm], tiny: Path, tiny_shared: Path, expected: tuple[str, str]
) -> None:
    found = ask(arms[mode], "together", tiny, other=str(tiny_shared), rounds=2, n_threads=n_threads)
    assert found["logits"] == [[expected[0]] * 2, [expected[0]] * 2, [expected[1]] * 2]
    counters = found["counters"]
    # two batches and TOKENS tokens, four layers, two rounds, three contexts
    assert counters["groups"] == (2 + TOKENS) * 4 * 2 * 3
    assert counters["errors"] == counters["unmapped"] == counters["ids_ignored"] == 0
    assert counters["evicted" if mode == "cache" else "bytes_dropped"] > 0


def test_the_mode_changes_while_contexts_compute(
    arms: Mapping[str, Arm], tiny: Path, tiny_shared: Path, expected: tuple[str, str]
) -> None:
    switch = ["hint", "cache", "off", "overlap", "cache", "madv"]
    found = ask(arms["cache"], "together", tiny, other=str(tiny_shared), rounds=4, switch=switch)
    assert found["logits"] == [[expected[0]] * 4, [expected[0]] * 4, [expected[1]] * 4]
    assert found["counters"]["errors"] == 0


@pytest.mark.parametrize("mode", ["overlap", "cache"])
def test_models_go_with_reads_queued_and_others_come(
    mode: str, arms: Mapping[str, Arm], tiny: Path, tiny_shared: Path, expected: tuple[str, str]
) -> None:
    # every batch counts as wide, so that the next layer is always queued
    found = ask(arms[mode], "reloaded", tiny, {"MOE_MADV_WIDE": "1"}, other=str(tiny_shared), rounds=3, n_nodes=20)
    assert found["returned"] == [2] * 6
    assert found["logits"] == list(expected)
    counters = found["counters"]
    assert counters["mappings"] == 2 * 3 + 2
    assert counters["errors"] == counters["unmapped"] == 0
    if mode == "cache":
        assert counters["experts_ahead"] > 0


@pytest.mark.parametrize("mode", AHEAD)
def test_a_decode_that_was_given_up_leaves_nothing_behind(
    mode: str, arms: Mapping[str, Arm], tiny: Path, expected: tuple[str, str]
) -> None:
    n_nodes = [3, 23, 47, 60, 95]  # of about 120: before, inside and after the experts of several layers
    found = ask(arms[mode], "resumed", tiny, n_nodes=n_nodes, n_threads=2)
    assert found["returned"] == [2] * len(n_nodes)
    assert found["logits"] == [expected[0]] * (1 + len(n_nodes))
    assert found["counters"]["errors"] == 0


@pytest.mark.parametrize("mode", AHEAD)
def test_a_graph_that_is_used_again_is_announced_again(
    mode: str, arms: Mapping[str, Arm], tiny: Path, expected: tuple[str, str]
) -> None:
    again = ask(arms[mode], "alone", tiny)
    never = ask(arms[mode], "alone", tiny, {"LLAMA_GRAPH_REUSE_DISABLE": "1"})
    assert again["n_reused"] > 0 == never["n_reused"]
    for found in (again, never):
        assert found["logits"] == [expected[0]] * 2
        assert found["counters"]["groups"] == (2 + TOKENS) * 4 * 2
        assert found["warnings"] == []


@pytest.fixture(scope="module")
def split(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` in two files: what each layer has of `down` is in the second one."""
    reader, folder = GGUFReader(tiny), tmp_path_factory.mktemp("split")
    names = [tensor.name for tensor in reader.tensors]
    down = [name for name in names if "ffn_down_exps" in name]
    assert len(down) == 4
    first, second = (folder / f"split-{n:05d}-of-00002.gguf" for n in (1, 2))
    _shard(reader, first, 0, [name for name in names if name not in down], keys=True)
    _shard(reader, second, 1, down, keys=False)
    return first


@pytest.mark.parametrize("mode", AHEAD)
def test_experts_in_two_files(
    mode: str, arms: Mapping[str, Arm], split: Path, tiny: Path, expected: tuple[str, str]
) -> None:
    found = ask(arms[mode], "alone", split, **tokens_of(tiny), n_threads=2)
    assert found["logits"] == [expected[0]] * 2
    assert found["warnings"] == []
    counters = found["counters"]
    assert counters["mappings"] == 2
    assert counters["errors"] == counters["unmapped"] == 0
    assert counters["evicted" if mode == "cache" else "bytes_dropped"] > 0
    if mode == "cache":
        assert counters["reads"] + counters["bytes_copied"] > 0  # the file may be in memory


@contextlib.contextmanager
def mounted(kind: str) -> Iterator[Path]:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs root and Linux")
    with tempfile.TemporaryDirectory(prefix="moe-madv-") as folder:
        try:
            run(["mount", "-t", kind, "moe-madv-test", folder])
        except CommandError as e:
            pytest.skip(str(e))
        try:
            yield Path(folder)
        finally:
            run(["umount", "--lazy", folder])


@pytest.mark.parametrize("kind", ["ramfs", "tmpfs"])
def test_a_file_system_in_memory(kind: str, arms: Mapping[str, Arm], tiny: Path, expected: tuple[str, str]) -> None:
    """Its files are in memory already: a cache would hold them twice, so it says so once and overlaps."""
    with mounted(kind) as folder:
        model = Path(shutil.copyfile(tiny, folder / "tiny.gguf"))
        found = ask(arms["cache"], "alone", model)
    assert found["logits"] == [expected[0]] * 2
    counters = found["counters"]
    assert counters["groups"] == (2 + TOKENS) * 4 * 2
    assert counters["errors"] == counters["unmapped"] == 0
    assert counters["reads"] == counters["experts_missed"] == 0
    assert found["warnings"] == [
        "ggml_moe_prefetch: blk.0.ffn_gate_exps.weight cannot be cached: Operation not supported; "
        "such layers run as in mode overlap"
    ]


@pytest.mark.parametrize("mode", ["off", *AHEAD])
def test_a_model_that_is_not_mapped_is_left_alone(
    mode: str, arms: Mapping[str, Arm], tiny: Path, expected: tuple[str, str]
) -> None:
    found = ask(arms[mode], "alone", tiny, load_mode=0)
    assert found["logits"] == [expected[0]] * 2
    counters = found["counters"]
    # nothing is asked of the kernel, and why is counted
    asked = ("mappings", "slices", "calls", "bytes_hinted", "bytes_locked", "reads", "bytes_read", "errors")
    assert {name: counters[name] for name in asked} == dict.fromkeys(asked, 0)
    assert (counters["unmapped"] > 0) == (mode != "off")
    assert (counters["groups"] > 0) == (mode != "off")
    assert len(found["warnings"]) == (mode == "cache")
    if mode == "cache":
        assert "it is not mapped from a file" in found["warnings"][0]


@pytest.mark.parametrize("limit", [256 * 1024, 0])
@pytest.mark.parametrize("mode", ["overlap", "cache"])
def test_a_lock_limit_that_is_too_low_is_said_once_and_the_rest_goes_on(
    mode: str, limit: int, arms: Mapping[str, Arm], tiny: Path, expected: tuple[str, str]
) -> None:
    if sys.platform != "linux":
        pytest.skip("needs Linux")
    assert (read_model(tiny).nbytes(Access.ALWAYS_USED) or 0) > limit
    found = ask(arms[mode], "alone", tiny, {"MOE_MADV_LOCK_MIB": "64"}, lock_limit=limit, without=[CAP_IPC_LOCK])
    assert found["logits"] == [expected[0]] * 2
    (warning,) = found["warnings"]
    why = "Cannot allocate memory" if limit else "Operation not permitted"
    assert f"of always used weights, then: {why}; raise the limit with `ulimit -l unlimited`" in warning
    counters = found["counters"]
    assert counters["errors"] == 1
    # pages that neighbours share count once for the kernel and twice here
    assert (counters["bytes_locked"] > 0) == (limit > 0)
    assert counters["bytes_locked"] <= 2 * limit
    assert (counters["reads"] + counters["bytes_copied"] > 0) == (mode == "cache")


def test_a_root_without_rights_is_not_told_which_pages_are_resident(arms: Mapping[str, Arm], tiny: Path) -> None:
    """As in a container without capabilities: mincore calls every page of another user's file resident."""
    try:
        with lab.fast_disk(16 * MIB, read_ahead_kb=128) as disk:
            model = Path(shutil.copyfile(tiny, disk / "tiny.gguf"))
            os.chown(model, 65534, 65534)
            model.chmod(0o644)
            found = {}
            for without in ((), (CAP_DAC_OVERRIDE, CAP_FOWNER)):
                assert evict([model]).cold
                found[without] = ask(arms["hint"], "alone", model, without=without)["counters"]
    except MachineError as e:
        pytest.skip(str(e))
    told, untold = found.values()
    assert told["calls"] > 0
    # who is not told asks for everything
    assert untold["bytes_resident"] == 0
    assert untold["calls"] >= told["calls"]


def test_a_model_goes_while_its_next_selection_is_foreseen(
    arms: Mapping[str, Arm], tiny: Path, tiny_shared: Path
) -> None:
    """Given up in the first layer and freed at once; what the allocator gets back is overwritten."""
    settings = {"MALLOC_PERTURB_": "165"}
    single = {"prompt": tokens_of(tiny)["prompt"][:1]}
    found = ask(arms["cache"], "reloaded", tiny, settings, other=str(tiny_shared), rounds=10, n_nodes=4, **single)
    assert found["counters"]["errors"] == 0
    assert len(found["logits"]) == 2
