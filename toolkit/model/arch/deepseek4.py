"""deepseek4: hash-routed first layers, compressed attention, hyper-connections; DeepSeek-V4-Flash and smaller ones.

The residual stream is four streams wide. Each block reads a weighted sum of them with weights above 0, and the
streams are mixed by a matrix whose columns sum to 1: a code that all four share at the start is changed by a
positive factor only, so the routing is as exact as with one stream.
Tensors and keys: llama.cpp, src/models/deepseek4.cpp and conversion/deepseek.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType

from toolkit.errors import ModelError
from toolkit.model.shape import Shape
from toolkit.model.weights import Tensor, Weights

# DeepSeek-V4-Flash, config.json of its publisher. Heads, ranks and groups are proportional to the width.
FLASH_LAYERS, FLASH_EMBD, FLASH_VOCAB = 43, 4096, 129_280
HASH_LAYERS = 3
_HEAD_DIM, _ROPE_DIM, _WINDOW = 512, 64, 128
_INDEX_DIM, _INDEX_TOP_K = 128, 512
_STREAMS, _SINKHORN = 4, 20  # of the hyper-connections; llama.cpp takes no other number of streams
_EPS = 1e-6
_GATING_SQRT_SOFTPLUS = 4  # LLAMA_EXPERT_GATING_FUNC_TYPE_SQRT_SOFTPLUS

_MIN_LAYERS = 6  # hash and scored layers, and all three kinds of attention
_WIDTH_UNIT = 256
_ATTENTION_GAIN = 0.25
_MIX = 0.3  # scale of what hyper-connections make of the streams, beside their constant part
_KEEP = 2.0  # how much more a stream takes of itself than of each other one, before the softmax
_POSITION_RMS = 0.1  # of the compressors' score by position


@dataclass(frozen=True, kw_only=True)
class DeepSeek4(Shape):
    """A model of this architecture; attention, shared expert and output are Q8_0, as converted models have them."""

    @property
    def arch(self) -> str:
        return "deepseek4"

    @property
    def dense(self) -> str:
        return "Q8_0"


def flash(n: int) -> DeepSeek4:
    """DeepSeek-V4-Flash with one `n`th of its routed bytes: all 256 experts and 6 a token, narrower and shallower.

    Width and depth share the reduction: the width is divided by about the cube root of n, the layers make up
    for the rest. Raises ModelError when nothing so small can be built.
    """
    smallest = FLASH_LAYERS * (FLASH_EMBD // _WIDTH_UNIT) ** 2 // _MIN_LAYERS
    if n > smallest:
        raise ModelError(
            f"--scale 1/{n} is less than {_MIN_LAYERS} layers of width {_WIDTH_UNIT}",
            hint=f"use --scale 1/{smallest} or more",
        )
    embd = max(1, round(FLASH_EMBD / n ** (1 / 3) / _WIDTH_UNIT)) * _WIDTH_UNIT
    layers = max(_MIN_LAYERS, round(FLASH_LAYERS * (FLASH_EMBD / embd) ** 2 / n))
    return DeepSeek4(
        layers=layers,
        experts=256,
        top_k=6,
        embd=embd,
        ff=embd // 2,
        type="MXFP4",
        vocab=FLASH_VOCAB * embd // FLASH_EMBD,
        prompt=64,
        decode=128,
        shared_ff=embd // 2,
    )


def add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Keys that llama.cpp's loader asks for; those the gguf package has no name for are written by theirs."""
    s, arch = shape, shape.arch
    writer.add_block_count(s.layers)
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(s.embd)
    writer.add_head_count(_heads(s))
    writer.add_head_count_kv(1)
    writer.add_key_length(_HEAD_DIM)
    writer.add_value_length(_HEAD_DIM)
    writer.add_layer_norm_rms_eps(_EPS)
    writer.add_q_lora_rank(_rank(s))
    writer.add_sliding_window(_WINDOW)
    writer.add_rope_dimension_count(_ROPE_DIM)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(16.0)
    writer.add_rope_scaling_orig_ctx_len(1 << 16)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.top_k)
    writer.add_expert_feed_forward_length(s.ff)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(1.5)
    writer.add_expert_weights_norm(True)
    writer.add_uint32(f"{arch}.expert_gating_func", _GATING_SQRT_SOFTPLUS)
    writer.add_array(f"{arch}.swiglu_clamp_exp", [10.0] * s.layers)
    writer.add_indexer_head_count(_heads(s))
    writer.add_indexer_key_length(_INDEX_DIM)
    writer.add_indexer_top_k(_INDEX_TOP_K)
    writer.add_uint32(f"{arch}.attention.output_group_count", _groups(s))
    writer.add_uint32(f"{arch}.attention.output_lora_rank", _rank(s))
    writer.add_float32(f"{arch}.attention.compress_rope_freq_base", 160_000.0)
    writer.add_array(f"{arch}.attention.compress_ratios", [compress_ratio(i) for i in range(s.layers)])
    writer.add_uint32(f"{arch}.hyper_connection.count", _STREAMS)
    writer.add_uint32(f"{arch}.hyper_connection.sinkhorn_iterations", _SINKHORN)
    writer.add_float32(f"{arch}.hyper_connection.epsilon", _EPS)
    writer.add_uint32(f"{arch}.hash_layer_count", HASH_LAYERS)


