"""A small gemma4: experts, and a per-layer embedding table that llama.cpp can read by the row.

Tensors and keys: llama.cpp, src/models/gemma4.cpp. Made for tests: the place of the table in the file can be chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from toolkit.model import synth
from toolkit.model.arch import Architecture
from toolkit.model.shape import HEAD_DIM, Shape, routing
from toolkit.model.weights import Tensor, Weights

TABLE = "per_layer_token_embd.weight"
PLACES = ("among experts", "among always used")


@dataclass(frozen=True, kw_only=True)
class Gemma4(Shape):
    """`per_layer`: values of a token's row for each layer."""

    per_layer: int
    place: str

    @property
    def arch(self) -> str:
        return "gemma4"

    @property
    def dense(self) -> str:
        return "Q8_0"


def write(out: Path, vocab: Path, place: str) -> Path:
    """The model with its table between gate and up of the first layer, or after the token embeddings.

    4 layers of 16 experts of 110 KB; the table has rows of 4352 bytes, 18 MB.
    """
    shape, trace = routing(
        Gemma4(
            layers=4,
            experts=16,
            top_k=2,
            embd=256,
            ff=256,
            type="Q4_0",
            vocab=4096,
            prompt=24,
            decode=40,
            per_layer=1024,
            place=place,
        ),
        None,
        0,
    )
    architecture = cast(Architecture, SimpleNamespace(add_metadata=_add_metadata, tensors=_tensors))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(synth._ARCHITECTURES, "gemma4", architecture)
        made = synth.Synth(shape, trace, vocab=vocab, seed=0, preset="gemma4")
        made.write(out, force=False, advance=lambda _: None)
    return out


def _add_metadata(writer: gguf.GGUFWriter, shape: Gemma4) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.embd)
    writer.add_embedding_length_per_layer_input(shape.per_layer)
    writer.add_feed_forward_length(shape.ff)
    writer.add_expert_feed_forward_length(shape.ff)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_head_count(shape.embd // HEAD_DIM)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_key_length_swa(HEAD_DIM)
    writer.add_value_length_swa(HEAD_DIM)
    writer.add_sliding_window(512)
    writer.add_sliding_window_pattern([i % 2 == 0 for i in range(shape.layers)])
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)


def _tensors(shape: Gemma4, w: Weights) -> Iterator[Tensor]:
    s, n, experts = shape, shape.embd, GGMLType[shape.type]
    kv = HEAD_DIM  # one head
    table = w.matrix(TABLE, w.n_vocab, s.layers * s.per_layer)
    yield w.embedding("token_embd.weight")
    if s.place == PLACES[1]:
        yield table
    yield w.matrix("per_layer_model_proj.weight", s.layers * s.per_layer, n)
    yield w.norm("per_layer_proj_norm.weight", s.per_layer)
    yield w.norm("rope_freqs.weight", HEAD_DIM // 2)
    for i in range(s.layers):
        blk = f"blk.{i}"
        yield w.norm(f"{blk}.attn_norm.weight", n)
        yield w.matrix(f"{blk}.attn_q.weight", n, n)
        yield w.matrix(f"{blk}.attn_k.weight", kv, n)
        yield w.matrix(f"{blk}.attn_v.weight", kv, n)
        yield w.matrix(f"{blk}.attn_output.weight", n, n, to_residual=True)
        yield w.norm(f"{blk}.attn_q_norm.weight", HEAD_DIM)
        yield w.norm(f"{blk}.attn_k_norm.weight", HEAD_DIM)
        yield w.norm(f"{blk}.post_attention_norm.weight", n)
        yield w.norm(f"{blk}.ffn_norm.weight", n)
        yield w.matrix(f"{blk}.ffn_gate.weight", s.ff, n)
        yield w.matrix(f"{blk}.ffn_up.weight", s.ff, n)
        yield w.matrix(f"{blk}.ffn_down.weight", n, s.ff, to_residual=True)
        yield w.norm(f"{blk}.post_ffw_norm.weight", n)
        yield w.router(f"{blk}.ffn_gate_inp.weight", i)
        # the router's input is divided by the root of the width
        yield w.constant(f"{blk}.ffn_gate_inp.scale", np.full(n, n**0.5, dtype=np.float32))
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            yield w.norm(f"{blk}.{name}.weight", n)
        yield w.matrix(f"{blk}.ffn_gate_exps.weight", s.experts, s.ff, n, type=experts)
        if i == 0 and s.place == PLACES[0]:
            yield table
        yield w.matrix(f"{blk}.ffn_up_exps.weight", s.experts, s.ff, n, type=experts)
        yield w.matrix(f"{blk}.ffn_down_exps.weight", s.experts, n, s.ff, type=experts, to_residual=True)
        yield w.matrix(f"{blk}.inp_gate.weight", s.per_layer, n)
        yield w.matrix(f"{blk}.proj.weight", n, s.per_layer, to_residual=True)
        yield w.norm(f"{blk}.post_norm.weight", n)
    yield w.norm("output_norm.weight", n)
    yield w.matrix("output.weight", w.n_vocab, n)
