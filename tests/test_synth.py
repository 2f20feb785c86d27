"""Synthetic models: the bytes of random blocks, the vocabulary, exact prescribed routing, and the command."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray

from toolkit.cli.model import model
from toolkit.errors import FetchError, MachineError, ModelError
from toolkit.files import sha256_file
from toolkit.model.blocks import random_blocks
from toolkit.model.layout import read_model
from toolkit.model.shape import PRESETS, Shape, routing
from toolkit.model.synth import TYPES, Synth, prescription
from toolkit.model.vocab import read_vocabulary

TINY = PRESETS["tiny"]


def write_vocabulary(path: Path, n_words: int = 5000) -> Path:
    """Byte tokens "a".."p", words that merge two of them or more, one user-defined and two control tokens."""
    letters = [chr(ord("a") + i) for i in range(16)]
    tokens, merges = list(letters), []
    for left in list(tokens):
        for right in letters:
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    for left in tokens[16:272]:
        for right in tokens[16:272]:
            if len(tokens) < n_words:
                tokens.append(left + right)
                merges.append(f"{left} {right}")
    types = [1] * len(tokens) + [4, 3, 3]
    tokens += ["[PAD]", "<|end|>", "<|start|>"]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens) - 2)
    writer.add_pad_token_id(len(tokens) - 3)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("vocab") / "vocab.gguf")


def make(shape: Shape, vocab: Path, *, seed: int = 0, replay: Path | None = None) -> Synth:
    return Synth(*routing(shape, replay, seed), vocab=vocab, seed=seed, preset="tiny")


def write(synth: Synth, out: Path, *, force: bool = False) -> bool:
    return synth.write(out, force=force, advance=lambda _: None)


@pytest.fixture(scope="session")
def tiny(vocab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny.gguf"
    assert write(make(TINY, vocab), out)
    return out


def tensors(path: Path) -> dict[str, NDArray[Any]]:
    """All tensors as float32, by gguf's own reader and dequantisation."""
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


def check_routing(path: Path) -> None:
    """Every router, given the embedding of a forced token and any residual beside its code, takes the prescribed
    experts in the prescribed order."""
    told, weights = prescription(path), tensors(path)
    n_positions, n_layers, top_k = told.experts.shape
    n_codes = -(-n_positions // 32) * 32
    rng = np.random.default_rng(5)
    x = weights["token_embd.weight"][list(told.tokens)].astype(np.float64)
    for layer in range(n_layers):
        assert not np.any(weights[f"blk.{layer}.attn_output.weight"][-n_codes:])
        assert not np.any(weights[f"blk.{layer}.ffn_down_exps.weight"][:, -n_codes:])
        assert np.all(np.any(weights[f"blk.{layer}.ffn_down_exps.weight"][:, :-n_codes], axis=2))
        x[:, :-n_codes] += rng.normal(0, 2, x[:, :-n_codes].shape)
        normed = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True)) * weights[f"blk.{layer}.ffn_norm.weight"]
        logits = normed @ weights[f"blk.{layer}.ffn_gate_inp.weight"].T.astype(np.float64)
        assert np.array_equal(np.argsort(-logits, axis=1)[:, :top_k], told.experts[:, layer])
        ranked = -np.sort(-logits, axis=1)
        assert np.min(ranked[:, top_k - 1] - ranked[:, top_k]) > 0.5


# --- blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "low"), [("Q4_0", 7 / 8), ("Q8_0", 7 / 8), ("Q4_K", 7 / 8), ("MXFP4", 1 / 2)])
@pytest.mark.parametrize("width", [256, 2048])
def test_random_blocks_have_the_wanted_magnitude(name: str, low: float, width: int) -> None:
    data = random_blocks(np.random.SFC64(1), (512, width), GGMLType[name], rms=width**-0.5)
    values = gguf.quants.dequantize(data, GGMLType[name])
    assert values.shape == (512, width)
    assert np.all(np.isfinite(values))
    assert low < np.sqrt(np.mean(values**2)) * width**0.5 < 9 / 8
    assert abs(np.mean(values)) * width**0.5 < 0.05


@pytest.mark.parametrize("name", TYPES)
def test_zero_bytes_are_zero_weights(name: str) -> None:
    data = np.zeros_like(random_blocks(np.random.SFC64(1), (2, 256), GGMLType[name], rms=1.0))
    assert not np.any(gguf.quants.dequantize(data, GGMLType[name]))


# --- vocabulary -----------------------------------------------------------------------------------------------


