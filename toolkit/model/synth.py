"""Make a runnable qwen3moe GGUF with random weights and *prescribed* routing.

Every position of a routing trace has a token of its own. Its embedding has one spike in a reserved dimension of
the residual stream. The rows of the attention output and of the experts' down projections that would write to
reserved dimensions are zero, so the spike passes unchanged through all layers, and the routers read nothing
else. RMS normalisation scales all logits of a token alike, so their order is the prescribed one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray

from toolkit.errors import MachineError, ModelError
from toolkit.files import atomic_path, sha256_file
from toolkit.model.blocks import BLOCK_SIZE, random_blocks
from toolkit.model.gguf_header import read_header
from toolkit.model.routing import POPULARITY, RECENCY, Trace, check_experts, generate, load_trace
from toolkit.model.vocab import Vocabulary, read_vocabulary

ARCH = "qwen3moe"
FORMAT = 1  # raise it whenever the same options make other bytes
HEAD_DIM = 128

_SPIKE = 8.0  # of a code, beside random dimensions of rms 1
_MARGIN, _SPREAD = 8.0, 2.0  # router logits at rms 1: others in (-1, 0], chosen in (MARGIN, MARGIN + SPREAD]
_ATTENTION_GAIN = 0.25  # at 1, what all tokens share grows from layer to layer and drowns what tells them apart
_MAX_IDS = 1 << 16  # in the prescription: `read_header` keeps arrays up to this length
_FILE_TYPES = {
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_S,
    "MXFP4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
}
TYPES = tuple(_FILE_TYPES)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the model is made of; `type` is that of the experts, all other matrices are Q4_0."""

    layers: int
    experts: int
    top_k: int
    embd: int
    ff: int  # of one expert
    type: str
    vocab: int | None  # tokens kept of the vocabulary; None: all
    prompt: int  # positions of the prescribed token list
    decode: int
    popularity: float = POPULARITY  # of the generated routing
    recency: float = RECENCY


PRESETS = {
    "tiny": Shape(layers=4, experts=16, top_k=2, embd=256, ff=256, type="Q4_0", vocab=4096, prompt=24, decode=40),
    "demo": Shape(layers=18, experts=128, top_k=8, embd=1024, ff=768, type="Q4_0", vocab=None, prompt=64, decode=128),
    "bench": Shape(layers=24, experts=128, top_k=8, embd=2048, ff=768, type="Q4_0", vocab=None, prompt=64, decode=128),
}


