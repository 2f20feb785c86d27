"""Synthetic deepseek4: shapes as the loader wants them, hash tables, and routing that survives hyper-connections."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from test_synth import write, write_vocabulary

from toolkit.cli.model import model
from toolkit.errors import ModelError
from toolkit.model.arch.deepseek4 import DeepSeek4, compress_ratio, flash
from toolkit.model.layout import Access, Routing, read_model
from toolkit.model.shape import routing
from toolkit.model.synth import Synth, prescription

# the smallest of its kind with experts narrowed once more: 6 layers, width 256, 20 MB
SMALL = replace(flash(1834), ff=32, shared_ff=32)


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("vocab") / "vocab.gguf")


def make(shape: DeepSeek4, vocab: Path, seed: int = 0) -> Synth:
    return Synth(*routing(shape, None, seed), vocab=vocab, seed=seed, preset="deepseek-v4-flash")


@pytest.fixture(scope="module")
def small(vocab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "small.gguf"
    assert write(make(SMALL, vocab), out)
    return out


def test_whole_scale_is_the_published_shape() -> None:
    s = flash(1)
    assert (s.layers, s.experts, s.top_k, s.embd, s.ff, s.shared_ff) == (43, 256, 6, 4096, 2048, 2048)
    assert (s.vocab, s.type, s.dense, s.arch) == (129_280, "MXFP4", "Q8_0", "deepseek4")


def test_width_and_depth_share_the_reduction() -> None:
    # the cube root of 64 is 4: 4096 / 4, and 43 * 4 * 4 / 64 = 10.75 layers
    s = flash(64)
    assert (s.layers, s.embd, s.ff, s.vocab) == (11, 1024, 512, 32_320)


@pytest.mark.parametrize("n", [2, 3, 8, 16, 50, 64, 128, 500])
def test_routed_weights_are_about_one_nth(n: int) -> None:
    s = flash(n)
    assert s.layers * s.embd * s.ff * n / (43 * 4096 * 2048) == pytest.approx(1, rel=0.15)
    assert s.layers >= 6 and s.embd % 256 == 0


def test_the_smallest_scale_and_one_below() -> None:
    # 43 layers of width 4096 have 43 * 16 * 16 / 6 = 1834.67 times the weights of 6 layers of width 256
    assert (flash(1834).layers, flash(1834).embd) == (6, 256)
    with pytest.raises(ModelError, match="1/1835 is less than 6 layers") as e:
        flash(1835)
    assert e.value.hint == "use --scale 1/1834 or more"


def test_layout_says_which_layers_are_hashed(small: Path) -> None:
    layout = read_model(small)
    assert layout.architecture == "deepseek4"
    assert [layer.routing for layer in layout.layers] == [Routing.TABLE] * 3 + [Routing.SCORE] * 3
    assert {(layer.experts, layer.top_k) for layer in layout.layers} == {(256, 6)}
    # three matrices of 256 * 32 weights; MXFP4 takes 17 bytes for 32
    assert {layer.bytes_per_expert for layer in layout.layers} == {3 * 256 * 17} == {13056}
    assert layout.nbytes(Access.ROUTED) == 6 * 256 * 13056
    # six layers of three matrices of 256 * 32 weights; Q8_0 takes 34 bytes for 32
    assert layout.shared_expert_bytes == 6 * 3 * 256 * 34
    tables = [t for t in layout.tensors if t.base == "ffn_gate_tid2eid"]
    assert [t.block for t in tables] == [0, 1, 2]
    assert {t.access for t in tables} == {Access.ROW_SPARSE}


def test_tensors_have_the_shapes_the_loader_asks_for(small: Path) -> None:
    """By hand from load_arch_tensors in llama.cpp's deepseek4.cpp: width 256, 4 heads of 512, rank 64, 1 group."""
    shapes = {t.info.name: t.info.shape for t in read_model(small).tensors}
    head = {name: shape for name, shape in shapes.items() if not name.startswith("blk.")}
    assert head == {
        "token_embd.weight": (256, 5003),
        "output_norm.weight": (256,),
        "output_hc_fn.weight": (1024, 4),
        "output_hc_base.weight": (4,),
        "output_hc_scale.weight": (1,),
        "output.weight": (256, 5003),
    }
    common: dict[str, tuple[int, ...]] = {
        "hc_attn_fn.weight": (1024, 24),
        "hc_attn_base.weight": (24,),
        "hc_attn_scale.weight": (3,),
        "attn_norm.weight": (256,),
        "attn_sinks.weight": (4,),
        "attn_q_a.weight": (256, 64),
        "attn_q_a_norm.weight": (64,),
        "attn_q_b.weight": (64, 2048),
        "attn_kv.weight": (256, 512),
        "attn_kv_a_norm.weight": (512,),
        "attn_output_a.weight": (2048, 64),
        "attn_output_b.weight": (64, 256),
        "hc_ffn_fn.weight": (1024, 24),
        "hc_ffn_base.weight": (24,),
        "hc_ffn_scale.weight": (3,),
        "ffn_norm.weight": (256,),
        "ffn_gate_inp.weight": (256, 256),
        "ffn_gate_exps.weight": (256, 32, 256),
        "ffn_down_exps.weight": (32, 256, 256),
        "ffn_up_exps.weight": (256, 32, 256),
        "ffn_gate_shexp.weight": (256, 32),
        "ffn_down_shexp.weight": (32, 256),
        "ffn_up_shexp.weight": (256, 32),
    }
    hashed: dict[str, tuple[int, ...]] = {"ffn_gate_tid2eid.weight": (6, 5003)}
    scored: dict[str, tuple[int, ...]] = {"exp_probs_b.bias": (256,)}
    by_4: dict[str, tuple[int, ...]] = {
        "attn_compressor_kv.weight": (256, 1024),
        "attn_compressor_gate.weight": (256, 1024),
        "attn_compressor_ape.weight": (1024, 4),
        "attn_compressor_norm.weight": (512,),
        "indexer.proj.weight": (256, 4),
        "indexer.attn_q_b.weight": (64, 512),
        "indexer_compressor_kv.weight": (256, 256),
        "indexer_compressor_gate.weight": (256, 256),
        "indexer_compressor_ape.weight": (256, 4),
        "indexer_compressor_norm.weight": (128,),
    }
    by_128: dict[str, tuple[int, ...]] = {
        "attn_compressor_kv.weight": (256, 512),
        "attn_compressor_gate.weight": (256, 512),
        "attn_compressor_ape.weight": (512, 128),
        "attn_compressor_norm.weight": (512,),
    }
    kinds = [hashed, hashed, hashed | by_4, scored | by_128, scored | by_4, scored | by_128]
    for i, kind in enumerate(kinds):
        prefix = f"blk.{i}."
        found = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
        assert found == common | kind, prefix