def tensors(shape: Shape, weights: Weights) -> Iterator[Tensor]:
    """All tensors in file order."""
    s, w = shape, weights
    yield w.embedding("token_embd.weight")
    for i in range(s.layers):
        yield from _attention(f"blk.{i}", s, w, compress_ratio(i))
        yield from _experts(f"blk.{i}", s, w, i)
    yield w.norm("output_norm.weight", s.embd)
    yield w.normal("output_hc_fn.weight", _STREAMS, _STREAMS * s.embd, rms=(_STREAMS * s.embd) ** -0.5)
    yield w.constant("output_hc_base.weight", np.zeros(_STREAMS, dtype=np.float32))
    yield w.constant("output_hc_scale.weight", np.full(1, _MIX, dtype=np.float32))
    yield w.matrix("output.weight", w.n_vocab, s.embd)


def compress_ratio(layer: int) -> int:
    """Positions that one compressed key stands for: none in the first two layers, then 4 and 128 in turn."""
    return 0 if layer < 2 else (4, 128)[layer % 2]


def _heads(shape: Shape) -> int:
    return shape.embd // 64


def _rank(shape: Shape) -> int:
    return shape.embd // 4


def _groups(shape: Shape) -> int:
    """Groups of heads with an output projection each: of eight heads, and at least one."""
    return max(1, shape.embd // 512)


def _attention(blk: str, s: Shape, w: Weights, ratio: int) -> Iterator[Tensor]:
    heads, rank, groups = _heads(s), _rank(s), _groups(s)
    yield from _hyper_connection(f"{blk}.hc_attn", s, w)
    yield w.norm(f"{blk}.attn_norm.weight", s.embd)
    yield w.constant(f"{blk}.attn_sinks.weight", np.zeros(heads, dtype=np.float32))
    yield w.matrix(f"{blk}.attn_q_a.weight", rank, s.embd)
    yield w.norm(f"{blk}.attn_q_a_norm.weight", rank)
    yield w.matrix(f"{blk}.attn_q_b.weight", heads * _HEAD_DIM, rank)
    yield w.matrix(f"{blk}.attn_kv.weight", _HEAD_DIM, s.embd)
    yield w.norm(f"{blk}.attn_kv_a_norm.weight", _HEAD_DIM)
    yield w.matrix(f"{blk}.attn_output_a.weight", groups * rank, heads * _HEAD_DIM // groups)
    yield w.matrix(f"{blk}.attn_output_b.weight", s.embd, groups * rank, gain=_ATTENTION_GAIN, to_residual=True)
    if ratio:
        yield from _compressor(f"{blk}.attn_compressor", s, w, ratio, (2 if ratio == 4 else 1) * _HEAD_DIM, _HEAD_DIM)
    if ratio == 4:
        yield w.matrix(f"{blk}.indexer.proj.weight", heads, s.embd)
        yield w.matrix(f"{blk}.indexer.attn_q_b.weight", heads * _INDEX_DIM, rank)
        yield from _compressor(f"{blk}.indexer_compressor", s, w, ratio, 2 * _INDEX_DIM, _INDEX_DIM)


def _compressor(prefix: str, s: Shape, w: Weights, ratio: int, width: int, out: int) -> Iterator[Tensor]:
    yield w.matrix(f"{prefix}_kv.weight", width, s.embd)
    yield w.matrix(f"{prefix}_gate.weight", width, s.embd)
    yield w.normal(f"{prefix}_ape.weight", ratio, width, rms=_POSITION_RMS)
    yield w.norm(f"{prefix}_norm.weight", out)


def _hyper_connection(prefix: str, s: Shape, w: Weights) -> Iterator[Tensor]:
    """What a block reads of each stream (4), writes to each (4), and how the streams mix (4 x 4)."""
    n_mixes = (2 + _STREAMS) * _STREAMS
    base = np.zeros(n_mixes, dtype=np.float32)
    base[2 * _STREAMS :] = _KEEP * np.eye(_STREAMS, dtype=np.float32).ravel()
    yield w.normal(f"{prefix}_fn.weight", n_mixes, _STREAMS * s.embd, rms=(_STREAMS * s.embd) ** -0.5)
    yield w.constant(f"{prefix}_base.weight", base)
    yield w.constant(f"{prefix}_scale.weight", np.full(3, _MIX, dtype=np.float32))


def _experts(blk: str, s: Shape, w: Weights, layer: int) -> Iterator[Tensor]:
    kind = GGMLType[s.type]
    yield from _hyper_connection(f"{blk}.hc_ffn", s, w)
    yield w.router_norm(f"{blk}.ffn_norm.weight", layer)
    yield w.router(f"{blk}.ffn_gate_inp.weight", layer)  # in a hash layer it still weighs the experts
    if layer < HASH_LAYERS:
        yield w.hash_table(f"{blk}.ffn_gate_tid2eid.weight", layer)
    else:
        yield w.constant(f"{blk}.exp_probs_b.bias", np.zeros(s.experts, dtype=np.float32))
    yield w.matrix(f"{blk}.ffn_gate_exps.weight", s.experts, s.ff, s.embd, type=kind)
    yield w.matrix(f"{blk}.ffn_down_exps.weight", s.experts, s.embd, s.ff, type=kind, to_residual=True)
    yield w.matrix(f"{blk}.ffn_up_exps.weight", s.experts, s.ff, s.embd, type=kind)
    yield w.matrix(f"{blk}.ffn_gate_shexp.weight", s.shared_ff, s.embd)
    yield w.matrix(f"{blk}.ffn_down_shexp.weight", s.embd, s.shared_ff, to_residual=True)
    yield w.matrix(f"{blk}.ffn_up_shexp.weight", s.shared_ff, s.embd)