def routing(shape: Shape, replay: Path | None, seed: int) -> tuple[Shape, Trace]:
    """The trace to prescribe: generated, or the recorded one, whose experts, top-k and lengths replace the shape's."""
    if replay is not None:
        trace = load_trace(replay, layers=shape.layers)
        n_decode = len(trace.experts) - trace.n_prompt
        return replace(shape, experts=trace.n_expert, top_k=trace.top_k, prompt=trace.n_prompt, decode=n_decode), trace
    if shape.top_k > shape.experts:
        raise ModelError(f"top-k {shape.top_k} of {shape.experts} experts", hint="lower --top-k")
    return shape, generate(
        layers=shape.layers,
        n_prompt=shape.prompt,
        n_decode=shape.decode,
        n_expert=shape.experts,
        top_k=shape.top_k,
        seed=seed,
        popularity=shape.popularity,
        recency=shape.recency,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Prescription:
    """The token list to force, and the experts it takes: int32 [token, layer, k], best first."""

    tokens: tuple[int, ...]
    n_prompt: int
    experts: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]  # in elements, slowest dimension first
    type: GGMLType
    make: Callable[[np.random.BitGenerator], NDArray[Any]]

    @property
    def byte_shape(self) -> tuple[int, ...]:
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        return (*self.shape[:-1], self.shape[-1] // block * block_bytes)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.byte_shape))


class Synth:
    """One model to be written: parameters, size, then `write`.

    `shape` and `trace` come from `routing`. Raises ModelError if they cannot be a model.
    """

    def __init__(self, shape: Shape, trace: Trace, *, vocab: Path, seed: int, preset: str) -> None:
        self.shape, self.trace, self.seed = shape, trace, seed
        _check(shape, trace)
        vocabulary = read_vocabulary(vocab)
        self.vocabulary = vocabulary if shape.vocab is None else vocabulary.shortened(shape.vocab)
        self.tokens = _choose_tokens(self.vocabulary, len(trace.experts), seed)
        self.parameters: dict[str, Any] = {
            "format": FORMAT,
            "preset": preset,
            **asdict(shape),
            "seed": seed,
            "vocab_sha256": sha256_file(vocab),
            "trace": trace.source,
            "trace_sha256": hashlib.sha256(trace.experts.astype("<i2").tobytes()).hexdigest(),
        }
        self._tensors = tuple(self._plan())
        self.nbytes = sum(t.nbytes for t in self._tensors)

    def write(self, out: Path, *, force: bool, advance: Callable[[int], object]) -> bool:
        """Write the model; False if `out` has it already. `advance` is called with the bytes of each tensor.

        Another file of that name is an error unless `force`. Raises MachineError if the disk is too small.
        """
        if out.exists() and not force:
            if _parameters(out) == self.parameters:
                return False
            raise ModelError(
                "exists and was made with other options",
                where=out,
                hint="add --force to replace it, or give another name",
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < self.nbytes:
            raise MachineError(
                f"the model needs {self.nbytes / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free",
                where=out.parent,
                hint="free some space or choose another folder",
            )
        try:
            with atomic_path(out) as partial:
                self._write(partial, advance)
        except OSError as e:
            raise MachineError(f"cannot be written: {e}", where=out, hint="check space and permissions") from e
        return True

    def _write(self, path: Path, advance: Callable[[int], object]) -> None:
        writer = gguf.GGUFWriter(path, ARCH)
        try:
            self._add_metadata(writer)
            for t in self._tensors:
                dtype = np.dtype(np.float32 if t.type == GGMLType.F32 else np.uint8)
                shape = t.shape if t.type == GGMLType.F32 else t.byte_shape
                writer.add_tensor_info(t.name, shape, dtype, t.nbytes, raw_dtype=t.type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for i, t in enumerate(self._tensors):
                # A stream of its own for each tensor: its bytes depend on the seed and its place only.
                writer.write_tensor_data(t.make(np.random.SFC64(np.random.SeedSequence((self.seed, i)))))
                advance(t.nbytes)
        finally:
            writer.close()

    def _add_metadata(self, writer: gguf.GGUFWriter) -> None:
        s = self.shape
        writer.add_type("model")
        writer.add_name(f"synthetic {self.parameters['preset']}")
        writer.add_file_type(_FILE_TYPES[s.type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_block_count(s.layers)
        writer.add_context_length(32768)
        writer.add_embedding_length(s.embd)
        writer.add_feed_forward_length(s.ff)
        writer.add_expert_feed_forward_length(s.ff)
        writer.add_expert_count(s.experts)
        writer.add_expert_used_count(s.top_k)
        writer.add_head_count(s.embd // HEAD_DIM)
        writer.add_head_count_kv(s.embd // HEAD_DIM // 2)
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
        writer.add_rope_freq_base(1e6)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_string("moe_madv.synth", json.dumps(self.parameters, sort_keys=True))
        writer.add_uint32("moe_madv.n_prompt", self.trace.n_prompt)
        writer.add_array("moe_madv.tokens", self.tokens)
        writer.add_array("moe_madv.experts", self.trace.experts.ravel().tolist())
        self.vocabulary.write(writer)

    def _plan(self) -> Iterator[_Tensor]:
        s, n_vocab, expert_type = self.shape, len(self.vocabulary.tokens), GGMLType[self.shape.type]
        kv = s.embd // 2

        def matrix(
            name: str, *shape: int, type: GGMLType = GGMLType.Q4_0, gain: float = 1.0, zero_rows: int = 0
        ) -> _Tensor:
            """Random weights [..., out, in] that change the rms of their input by `gain`; the last rows are zero."""

            def make(bits: np.random.BitGenerator) -> NDArray[Any]:
                data = random_blocks(bits, shape, type, rms=gain * shape[-1] ** -0.5)
                data[..., shape[-2] - zero_rows :, :] = 0  # all types here read a block of zero bytes as zeros
                return data

            return _Tensor(name=name, shape=shape, type=type, make=make)

        def norm(name: str, n: int) -> _Tensor:
            return _Tensor(name=name, shape=(n,), type=GGMLType.F32, make=lambda _: np.ones(n, dtype=np.float32))

        def router(layer: int) -> _Tensor:
            return _Tensor(
                name=f"blk.{layer}.ffn_gate_inp.weight",
                shape=(s.experts, s.embd),
                type=GGMLType.F32,
                make=lambda bits: _router(bits, self.trace, layer, s.embd),
            )

        reserved = _reserved(self.trace)
        yield _Tensor(name="token_embd.weight", shape=(n_vocab, s.embd), type=GGMLType.Q4_0, make=self._embedding)
        for i in range(s.layers):
            yield norm(f"blk.{i}.attn_norm.weight", s.embd)
            yield matrix(f"blk.{i}.attn_q.weight", s.embd, s.embd)
            yield matrix(f"blk.{i}.attn_k.weight", kv, s.embd)
            yield matrix(f"blk.{i}.attn_v.weight", kv, s.embd)
            yield matrix(f"blk.{i}.attn_output.weight", s.embd, s.embd, gain=_ATTENTION_GAIN, zero_rows=reserved)
            yield norm(f"blk.{i}.attn_q_norm.weight", HEAD_DIM)
            yield norm(f"blk.{i}.attn_k_norm.weight", HEAD_DIM)
            yield norm(f"blk.{i}.ffn_norm.weight", s.embd)
            yield router(i)
            yield matrix(f"blk.{i}.ffn_gate_exps.weight", s.experts, s.ff, s.embd, type=expert_type)
            yield matrix(f"blk.{i}.ffn_up_exps.weight", s.experts, s.ff, s.embd, type=expert_type)
            yield matrix(f"blk.{i}.ffn_down_exps.weight", s.experts, s.embd, s.ff, type=expert_type, zero_rows=reserved)
        yield norm("output_norm.weight", s.embd)
        yield matrix("output.weight", n_vocab, s.embd)

    def _embedding(self, bits: np.random.BitGenerator) -> NDArray[Any]:
        """Random rows with a code at their end: a forced token has its position's, others share them in turn."""
        n_vocab, n_positions, reserved = len(self.vocabulary.tokens), len(self.tokens), _reserved(self.trace)
        spikes = np.zeros((n_positions, reserved), dtype=np.float32)
        np.fill_diagonal(spikes, _SPIKE)
        codes = gguf.quants.quantize(spikes, GGMLType.Q4_0)
        position = np.arange(n_vocab) % n_positions
        position[self.tokens] = np.arange(n_positions)
        data = random_blocks(bits, (n_vocab, self.shape.embd), GGMLType.Q4_0, rms=1.0)
        data[:, -codes.shape[1] :] = codes[position]
        return data


def _router(bits: np.random.BitGenerator, trace: Trace, layer: int, embd: int) -> NDArray[np.float32]:
    n_positions, _, top_k = trace.experts.shape
    logits = -np.random.Generator(bits).random((n_positions, trace.n_expert), dtype=np.float32)
    chosen = _MARGIN + _SPREAD * np.arange(top_k, 0, -1, dtype=np.float32) / top_k
    np.put_along_axis(logits, trace.experts[:, layer].astype(np.int64), chosen[None], axis=1)
    weight = np.zeros((trace.n_expert, embd), dtype=np.float32)
    first = embd - _reserved(trace)
    weight[:, first : first + n_positions] = logits.T / _SPIKE
    return weight


def _reserved(trace: Trace) -> int:
    """Dimensions at the end of the residual stream that hold codes: one a position, in whole blocks."""
    return -(-len(trace.experts) // 32) * 32


def _choose_tokens(vocabulary: Vocabulary, n: int, seed: int) -> list[int]:
    normal = vocabulary.normal
    if n > len(normal):
        raise ModelError(f"{n} positions need a token each; the vocabulary has {len(normal)}", hint="shorten the trace")
    chosen: list[int] = np.random.default_rng(seed).choice(normal, n, replace=False).tolist()
    return chosen


def _check(shape: Shape, trace: Trace) -> None:
    n_positions = len(trace.experts)
    check_experts(trace.experts.astype(np.int64), trace.n_expert, where=trace.source)
    block = BLOCK_SIZE[GGMLType[shape.type]]
    for option, value, unit in (("--embd", shape.embd, 2 * HEAD_DIM), ("--ff", shape.ff, block)):
        if value <= 0 or value % unit:
            raise ModelError(f"{option} {value} is not a multiple of {unit}", hint=f"try {-(-value // unit) * unit}")
    limit = shape.embd * 3 // 4
    if n_positions > limit:
        raise ModelError(
            f"{n_positions} positions (prompt and decode) need a residual dimension each; "
            f"--embd {shape.embd} leaves room for {limit}",
            where=trace.source,
            hint=f"use --embd {-(-n_positions * 4 // (3 * 256)) * 256} or fewer positions",
        )
    if trace.experts.size > _MAX_IDS:
        raise ModelError(
            f"{trace.experts.size:,} routed ids; the header holds at most {_MAX_IDS:,}",
            where=trace.source,
            hint="use fewer layers or positions",
        )


def _parameters(path: Path) -> dict[str, Any] | None:
    """What an existing file was made with; None if it is not one of ours."""
    try:
        value = read_header(path).metadata.get("moe_madv.synth")
        made = json.loads(value) if isinstance(value, str) else None
    except (ModelError, json.JSONDecodeError):
        return None
    return made if isinstance(made, dict) else None


def prescription(path: Path) -> Prescription:
    """Read back what `synth` prescribed; raises ModelError if the file is not one of its."""
    metadata = read_header(path).metadata
    if "moe_madv.experts" not in metadata:
        raise ModelError(
            "no prescribed routing in this file",
            where=path,
            hint="make one with: moe-madv model synth FILE --preset demo",
        )
    tokens = metadata["moe_madv.tokens"]
    top_k: int = metadata[f"{ARCH}.expert_used_count"]
    return Prescription(
        tokens=tokens,
        n_prompt=metadata["moe_madv.n_prompt"],
        experts=np.array(metadata["moe_madv.experts"], dtype=np.int32).reshape(len(tokens), -1, top_k),
    )