def test_first_two_layers_see_all_positions_then_two_compressions_alternate() -> None:
    assert [compress_ratio(i) for i in range(7)] == [0, 0, 4, 128, 4, 128, 4]


def test_hash_tables_hold_the_prescription_for_every_token(small: Path) -> None:
    told = prescription(small)
    tables = {t.name: t for t in gguf.GGUFReader(small).tensors if "tid2eid" in t.name}
    assert len(tables) == 3
    for layer in range(3):
        table = tables[f"blk.{layer}.ffn_gate_tid2eid.weight"]
        assert table.tensor_type == gguf.GGMLQuantizationType.I32
        assert np.array_equal(table.data[list(told.tokens)], told.experts[:, layer])
        # a token that is not forced takes valid experts too
        assert np.all((table.data >= 0) & (table.data < 256))
        assert all(len(set(row)) == 6 for row in table.data[:500].tolist())


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-x))


def test_routing_survives_hyper_connections(small: Path) -> None:
    """Four mixed streams with random block outputs beside the codes, computed here in float64."""
    told, weights = prescription(small), tensors_of(small)
    n_codes = 192  # one for each of 64 + 128 positions, 192 is whole blocks of 32 already
    rng = np.random.default_rng(7)
    x = np.repeat(weights["token_embd.weight"][list(told.tokens)].astype(np.float64)[:, None], 4, axis=1)
    for layer in range(6):
        blk = f"blk.{layer}"
        for writer in ("attn_output_b", "ffn_down_shexp"):
            assert not np.any(weights[f"{blk}.{writer}.weight"][-n_codes:])
        assert not np.any(weights[f"{blk}.ffn_down_exps.weight"][:, -n_codes:])
        assert np.all(np.any(weights[f"{blk}.ffn_down_exps.weight"][:, :-n_codes], axis=2))
        for block in ("attn", "ffn"):
            flat = x.reshape(len(x), -1)
            flat = flat / np.sqrt(np.mean(flat**2, axis=1, keepdims=True))
            mixes = flat @ weights[f"{blk}.hc_{block}_fn.weight"].T.astype(np.float64)
            base, scale = weights[f"{blk}.hc_{block}_base.weight"], weights[f"{blk}.hc_{block}_scale.weight"]
            pre = _sigmoid(mixes[:, :4] * scale[0] + base[:4]) + 1e-6
            post = 2 * _sigmoid(mixes[:, 4:8] * scale[1] + base[4:8])
            comb = (mixes[:, 8:] * scale[2] + base[8:]).reshape(-1, 4, 4)  # [token, source, destination]
            comb = np.exp(comb) / np.exp(comb).sum(axis=2, keepdims=True) + 1e-6
            comb = comb / (comb.sum(axis=1, keepdims=True) + 1e-6)
            for _ in range(19):
                comb = comb / (comb.sum(axis=2, keepdims=True) + 1e-6)
                comb = comb / (comb.sum(axis=1, keepdims=True) + 1e-6)
            read = np.einsum("ts,tsd->td", pre, x)
            if block == "ffn":
                normed = read / np.sqrt(np.mean(read**2, axis=1, keepdims=True))
                logits = normed @ weights[f"{blk}.ffn_gate_inp.weight"].T.astype(np.float64)
                assert np.array_equal(np.argsort(-logits, axis=1)[:, :6], told.experts[:, layer])
                ranked = -np.sort(-logits, axis=1)
                assert np.min(ranked[:, 5] - ranked[:, 6]) > 0.5
            out = rng.normal(0, 2, read.shape)
            out[:, -n_codes:] = 0
            x = np.einsum("tsk,tsd->tkd", comb, x) + post[:, :, None] * out[:, None]


