"""Write a runnable GGUF with random weights and *prescribed* routing; `weights` says how that is possible."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray

from toolkit.errors import MachineError, ModelError
from toolkit.files import atomic_path, sha256_file
from toolkit.model.arch import Architecture, deepseek4, qwen
from toolkit.model.early import prescribe
from toolkit.model.gguf_header import read_header
from toolkit.model.routing import Trace
from toolkit.model.shape import Shape
from toolkit.model.vocab import Vocabulary, read_vocabulary
from toolkit.model.weights import Weights

FORMAT = 1  # raise it whenever the same options make other bytes

_ARCHITECTURES: dict[str, Architecture] = {"qwen3moe": qwen, "qwen2moe": qwen, "deepseek4": deepseek4}
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
        self.early = None if shape.early_accuracy is None else prescribe(trace, shape.early_accuracy, seed)
        if self.early is None:
            del self.parameters["early_accuracy"]  # the option is newer than the format
        self._architecture = _ARCHITECTURES[shape.arch]
        weights = Weights(
            trace,
            embd=shape.embd,
            n_vocab=len(self.vocabulary.tokens),
            tokens=self.tokens,
            dense=GGMLType[shape.dense],
            early=self.early,
        )
        self._tensors = tuple(self._architecture.tensors(shape, weights))
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
                writer.add_tensor_info(t.name, t.byte_shape, np.dtype(np.uint8), t.nbytes, raw_dtype=t.type)
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
        writer.add_type("model")
        writer.add_name(f"synthetic {self.parameters['preset']}")
        writer.add_file_type(_FILE_TYPES[self.shape.type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        self._architecture.add_metadata(writer, self.shape)
        writer.add_string("moe_madv.synth", json.dumps(self.parameters, sort_keys=True))
        writer.add_uint32("moe_madv.n_prompt", self.trace.n_prompt)
        writer.add_array("moe_madv.tokens", self.tokens)
        writer.add_array("moe_madv.experts", self.trace.experts.ravel().tolist())
        self.vocabulary.write(writer)


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