def test_vocabulary_is_read_as_gguf_reads_it(vocab: Path) -> None:
    got, fields = read_vocabulary(vocab), gguf.GGUFReader(vocab).fields
    assert [t.decode() for t in got.tokens] == fields["tokenizer.ggml.tokens"].contents()
    assert got.types == fields["tokenizer.ggml.token_type"].contents()
    assert [m.decode() for m in got.merges] == fields["tokenizer.ggml.merges"].contents()
    assert got.scalars == {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.eos_token_id": 5001,
        "tokenizer.ggml.padding_token_id": 5000,
        "tokenizer.chat_template": "{{ messages }}",
    }


def test_shortened_vocabulary_keeps_control_tokens_and_its_own_merges(vocab: Path) -> None:
    short = read_vocabulary(vocab).shortened(18)
    assert short.tokens == [*(bytes([c]) for c in b"abcdefghijklmnop"), b"aa", b"ab", b"<|end|>", b"<|start|>"]
    assert short.types == [1] * 18 + [3, 3]
    assert short.merges == [b"a a", b"a b"]
    assert short.scalars["tokenizer.ggml.eos_token_id"] == 18
    assert "tokenizer.ggml.padding_token_id" not in short.scalars  # that token is gone
    assert short.normal == list(range(18))


def test_a_file_without_a_bpe_vocabulary_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="not a byte-pair"):
        read_vocabulary(tmp_path / "x.gguf")


# --- models ---------------------------------------------------------------------------------------------------


def test_tiny_is_small_and_says_what_it_is(tiny: Path) -> None:
    assert tiny.stat().st_size < 10 << 20
    fields = {k: f.contents() for k, f in gguf.GGUFReader(tiny).fields.items()}
    assert fields["general.architecture"] == "qwen3moe"
    assert (fields["qwen3moe.block_count"], fields["qwen3moe.expert_count"]) == (4, 16)
    assert (fields["qwen3moe.expert_used_count"], fields["qwen3moe.embedding_length"]) == (2, 256)
    assert len(fields["tokenizer.ggml.tokens"]) == 4096 + 2
    parameters = json.loads(fields["moe_madv.synth"])
    assert (parameters["preset"], parameters["seed"], parameters["trace"]) == ("tiny", 0, "generated")


def test_prescription_is_the_trace(tiny: Path, vocab: Path) -> None:
    _, trace = routing(TINY, None, 0)
    told = prescription(tiny)
    assert np.array_equal(told.experts, trace.experts)
    assert told.n_prompt == 24
    assert len(set(told.tokens)) == len(told.tokens) == 64
    assert max(told.tokens) < 4096  # ordinary tokens only


@pytest.mark.parametrize("name", TYPES)
def test_routing_is_exact(name: str, vocab: Path, tmp_path: Path) -> None:
    write(make(replace(TINY, type=name, layers=2), vocab), tmp_path / "m.gguf")
    check_routing(tmp_path / "m.gguf")


