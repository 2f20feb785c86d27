"""Make a runnable qwen3moe or qwen2moe GGUF with random weights and *prescribed* routing.

Every position of a routing trace has a token of its own. Its embedding has one spike in a reserved dimension of
the residual stream. The rows of the attention output and of all experts' down projections that would write to
reserved dimensions are zero, so the spike passes unchanged through all layers, and the routers read nothing
else. RMS normalisation scales all logits of a token alike, so their order is the prescribed one.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray

from toolkit.errors import MachineError, ModelError
from toolkit.files import atomic_path, sha256_file
from toolkit.model.blocks import random_blocks
from toolkit.model.gguf_header import read_header
from toolkit.model.routing import Trace
from toolkit.model.shape import HEAD_DIM, Shape
from toolkit.model.vocab import Vocabulary, read_vocabulary

FORMAT = 1  # raise it whenever the same options make other bytes

_SPIKE = 8.0  # of a code, beside random dimensions of rms 1
_MARGIN, _SPREAD = 8.0, 2.0  # router logits at rms 1: others in (-1, 0], chosen in (MARGIN, MARGIN + SPREAD]
_ATTENTION_GAIN = 0.25  # at 1, what all tokens share grows from layer to layer and drowns what tells them apart
_FILE_TYPES = {
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_S,
    "MXFP4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
}
TYPES = tuple(_FILE_TYPES)


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
        return math.prod(self.byte_shape)


class Synth:
    """One model to be written: parameters, size, then `write`.

    `shape` and `trace` come from `shape.routing`. Raises ModelError if the vocabulary does not fit them.
    """

    def __init__(self, shape: Shape, trace: Trace, *, vocab: Path, seed: int, preset: str) -> None:
        self.shape, self.trace, self.seed = shape, trace, seed
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
        try:
            if out.exists() and not force:
                if _parameters(out) == self.parameters:
                    return False
                raise ModelError(
                    "exists and was made with other options",
                    where=out,
                    hint="add --force to replace it, or give another name",
                )
            out.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(out)
            free = shutil.disk_usage(out.parent).free
            if free < self.nbytes:
                raise MachineError(
                    f"the model needs {self.nbytes / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free",
                    where=out.parent,
                    hint="free some space or choose another folder",
                )
            with atomic_path(out) as partial:
                self._write(partial, advance)
        except OSError as e:
            raise MachineError(f"cannot be written: {e}", where=out, hint="check space and permissions") from e
        return True

    def _write(self, path: Path, advance: Callable[[int], object]) -> None:
        writer = gguf.GGUFWriter(path, self.shape.arch)
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
        # On disk before the rename: a complete name means complete data, and clean pages can be evicted.
        with path.open("rb") as file:
            os.fsync(file.fileno())

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
        if s.shared_ff:
            writer.add_expert_shared_feed_forward_length(s.shared_ff)
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

        def shared_gate(layer: int) -> _Tensor:
            return _Tensor(
                name=f"blk.{layer}.ffn_gate_inp_shexp.weight",
                shape=(s.embd,),
                type=GGMLType.F32,
                make=lambda _: _shared_gate(s.embd, reserved),
            )

        reserved = _reserved(self.trace)
        yield _Tensor(name="token_embd.weight", shape=(n_vocab, s.embd), type=GGMLType.Q4_0, make=self._embedding)
        for i in range(s.layers):
            yield norm(f"blk.{i}.attn_norm.weight", s.embd)
            yield matrix(f"blk.{i}.attn_q.weight", s.embd, s.embd)
            yield matrix(f"blk.{i}.attn_k.weight", kv, s.embd)
            yield matrix(f"blk.{i}.attn_v.weight", kv, s.embd)
            yield matrix(f"blk.{i}.attn_output.weight", s.embd, s.embd, gain=_ATTENTION_GAIN, zero_rows=reserved)
            if s.arch == "qwen3moe":
                yield norm(f"blk.{i}.attn_q_norm.weight", HEAD_DIM)
                yield norm(f"blk.{i}.attn_k_norm.weight", HEAD_DIM)
            yield norm(f"blk.{i}.ffn_norm.weight", s.embd)
            yield router(i)
            yield matrix(f"blk.{i}.ffn_gate_exps.weight", s.experts, s.ff, s.embd, type=expert_type)
            yield matrix(f"blk.{i}.ffn_up_exps.weight", s.experts, s.ff, s.embd, type=expert_type)
            yield matrix(f"blk.{i}.ffn_down_exps.weight", s.experts, s.embd, s.ff, type=expert_type, zero_rows=reserved)
            if s.shared_ff:
                yield shared_gate(i)
                yield matrix(f"blk.{i}.ffn_gate_shexp.weight", s.shared_ff, s.embd)
                yield matrix(f"blk.{i}.ffn_up_shexp.weight", s.shared_ff, s.embd)
                yield matrix(f"blk.{i}.ffn_down_shexp.weight", s.embd, s.shared_ff, zero_rows=reserved)
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


def _shared_gate(embd: int, reserved: int) -> NDArray[np.float32]:
    """Weights that give every token the same logit before normalisation, 1, from its code alone.

    llama.cpp computes the sigmoid as silu(x) / x, so x must never be 0.
    """
    weight = np.zeros(embd, dtype=np.float32)
    weight[embd - reserved :] = 1 / _SPIKE
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


def _remove_stale(out: Path) -> None:
    """Delete what killed processes have left of `out`: up to the model's size each."""
    for partial in out.parent.glob(f".{glob.escape(out.name)}.*.partial"):
        pid = partial.name[len(out.name) + 2 : -len(".partial")]
        if pid.isascii() and pid.isdigit() and not _alive(int(pid)):
            partial.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


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
    top_k: int = metadata[f"{metadata['general.architecture']}.expert_used_count"]
    return Prescription(
        tokens=tokens,
        n_prompt=metadata["moe_madv.n_prompt"],
        experts=np.array(metadata["moe_madv.experts"], dtype=np.int32).reshape(len(tokens), -1, top_k),
    )