def tensors_of(path: Path) -> dict[str, NDArray[np.float32]]:
    """Float tensors only: gguf's dequantisation knows no I32."""
    found = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type)
        for t in gguf.GGUFReader(path).tensors
        if t.tensor_type != gguf.GGMLQuantizationType.I32
    }
    assert found
    return found


def test_experts_differ_and_seeds_decide_the_bytes(small: Path, vocab: Path, tmp_path: Path) -> None:
    names = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    slices = [
        hashlib.sha256(expert.tobytes()).digest()
        for t in gguf.GGUFReader(small).tensors
        if any(name in t.name for name in names)
        for expert in t.data
    ]
    assert len(set(slices)) == len(slices) == 6 * 3 * 256
    write(make(SMALL, vocab), tmp_path / "again.gguf")
    write(make(SMALL, vocab, seed=1), tmp_path / "other.gguf")
    digests = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (*tmp_path.iterdir(), small)}
    assert digests["again.gguf"] == digests["small.gguf"] != digests["other.gguf"]


# --- the command ----------------------------------------------------------------------------------------------


def synth(*args: str | Path) -> tuple[int, str]:
    got = CliRunner().invoke(model, ["synth", *map(str, args)])
    return got.exit_code, got.stderr


def test_command_makes_the_default_scale(vocab: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    code, said = synth(out, "--like", "deepseek-v4-flash", "--vocab", vocab, "--dry-run")
    assert code == 0
    # 11 layers of 256 * 3 matrices of 1024 * 512 MXFP4 weights are 2.19 GiB
    assert "11 layers, 256 MXFP4 experts, top 6, a shared one; 64 + 128 tokens" in said
    assert ": 2.3" in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--scale", "1/8"], "--scale needs --like"),
        (["--like", "deepseek-v4-flash", "--scale", "1/0"], "'1/0' is not 1/N"),
        (["--like", "deepseek-v4-flash", "--scale", "0.5"], "'0.5' is not 1/N"),
        (["--like", "deepseek-v4-flash", "--experts", "64"], "--like fixes --experts; leave it out"),
        (["--like", "deepseek-v4-flash", "--preset", "demo"], "--like fixes --preset; leave it out"),
        (["--like", "deepseek-v4-flash", "--replay", "t.npz"], "--like fixes --replay; leave it out"),
        (["--like", "deepseek-v3"], "'deepseek-v3' is not 'deepseek-v4-flash'"),
    ],
)
def test_options_that_do_not_go_together(args: list[str], message: str, tmp_path: Path) -> None:
    code, said = synth(tmp_path / "m.gguf", *args)
    assert code == 2
    assert message in said
    assert not list(tmp_path.iterdir())
