"""qwen3moe, and qwen2moe for a model with a shared expert: plain attention, a router in every layer."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
from gguf import GGMLQuantizationType as GGMLType

from toolkit.model.shape import HEAD_DIM, Shape
from toolkit.model.weights import Tensor, Weights

_ATTENTION_GAIN = 0.25  # at 1, what all tokens share grows from layer to layer and drowns what tells them apart


def add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Keys as llama.cpp's src/models/qwen3moe.cpp and qwen2moe.cpp read them."""
    writer.add_block_count(shape.layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.embd)
    writer.add_feed_forward_length(shape.ff)
    writer.add_expert_feed_forward_length(shape.ff)
    if shape.shared_ff:
        writer.add_expert_shared_feed_forward_length(shape.shared_ff)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_head_count(shape.embd // HEAD_DIM)
    writer.add_head_count_kv(shape.embd // HEAD_DIM // 2)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)


def tensors(shape: Shape, weights: Weights) -> Iterator[Tensor]:
    """All tensors in file order."""
    w, n, kv, experts = weights, shape.embd, shape.embd // 2, GGMLType[shape.type]
    yield w.embedding("token_embd.weight")
    for i in range(shape.layers):
        blk = f"blk.{i}"
        yield w.norm(f"{blk}.attn_norm.weight", n)
        yield w.matrix(f"{blk}.attn_q.weight", n, n)
        yield w.matrix(f"{blk}.attn_k.weight", kv, n)
        yield w.matrix(f"{blk}.attn_v.weight", kv, n)
        yield w.matrix(f"{blk}.attn_output.weight", n, n, gain=_ATTENTION_GAIN, to_residual=True)
        if shape.arch == "qwen3moe":
            yield w.norm(f"{blk}.attn_q_norm.weight", HEAD_DIM)
            yield w.norm(f"{blk}.attn_k_norm.weight", HEAD_DIM)
        yield w.router_norm(f"{blk}.ffn_norm.weight", i)
        yield w.router(f"{blk}.ffn_gate_inp.weight", i)
        yield w.matrix(f"{blk}.ffn_gate_exps.weight", shape.experts, shape.ff, n, type=experts)
        yield w.matrix(f"{blk}.ffn_up_exps.weight", shape.experts, shape.ff, n, type=experts)
        yield w.matrix(f"{blk}.ffn_down_exps.weight", shape.experts, n, shape.ff, type=experts, to_residual=True)
        if shape.shared_ff:
            # llama.cpp computes the sigmoid of this gate as silu(x) / x, so x must never be 0
            yield w.constant_gate(f"{blk}.ffn_gate_inp_shexp.weight")
            yield w.matrix(f"{blk}.ffn_gate_shexp.weight", shape.shared_ff, n)
            yield w.matrix(f"{blk}.ffn_up_shexp.weight", shape.shared_ff, n)
            yield w.matrix(f"{blk}.ffn_down_shexp.weight", n, shape.shared_ff, to_residual=True)
    yield w.norm("output_norm.weight", n)
    yield w.matrix("output.weight", w.n_vocab, n)
