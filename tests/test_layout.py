"""What tensors mean: classes, shards, layers, bytes per token, and `moe-madv model info` on top.

The numbers of the tiny model `moe()` by hand, F32 = 4 bytes, width 64, ff 32, 8 experts, top 2, layers 0-3:
one expert = (64*32 + 64*32 + 32*64) * 4 = 24,576; a layer = 8 * 24,576 = 196,608; routed = 3 * 196,608 =
589,824; one token = 3 layers * 2 * 24,576 = 147,456; shared experts = 3 * 24,576 = 73,728; dense ffn = 24,576;
routers = 3 * 64*8*4 = 6,144; embedding = 64*16*4 = 4,096; norms = 4 * 256 = 1,024. Without output.weight the
embedding is the output matrix too, so always_used = 73,728 + 24,576 + 6,144 + 4,096 + 1,024 = 109,568.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf_builder import ARRAY, I32, I32_TENSOR, STRING, U16, U32, Gguf, T, moe, split

from toolkit.cli.model import info
from toolkit.errors import ModelError
from toolkit.model.layout import (
    Access,
    Routing,
    expected_distinct,
    needed_bytes,
    read_model,
)

TOTAL, ALWAYS, ROUTED, EXPERT, TOKEN = 699392, 109568, 589824, 24576, 147456


def refused(path: Path, overrides: dict[str, int] | None = None) -> str:
    with pytest.raises(ModelError) as e:
        read_model(path, overrides)
    assert e.value.where and e.value.hint
    return e.value.what


def show(*args: object) -> dict[str, Any]:
    done = CliRunner().invoke(info, [*map(str, args), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def access_of(layout: Any) -> dict[str, Access]:
    return {t.info.name: t.access for t in layout.tensors}


def test_figures_of_the_tiny_model(tmp_path: Path) -> None:
    layout = read_model(moe().write(tmp_path / "m.gguf"))
    assert layout.nbytes() == TOTAL
    assert layout.nbytes(Access.ALWAYS_USED) == ALWAYS
    assert layout.nbytes(Access.ROUTED) == ROUTED
    assert layout.nbytes(Access.ROW_SPARSE, Access.UNUSED) == 0
    assert layout.shared_expert_bytes == 73728
    assert layout.routed_bytes_per_token == TOKEN
    assert [layer.routing for layer in layout.layers] == [Routing.DENSE] + 3 * [Routing.SCORE]
    assert [layout.routed_bytes(i) for i in range(4)] == [0, EXPERT, EXPERT, EXPERT]


def test_json_shape(tmp_path: Path) -> None:
    data = show(moe().write(tmp_path / "m.gguf"))
    assert data["architecture"] == "qwen3moe"
    assert (data["layers"], data["experts"], data["top_k"], data["tensors"]) == (4, 8, 2, 29)
    assert data["bytes"] == {
        "total": TOTAL,
        "always_used": ALWAYS,
        "routed": ROUTED,
        "row_sparse": 0,
        "unused": 0,
    }
    assert data["bytes_at_most"] == data["bytes"]
    assert (data["bytes_per_expert"], data["routed_bytes_per_token"]) == (EXPERT, TOKEN)
    assert data["shards"][0]["data_start"] == data["shards"][0]["file_size"] - TOTAL


def test_text_says_that_a_model_without_dense_layers_is_complete(tmp_path: Path) -> None:
    path = moe(dense=0).write(tmp_path / "m.gguf")
    done = CliRunner().invoke(info, [str(path)])
    assert done.exit_code == 0
    assert "0 dense, 4 MoE" in done.stdout
    assert "complete" in done.stdout
    assert "147,456" not in done.stdout and f"{4 * 2 * EXPERT:,} B" in done.stdout


def test_help_has_an_example() -> None:
    assert "moe-madv model info" in CliRunner().invoke(info, ["--help"]).stdout


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    model = moe(layers=2, dense=2)
    model.keys = [k for k in model.keys if "expert" not in str(k[0])]
    data = show(model.write(tmp_path / "d.gguf"))
    assert (data["layers"], data["experts"], data["top_k"], data["bytes_per_expert"]) == (2, 0, 0, 0)
    # embedding 4,096, two norms of 256, two dense ffn of 24,576
    assert data["bytes"]["total"] == data["bytes"]["always_used"] == 4096 + 512 + 49152


def test_merged_gate_and_up_give_the_same_figures(tmp_path: Path) -> None:
    layout = read_model(moe(merged=True).write(tmp_path / "m.gguf"))
    assert len(layout.tensors) == 26
    assert layout.nbytes(Access.ROUTED) == ROUTED
    assert layout.routed_bytes(1) == EXPERT

    mixed, other = moe(), moe(merged=True)
    mixed.tensors = [t for t in mixed.tensors if not str(t.name).startswith("blk.2.")]
    mixed.tensors += [t for t in other.tensors if str(t.name).startswith("blk.2.")]
    layout = read_model(mixed.write(tmp_path / "mixed.gguf"))
    assert len(layout.tensors) == 28
    assert [layout.routed_bytes(i) for i in range(4)] == [0, EXPERT, EXPERT, EXPERT]


def test_biases_are_routed_and_lookalikes_are_not(tmp_path: Path) -> None:
    model = moe()
    model.tensors += [
        T("blk.1.ffn_up_exps.bias", [32, 8]),  # 32 * 4 = 128 bytes for each expert
        T("blk.1.exp_probs_b.bias", [8]),
        T("blk.1.ffn_gate_inp_shexp.weight", [64]),
        T("blk.1.ffn_up_exps.scale", [8]),
        T("blk.1.ffn_norm_exps.weight", [64]),
        T("blk.1.ffn_up_chexps.weight", [64, 32, 4]),
        T("my_exps.weight", [8, 8, 8]),
    ]
    layout = read_model(model.write(tmp_path / "b.gguf"))
    routed = {name for name, access in access_of(layout).items() if access is Access.ROUTED}
    bases = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    assert routed == {f"blk.{i}.{b}.weight" for i in (1, 2, 3) for b in bases} | {"blk.1.ffn_up_exps.bias"}
    assert layout.nbytes(Access.ROUTED) == ROUTED + 8 * 128
    assert [layout.routed_bytes(i) for i in (1, 2)] == [EXPERT + 128, EXPERT]
    assert layout.shared_expert_bytes == 73728
    assert show(tmp_path / "b.gguf")["bytes_per_expert"] == [EXPERT + 128, EXPERT, EXPERT]


@pytest.mark.parametrize("shape", [[64, 32, 7], [64, 256], [64, 32, 8, 2]])
def test_routed_tensor_needs_a_slice_for_every_expert(tmp_path: Path, shape: list[int]) -> None:
    model = moe()
    model.tensor("blk.2.ffn_up_exps.weight").shape = shape
    what = refused(model.write(tmp_path / "s.gguf"))
    assert "'blk.2.ffn_up_exps.weight'" in what and "8 experts" in what


def test_one_tensor_per_expert_is_an_old_layout(tmp_path: Path) -> None:
    model = moe()
    model.tensors.append(T("blk.1.ffn_up.0.weight", [64, 32]))
    assert "old layout" in refused(model.write(tmp_path / "o.gguf"))


def test_experts_or_choices_that_no_key_states(tmp_path: Path) -> None:
    for key, word in (("expert_count", "0 experts"), ("expert_used_count", "expert_used_count is 0 in block 1")):
        model = moe()
        model.keys = [k for k in model.keys if k[0] != f"qwen3moe.{key}"]
        assert word in refused(model.write(tmp_path / "k.gguf"))


def test_tables_are_read_by_the_row(tmp_path: Path) -> None:
    model = moe()
    tables = {
        "output.weight": [64, 16],
        "per_layer_token_embd.weight": [8, 16],
        "position_embd.weight": [64, 16],
        "blk.1.engram_embd.weight": [64, 100],
        "blk.2.ple_ngram_embd.weight": [64, 10],
        "ngram_embd.0.weight": [64, 10],
        "blk.3.engram_q.weight": [64, 4],
    }
    model.tensors += [T(name, shape) for name, shape in tables.items()]
    layout = read_model(model.write(tmp_path / "r.gguf"))
    row_sparse = {name for name, access in access_of(layout).items() if access is Access.ROW_SPARSE}
    assert row_sparse == (set(tables) - {"output.weight", "blk.3.engram_q.weight"}) | {"token_embd.weight"}
    # 4 bytes * (64*16 token_embd + 8*16 + 64*16 + 64*100 + 64*10 + 64*10)
    assert layout.nbytes(Access.ROW_SPARSE) == 4 * (1024 + 128 + 1024 + 6400 + 640 + 640)
    # output.weight (4,096) takes the place of the tied embedding, engram_q adds 1,024
    assert layout.nbytes(Access.ALWAYS_USED) == ALWAYS + 1024


def test_layer_routed_by_token_table(tmp_path: Path) -> None:
    model = moe()
    model.drop(lambda name: name == "blk.1.ffn_gate_inp.weight")
    model.tensors.append(T("blk.1.ffn_gate_tid2eid.weight", [2, 16], I32_TENSOR, 128))
    path = model.write(tmp_path / "t.gguf")
    layout = read_model(path)
    assert [layer.routing for layer in layout.layers] == [
        Routing.DENSE,
        Routing.TABLE,
        Routing.SCORE,
        Routing.SCORE,
    ]
    assert layout.nbytes(Access.ROW_SPARSE) == 128
    assert "block 1: routed by token table" in CliRunner().invoke(info, [str(path)]).stdout


@pytest.mark.parametrize("with_key", [True, False])
def test_prediction_block_is_no_layer(tmp_path: Path, with_key: bool) -> None:
    model = moe(layers=5)
    if with_key:
        model.keys.append(("qwen3moe.nextn_predict_layers", U32, 1))
    model.drop(lambda name: name.startswith("blk.4.") and "_exps" not in name)
    model.tensors.append(T("blk.4.nextn.eh_proj.weight", [128, 64]))
    layout = read_model(model.write(tmp_path / "p.gguf"))
    assert (len(layout.layers), layout.prediction_blocks) == (4, (4,))
    assert layout.routed_bytes_per_token == TOKEN
    assert layout.nbytes(Access.ROUTED) == ROUTED
    assert layout.nbytes(Access.ALWAYS_USED) == ALWAYS
    assert layout.nbytes(Access.UNUSED) == 196608 + 128 * 64 * 4
    assert bool(layout.notes) is not with_key


def test_announced_prediction_block_that_is_absent(tmp_path: Path) -> None:
    model = moe(layers=5)
    model.keys.append(("qwen3moe.nextn_predict_layers", U32, 1))
    model.drop(lambda name: name.startswith("blk.4."))
    layout = read_model(model.write(tmp_path / "p.gguf"))
    assert (len(layout.layers), layout.prediction_blocks) == (4, ())
    assert layout.nbytes() == TOTAL
    assert "announces 1" in layout.notes[0] and "holds 0" in layout.notes[0]


def test_blocks_without_tensors_are_noted(tmp_path: Path) -> None:
    model = moe(layers=5)
    model.drop(lambda name: name.startswith("blk.4."))
    layout = read_model(model.write(tmp_path / "p.gguf"))
    assert len(layout.layers) == 5
    assert layout.notes == ("no tensors for block(s) 4 of 5",)


def test_unknown_type_hides_only_what_depends_on_it(tmp_path: Path) -> None:
    model = moe()
    model.tensors.append(T("blk.9.ffn_up_exps.weight", [64, 32, 8], 200, 9216))
    path = model.write(tmp_path / "u.gguf")
    data = show(path)
    assert data["bytes"] == {
        "total": None,
        "always_used": ALWAYS,
        "routed": ROUTED,
        "row_sparse": 0,
        "unused": None,
    }
    assert data["bytes_at_most"]["total"] == TOTAL + 9216
    assert data["bytes_per_expert"] == EXPERT
    assert data["unknown_types"] == [
        {"tensor": "blk.9.ffn_up_exps.weight", "type": "type 200 (unknown)", "at_most_bytes": 9216}
    ]
    text = CliRunner().invoke(info, [str(path)]).stdout
    assert "type 200 (unknown)" in text and f"unknown, at most {TOTAL + 9216:,} B" in text


def test_unknown_type_of_an_expert(tmp_path: Path) -> None:
    model = moe()
    model.tensor("blk.2.ffn_up_exps.weight").type = 200
    path = model.write(tmp_path / "u.gguf")
    data = show(path, "--tokens", 4)
    assert data["bytes_per_expert"] == [EXPERT, None, EXPERT]
    assert data["routed_bytes_per_token"] is None
    assert data["expected"]["routed_bytes"] is None
    assert data["bytes_at_most"]["total"] == TOTAL
    layout = read_model(path)
    with pytest.raises(ModelError, match="expert in block 2 is unknown"):
        layout.routed_bytes(2)
    assert layout.routed_bytes(3) == EXPERT


def test_keys_with_one_number_or_one_per_layer(tmp_path: Path) -> None:
    def with_keys(model: Gguf, *keys: tuple[str, int, Any]) -> Path:
        model.keys = [k for k in model.keys if k[0] not in {key[0] for key in keys}] + list(keys)
        return model.write(tmp_path / "k.gguf")

    kv, used = "qwen3moe.attention.head_count_kv", "qwen3moe.expert_used_count"
    layers = read_model(with_keys(moe(), (kv, ARRAY, (I32, [0, 0, 8, 8])))).layers
    assert [layer.kv_heads for layer in layers] == [0, 0, 8, 8]
    layers = read_model(with_keys(moe(), (kv, U32, 8))).layers
    assert [layer.kv_heads for layer in layers] == [8, 8, 8, 8]
    many = list(range(88))
    layers = read_model(with_keys(moe(layers=88), (kv, ARRAY, (U32, many)))).layers
    assert [layer.kv_heads for layer in layers] == many
    layout = read_model(with_keys(moe(), (used, ARRAY, (U32, [0, 1, 2, 4]))))
    assert [layer.top_k for layer in layout.layers] == [0, 1, 2, 4]
    assert layout.routed_bytes_per_token == (1 + 2 + 4) * EXPERT
    assert show(tmp_path / "k.gguf")["top_k"] == [1, 2, 4]

    for key in (kv, used, "qwen3moe.feed_forward_length"):
        assert "has 3 values, the model has 4 blocks" in refused(with_keys(moe(), (key, ARRAY, (U32, [1, 2, 3]))))
    assert "must hold numbers" in refused(with_keys(moe(), (kv, STRING, "eight")))
    assert "must hold numbers" in refused(with_keys(moe(), (kv, ARRAY, (I32, [1, 1, 1, -1]))))
    assert "block_count" in refused(with_keys(moe(), ("qwen3moe.block_count", U32, 2**32 - 1)))


def test_override_of_the_number_of_active_experts(tmp_path: Path) -> None:
    path = moe().write(tmp_path / "m.gguf")
    data = show(path, "--override", "qwen3moe.expert_used_count=4")
    assert data["routed_bytes_per_token"] == 2 * TOKEN
    assert (data["top_k"], data["overrides"]) == (4, {"qwen3moe.expert_used_count": 4})
    for value in (0, 9, -1):
        assert "1 to 8" in refused(path, {"qwen3moe.expert_used_count": value})
    assert "qwen3moe.expert_used_count" in refused(path, {"deepseek2.expert_used_count": 4})
    assert "cannot override" in refused(path, {"qwen3moe.expert_count": 4})
    done = CliRunner().invoke(info, [str(path), "--override", "qwen3moe.expert_used_count"])
    assert done.exit_code == 2 and "KEY=NUMBER" in done.output


@pytest.mark.parametrize(("experts", "limit"), [(896, False), (1025, True)])
def test_many_experts(tmp_path: Path, experts: int, limit: bool) -> None:
    path = moe(layers=2, experts=experts, top_k=16, width=8, ff=4).write(tmp_path / "x.gguf")
    layout = read_model(path)
    expert = 3 * 8 * 4 * 4
    assert layout.routed_bytes_per_token == 16 * expert
    ids = np.full((1, 2, 4), -1)
    ids[0, 1] = [0, 255, 256, 895]
    always = layout.nbytes(Access.ALWAYS_USED)
    assert always is not None
    assert needed_bytes(layout, ids) == always + 4 * expert
    assert any("1024" in note for note in layout.notes) is limit


def test_needed_bytes_counts_each_slice_once(tmp_path: Path) -> None:
    model = moe()
    model.tensors += [T("output.weight", [64, 16]), T("blk.1.ffn_up_exps.bias", [32, 8])]
    layout = read_model(model.write(tmp_path / "n.gguf"))
    ids = np.array(
        [
            [[-1, -1], [0, 1], [7, 6], [2, 2]],
            [[-1, -1], [1, 0], [5, 4], [-1, 3]],
            [[-1, -1], [0, 3], [7, 5], [2, 3]],
        ]
    )
    # layer 1: {0, 1, 3} with a bias of 128 bytes each; layer 2: {4, 5, 6, 7}; layer 3: {2, 3};
    # always used: output takes the place of the tied embedding, which is row-sparse now
    assert needed_bytes(layout, ids) == ALWAYS + 3 * (EXPERT + 128) + 4 * EXPERT + 2 * EXPERT
    assert needed_bytes(layout, ids[:0]) == ALWAYS
    for bad in (ids[:, :3], ids[0], np.full((1, 4, 1), 8), np.zeros((1, 4, 1), np.int32)):
        with pytest.raises(ModelError):
            needed_bytes(layout, bad)


def test_expected_distinct_experts(tmp_path: Path) -> None:
    assert expected_distinct(8, 2, 1) == 2
    assert expected_distinct(8, 2, 4) == pytest.approx(8 * (1 - 81 / 256))  # (6/8)^4 = 81/256
    assert expected_distinct(8, 2, 1000) == pytest.approx(8)
    assert expected_distinct(8, 8, 1) == 8
    assert expected_distinct(0, 0, 5) == 0
    data = show(moe().write(tmp_path / "m.gguf"), "--tokens", 4)
    # 5.46875 experts in each of three layers
    assert data["expected"] == {"tokens": 4, "distinct_experts": 5.46875, "routed_bytes": 403200}


@pytest.mark.parametrize("counts", [[0, 29], [10, 19], [9, 0, 20]])
def test_split_model_is_found_from_any_shard_and_from_its_folder(tmp_path: Path, counts: list[int]) -> None:
    paths = split(moe(), tmp_path, "модель  漢字 #1%", counts)
    (tmp_path / "mmproj-x.gguf").write_bytes(b"")
    expected = show(paths[0])
    assert (expected["tensors"], expected["bytes"]["total"], expected["layers"]) == (29, TOTAL, 4)
    assert [s["tensors"] for s in expected["shards"]] == counts
    assert sum(s["bytes"] for s in expected["shards"]) == TOTAL
    for path in (*paths[1:], tmp_path):
        assert show(path) == expected


def test_links_into_a_cache_keep_their_names(tmp_path: Path) -> None:
    paths = split(moe(), tmp_path, "m", [2, 27])
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "x"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, path in enumerate(paths):
        blob = blobs / (f"{i}" * 64)
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    for path in (snapshot, snapshot / paths[1].name):
        data = show(path)
        assert data["bytes"]["total"] == TOTAL
        assert data["file"] == str(snapshot / paths[0].name)
    with pytest.raises(ModelError) as e:
        read_model(blobs / ("1" * 64))
    assert "bare cache blob" in e.value.what
    assert e.value.hint is not None and str(snapshot / paths[1].name) in e.value.hint
    (blobs / ("1" * 64)).unlink()
    assert "1 of 2 shards are missing:\n    m-00002-of-00002.gguf" in refused(snapshot)


def test_all_missing_shards_are_listed_at_once(tmp_path: Path) -> None:
    paths = split(moe(), tmp_path, "m", [5, 5, 5, 14])
    paths[0].unlink()
    paths[2].unlink()
    for path in (paths[1], paths[0], tmp_path):
        what = refused(path)
        assert "2 of 4" in what and paths[0].name in what and paths[2].name in what
        assert paths[1].name not in what and paths[3].name not in what


def test_shards_that_disagree(tmp_path: Path) -> None:
    def cut(name: str, **extra: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        return split(moe(), folder, "m", [10, 10, 9], **extra)[0]

    what = refused(cut("swapped", numbers=[0, 2, 1]))
    assert "m-00002-of-00003.gguf: split.no is 2" in what and "m-00003-of-00003.gguf: split.no is 1" in what
    assert "split.tensors.count is 30, the shards hold 29 tensors" in refused(cut("total", total=30))
    assert "split.count is 4" in refused(cut("count", count=4))

    shards = [cut(name).parent / "m-00002-of-00003.gguf" for name in ("twice", "other", "lone")]
    keys: list[tuple[str | bytes, int, Any]] = [("split.no", U16, 1), ("split.count", U16, 3)]
    Gguf(keys=keys, tensors=moe().tensors[9:20]).write(shards[0])
    tensor = moe().tensors[9].name
    assert f"tensor {tensor!r} is also in m-00001-of-00003.gguf" in refused(shards[0])
    Gguf(keys=[("general.architecture", STRING, "llama"), *keys], tensors=moe().tensors[10:20]).write(shards[1])
    assert "general.architecture is llama, in the first shard qwen3moe" in refused(shards[1])
    moe().write(shards[2])
    assert "no split.* keys" in refused(shards[2])


def test_names_that_do_not_fit_the_split_keys(tmp_path: Path) -> None:
    path = split(moe(), tmp_path, "m", [10, 19])[0]
    renamed = path.rename(tmp_path / "renamed.gguf")
    assert "split.no 0, split.count 2" in refused(renamed)
    assert "shard 3 of 2" in refused(moe().write(tmp_path / "m-00003-of-00002.gguf"))
    assert len(read_model(moe().write(tmp_path / "n-00001-of-00001.gguf")).shards) == 1


def test_joined_shards_and_missing_metadata(tmp_path: Path) -> None:
    paths = split(moe(), tmp_path, "s", [10, 19])
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(paths[0].read_bytes() + paths[1].read_bytes())
    assert "joined" in refused(joined)
    imatrix = Gguf(keys=[("general.type", STRING, "imatrix")])
    assert "general.type: imatrix" in refused(imatrix.write(tmp_path / "i.gguf"))


def test_paths_the_system_refuses(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / ("x" * 300 + ".gguf"))
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    assert "cannot be read" in refused(tmp_path / "loop.gguf")


def test_folders_with_no_or_several_models(tmp_path: Path) -> None:
    assert "no .gguf file" in refused(tmp_path)
    moe().write(tmp_path / "a.gguf")
    split(moe(), tmp_path, "b", [10, 19])
    what = refused(tmp_path)
    assert "2 models" in what and "a.gguf" in what and "b-00001-of-00002.gguf" in what


def test_vocabulary_without_tensors_and_big_endian(tmp_path: Path) -> None:
    layout = read_model(moe(layers=0).write(tmp_path / "e.gguf"))
    assert (len(layout.layers), layout.routed_bytes_per_token) == (0, 0)
    vocabulary = Gguf(keys=moe().keys)
    layout = read_model(vocabulary.write(tmp_path / "v.gguf"))
    assert (len(layout.layers), layout.nbytes()) == (4, 0)
    assert layout.notes == ("the model has no tensors: metadata and vocabulary only",)
    model = moe()
    model.order = ">"
    layout = read_model(model.write(tmp_path / "be.gguf"))
    assert layout.nbytes() == TOTAL
    assert "cannot run" in layout.notes[0]


def test_model_written_by_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "q.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(2)
    writer.add_expert_count(4)
    writer.add_expert_used_count(1)
    writer.add_token_list(["a"] * 100)
    q4k, q8, f32 = (getattr(gguf.GGMLQuantizationType, t) for t in ("Q4_K", "Q8_0", "F32"))
    writer.add_tensor("token_embd.weight", np.zeros((100, 272), np.uint8), raw_dtype=q8)
    writer.add_tensor("output.weight", np.zeros((100, 272), np.uint8), raw_dtype=q8)
    for i in range(2):
        for base in ("gate", "up", "down"):
            # 4 experts of 256 rows of 256 elements: one Q4_K block of 144 bytes each
            packed = np.zeros((4, 256, 144), np.uint8)
            writer.add_tensor(f"blk.{i}.ffn_{base}_exps.weight", packed, raw_dtype=q4k)
        writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", np.zeros((4, 256), np.float32), raw_dtype=f32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = show(path)
    assert data["bytes_per_expert"] == 3 * 256 * 144
    assert data["bytes"]["routed"] == 2 * 4 * 3 * 256 * 144
    assert data["bytes"]["row_sparse"] == 100 * 8 * 34  # 256 elements are 8 Q8_0 blocks of 34 bytes
    assert data["bytes"]["always_used"] == 100 * 8 * 34 + 2 * 4 * 256 * 4
    assert data["routed_bytes_per_token"] == 2 * 3 * 256 * 144
    assert data["bytes"]["total"] == sum(int(t.n_bytes) for t in gguf.GGUFReader(path).tensors)


_NAMES = [
    b"-m \xc3\xa9.gguf",
    "модель　漢字 #1% \"q\" 'r'.gguf".encode(),
    b"[red]\xff.gguf",
    b"x" * 200 + b".gguf",
    b"new\nline.gguf",
]


@pytest.mark.parametrize("name", _NAMES)
def test_file_names_of_every_kind_are_kept(tmp_path: Path, name: bytes) -> None:
    moe().write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)))
    env = os.environ | {"LC_ALL": "C"}
    command = [sys.executable, "-m", "toolkit", "model", "info"]

    def run(*args: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*command, *args, b"--", name], cwd=tmp_path, env=env, capture_output=True)

    done = run("--json")
    assert done.returncode == 0, done.stderr
    assert os.fsencode(json.loads(done.stdout)["file"]) == name
    done = run()
    assert done.returncode == 0, done.stderr
    line = name.replace(b"\xff", b"\\xff").replace(b"\n", b"\\n")
    assert done.stdout.splitlines()[0].endswith(b"  " + line)


def test_text_survives_a_narrow_output_encoding(tmp_path: Path) -> None:
    path = moe().write(tmp_path / "é漢.gguf")
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "toolkit", "model", "info", path.name]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"\xe9\\u6f22.gguf" in done.stdout


def test_refusal_is_one_message_and_an_exit_code(tmp_path: Path) -> None:
    path = moe().write(tmp_path / "t.gguf", -1)
    command = [sys.executable, "-m", "toolkit", "model", "info", str(path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (ModelError.exit_code, "")
    assert "1 bytes of tensor data are missing" in done.stderr
    assert "Traceback" not in done.stderr and "next: " in done.stderr