def test_shared_expert_is_counted_and_leaves_the_routing_exact(vocab: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    synth = make(replace(TINY, layers=2, shared_ff=128), vocab)
    write(synth, out)
    layout = read_model(out)
    assert layout.architecture == "qwen2moe"
    # 2 layers of 3 matrices of 256 * 128 weights; Q4_0 takes 18 bytes for 32
    assert layout.shared_expert_bytes == 2 * 3 * 256 * 128 // 32 * 18 == 110592
    # besides them a gate of 256 floats a layer, and no norms of 2 * 128 floats of q and k
    plain = make(replace(TINY, layers=2), vocab)
    assert synth.nbytes - plain.nbytes == 110592 + 2 * 1024 - 2 * 1024
    assert gguf.GGUFReader(out).fields["qwen2moe.expert_shared_feed_forward_length"].contents() == 128
    check_routing(out)
    weights = tensors(out)
    x = weights["token_embd.weight"].astype(np.float64)
    for layer in range(2):
        down = weights[f"blk.{layer}.ffn_down_shexp.weight"]
        assert down.shape == (256, 128)
        assert not np.any(down[-64:]) and np.all(np.any(down[:-64], axis=1))
        # llama.cpp divides by the gate's logit: the same for every token, 8 * 1/8 here, and never 0
        assert np.allclose(x @ weights[f"blk.{layer}.ffn_gate_inp_shexp.weight"], 1.0, rtol=1e-3)
    assert not any("attn_q_norm" in name or "attn_k_norm" in name for name in weights)


def test_a_recorded_trace_is_replayed(vocab: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    experts = np.argsort(rng.random((20, 3, 24)), axis=2)[:, :, :5].astype(np.int16)
    phase = np.array([0] * 6 + [1] * 14, dtype=np.uint8)
    np.savez(tmp_path / "t.npz", experts=experts, phase=phase, n_expert=24)
    write(make(replace(TINY, layers=2), vocab, replay=tmp_path / "t.npz"), tmp_path / "m.gguf")
    told = prescription(tmp_path / "m.gguf")
    assert np.array_equal(told.experts, experts[:, :2])
    assert told.n_prompt == 6
    check_routing(tmp_path / "m.gguf")


def test_every_token_has_one_code_and_experts_differ(tiny: Path) -> None:
    reader = {t.name: t for t in gguf.GGUFReader(tiny).tensors}
    embedding = gguf.quants.dequantize(reader["token_embd.weight"].data, GGMLType.Q4_0)
    codes = embedding[:, -64:]
    assert np.all(np.count_nonzero(codes, axis=1) == 1)
    told = prescription(tiny)
    assert np.array_equal(np.argmax(codes[list(told.tokens)], axis=1), np.arange(64))
    slices = [
        hashlib.sha256(expert.tobytes()).digest() for name, t in reader.items() if "_exps" in name for expert in t.data
    ]
    assert len(set(slices)) == len(slices) == 4 * 3 * 16


def test_the_same_options_give_the_same_bytes(tiny: Path, vocab: Path, tmp_path: Path) -> None:
    write(make(TINY, vocab), tmp_path / "again.gguf")
    write(make(TINY, vocab, seed=1), tmp_path / "other.gguf")
    assert sha256_file(tmp_path / "again.gguf") == sha256_file(tiny)
    assert sha256_file(tmp_path / "other.gguf") != sha256_file(tiny)


def test_size_is_known_before(tiny: Path, vocab: Path) -> None:
    advanced: list[int] = []
    synth = make(replace(TINY, layers=1), vocab)
    synth.write(tiny.with_name("one.gguf"), force=False, advance=advanced.append)
    assert sum(advanced) == synth.nbytes == sum(t.n_bytes for t in gguf.GGUFReader(tiny.with_name("one.gguf")).tensors)


def test_presets_have_the_promised_sizes(vocab: Path) -> None:
    # The experts are layers * 128 * 3 * embd * 768 weights of 18 / 32 bytes: 2.85 and 7.59 GiB. Heads, attention
    # and routers add less than 0.2 GiB with this short vocabulary.
    assert 2.85 < make(PRESETS["demo"], vocab).nbytes / 2**30 < 2.95
    assert 7.59 < make(PRESETS["bench"], vocab).nbytes / 2**30 < 7.8


# --- writing --------------------------------------------------------------------------------------------------


def test_an_existing_file_is_kept_unless_forced(vocab: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    one = make(replace(TINY, layers=1), vocab)
    assert write(one, out)
    before = sha256_file(out)
    assert not write(one, out)
    other = make(replace(TINY, layers=1), vocab, seed=3)
    with pytest.raises(ModelError, match="other options") as e:
        write(other, out)
    assert e.value.hint is not None and "--force" in e.value.hint
    assert sha256_file(out) == before
    assert write(other, out, force=True)
    assert sha256_file(out) != before
    out.write_text("something else", encoding="utf-8")
    with pytest.raises(ModelError, match="other options"):
        write(one, out)


def test_a_full_disk_is_seen_before_writing(vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(MachineError, match=r"needs 2\.\d\d GiB, 2\.00 GiB are free"):
        write(make(PRESETS["demo"], vocab), tmp_path / "new" / "m.gguf")
    assert not (tmp_path / "new" / "m.gguf").exists()


def test_an_interrupted_write_leaves_nothing(vocab: Path, tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(replace(TINY, layers=1), vocab).write(tmp_path / "m.gguf", force=False, advance=stop)
    assert not list(tmp_path.glob("*m.gguf*"))


def test_what_killed_processes_left_is_removed_first(
    vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = tmp_path / f".m[1].gguf.{ended.pid}.partial"
    kept = [tmp_path / f".m[1].gguf.{os.getppid()}.partial", tmp_path / f".m1.gguf.{ended.pid}.partial"]
    kept.append(tmp_path / ".m[1].gguf.old.partial")
    for path in (stale, *kept):
        path.touch()
    seen: list[bool] = []
    real = shutil.disk_usage

    def disk_usage(path: Path) -> Any:
        seen.append(stale.exists())
        return real(path)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    write(make(replace(TINY, layers=1), vocab), tmp_path / "m[1].gguf")
    assert seen == [False]
    assert all(path.exists() for path in kept)


def test_the_data_is_on_disk_before_the_name_is(vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "m.gguf"
    seen: list[tuple[bool, int]] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        seen.append((out.exists(), os.fstat(fd).st_size))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    write(make(replace(TINY, layers=1), vocab), out)
    assert seen == [(False, out.stat().st_size)]


def test_a_folder_that_cannot_be_made(vocab: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="cannot be written") as e:
        write(make(replace(TINY, layers=1), vocab), tmp_path / "file" / "m.gguf")
    assert e.value.where == str(tmp_path / "file" / "m.gguf")


def test_prescription_of_another_file_is_an_error(vocab: Path) -> None:
    with pytest.raises(ModelError, match="no prescribed routing") as e:
        prescription(vocab)
    assert e.value.hint is not None and "moe-madv model synth" in e.value.hint


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"type": "Q4_K", "ff": 128}, "--ff 128 is not a multiple of 256", "try 256"),
        ({"embd": 300}, "--embd 300 is not a multiple of 256", "try 512"),
        ({"shared_ff": 100}, "--shared-ff 100 is not a multiple of 32", "try 128"),
        ({"prompt": 10**12}, "1,000,000,000,040 positions", "use fewer positions"),
        ({"layers": 10**8}, r"--layers 100000000 is not in 0\.\.512", "change --layers"),
        ({"embd": 10**18}, r"--embd 1000000000000000000 is not in 0\.\.65,536", "change --embd"),
        ({"popularity": float("nan")}, r"--popularity nan is not in 0\.\.10", "change --popularity"),
        ({"popularity": 10.5}, r"--popularity 10.5 is not in 0\.\.10", "change --popularity"),
        ({"recency": float("inf")}, r"--recency inf is not in 0\.\.100", "change --recency"),
        ({"recency": -1.0}, r"--recency -1.0 is not in 0\.\.100", "change --recency"),
        ({"top_k": 17}, "top-k 17 of 16 experts", "lower --top-k"),
        # 3/4 of 256 dimensions are 192; 193 positions need 258, which is 512 in steps of 256
        ({"decode": 169}, "193 positions.*leaves room for 192", "use --embd 512 or fewer positions"),
        ({"decode": 168, "layers": 200}, "76,800 routed ids", "use fewer layers or positions"),
    ],
)
def test_impossible_shapes_are_refused(vocab: Path, changes: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ModelError, match=message) as e:
        make(replace(TINY, **changes), vocab)
    assert e.value.hint == hint


def test_more_positions_than_tokens(tmp_path: Path) -> None:
    small = write_vocabulary(tmp_path / "v.gguf", n_words=0)  # 16 letters and 256 pairs
    with pytest.raises(ModelError, match="273 positions need a token each; the vocabulary has 272"):
        make(replace(TINY, embd=512, decode=249), small)


# --- the command ----------------------------------------------------------------------------------------------


def test_command_writes_and_reports(vocab: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    args = ["synth", str(out), "--preset", "tiny", "--layers", "1", "--type", "Q8_0", "--vocab", str(vocab)]
    first = CliRunner().invoke(model, args)
    assert (first.exit_code, first.stdout) == (0, f"{out}\n")
    assert "Q8_0 experts" in first.stderr and "routing: adjacent Jaccard" in first.stderr
    again = CliRunner().invoke(model, [*args, "--json"])
    assert "already there" in again.stderr
    report = json.loads(again.stdout)
    assert report["parameters"]["type"] == "Q8_0"
    assert report["bytes"] == make(replace(TINY, layers=1, type="Q8_0"), vocab).nbytes
    assert 0 < report["routing"]["lru_hits"]["30"] < 1


def test_command_dry_run_writes_nothing(vocab: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    got = CliRunner().invoke(model, ["synth", str(out), "--preset", "bench", "--vocab", str(vocab), "--dry-run"])
    assert (got.exit_code, got.stdout) == (0, "")
    assert "24 layers, 128 Q4_0 experts, top 8; 64 + 128 tokens" in got.stderr
    assert not out.exists()


def test_command_says_which_rows_were_filled(vocab: Path, tmp_path: Path) -> None:
    experts = np.array([[[0], [-1]], [[1], [2]], [[2], [3]]], dtype=np.int16)
    np.savez(tmp_path / "t.npz", experts=experts, phase=np.array([0, 0, 1]), n_expert=4)
    args = ["synth", str(tmp_path / "m.gguf"), "--preset", "tiny", "--layers", "2", "--vocab", str(vocab)]
    got = CliRunner().invoke(model, [*args, "--replay", str(tmp_path / "t.npz")])
    assert got.exit_code == 0
    assert "t.npz: 1 rows were not recorded" in got.stderr
    assert prescription(tmp_path / "m.gguf").experts[0, 1].tolist() == [3]
    wrong = CliRunner().invoke(model, [*args, "--replay", str(tmp_path / "t.npz"), "--top-k", "2"])
    assert wrong.exit_code == 2
    assert "--replay fixes --top-k" in wrong.stderr


def test_command_without_a_fetched_tree_says_how_to_get_one(tmp_path: Path) -> None:
    got = CliRunner().invoke(model, ["synth", str(tmp_path / "m.gguf"), "--preset", "tiny"])
    assert isinstance(got.exception, FetchError)
    assert got.exception.hint == "moe-madv fetch"
