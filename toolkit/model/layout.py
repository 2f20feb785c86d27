"""What the tensors of a model mean for reading: whole for every token, by the expert, by the row, or never.

Tensors are classified by the exact parts of their names (llama.cpp, src/llama-arch.cpp) and by shape, never
by searching for letters: `ffn_up_exps` is routed, `ffn_up_shexp` and `exp_probs_b` are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.errors import ModelError
from toolkit.model.gguf_header import TensorInfo
from toolkit.model.hparams import HParams, read_hparams
from toolkit.model.shards import Shard, read_shards
from toolkit.model.text import shown

_EXPERTS = frozenset({"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"})
_DENSE_FFN = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
_BLOCK_NUMBER = re.compile(r"[0-9]{1,9}")
_SHARED_EXPERTS = frozenset({"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"})
# Operands of GET_ROWS: a token reads some rows of them, never the whole.
_ROW_TABLES = frozenset(
    {
        "per_layer_token_embd",
        "position_embd",
        "token_types",
        "engram_embd",
        "ngram_embd",
        "ple_ngram_embd",
        "ffn_gate_tid2eid",
    }
)
# llama.cpp at the pin, src/llama-hparams.h.
_LLAMA_MAX_EXPERTS = 1024
_LLAMA_MAX_LAYERS = 512


class Access(str, Enum):
    """How decode reads a tensor."""

    ALWAYS_USED = "always_used"  # whole, for every token
    ROUTED = "routed"  # the slices of the chosen experts
    ROW_SPARSE = "row_sparse"  # the rows of the token
    UNUSED = "unused"  # not at all: prediction blocks


class Routing(str, Enum):
    """How a layer chooses its experts."""

    DENSE = "dense"  # it has none
    SCORE = "score"  # by a router's score
    TABLE = "token_table"  # by the token id, from ffn_gate_tid2eid (DeepSeek V4)


@dataclass(frozen=True, kw_only=True)
class ModelTensor:
    """One tensor, where it lies and how it is read."""

    info: TensorInfo
    shard: int  # index into ModelLayout.shards
    access: Access
    block: int | None  # N of blk.N, None outside blocks
    base: str  # name without block and suffix, such as ffn_up_exps


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decode layer."""

    block: int  # N of blk.N
    routing: Routing
    experts: int  # 0 in a dense layer
    top_k: int  # experts per token, 0 in a dense layer
    bytes_per_expert: int | None  # weights and biases of one expert; None: a tensor has an unknown type
    kv_heads: int | None  # attention.head_count_kv of this layer

    @property
    def routed_bytes_per_token(self) -> int | None:
        return None if self.bytes_per_expert is None else self.top_k * self.bytes_per_expert


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """A model, all its shards together. Sizes are bytes of tensor data; None where a type is unknown."""

    architecture: str
    shards: tuple[Shard, ...]
    tensors: tuple[ModelTensor, ...]  # in file order
    layers: tuple[Layer, ...]  # decode layers in order; prediction blocks are not among them
    prediction_blocks: tuple[int, ...]  # multi-token-prediction blocks present in the file
    overrides: Mapping[str, int]  # keys replaced by the caller
    notes: tuple[str, ...]

    def nbytes(self, *access: Access) -> int | None:
        """Bytes of all tensors read in one of these ways; of all tensors when none is given."""
        return _total(t.info.nbytes for t in self.tensors if not access or t.access in access)

    def max_nbytes(self, *access: Access) -> int:
        """As `nbytes`, with the room a tensor of unknown type has in the file as its size."""
        return sum(t.info.max_nbytes for t in self.tensors if not access or t.access in access)

    @property
    def shared_expert_bytes(self) -> int | None:
        """The part of always_used that is shared experts."""
        shared = (t for t in self.tensors if t.base in _SHARED_EXPERTS and t.access is Access.ALWAYS_USED)
        return _total(t.info.nbytes for t in shared)

    @property
    def routed_bytes_per_token(self) -> int | None:
        """Bytes of the experts one token chooses, over all layers."""
        return _total(layer.routed_bytes_per_token for layer in self.layers)

    def routed_bytes(self, layer: int) -> int:
        """Bytes of one expert in decode layer `layer`, 0 if it is dense; ModelError if unknown."""
        return _known(self.layers[layer].bytes_per_expert, f"an expert in block {self.layers[layer].block}")


def expected_distinct(experts: int, top_k: int, tokens: int) -> float:
    """Expected distinct experts of one layer after `tokens` uniform choices of k: E(1 - (1 - k/E)^T)."""
    return experts * (1 - (1 - top_k / experts) ** tokens) if experts else 0.0


def needed_bytes(layout: ModelLayout, expert_ids: npt.NDArray[np.integer[Any]]) -> int:
    """Least bytes to read for these choices: each distinct (layer, expert) slice once, always_used once.

    `expert_ids` is [token, layer, k]: decode layers in the order of `layout.layers`, -1 where there is no
    choice (dense layer). Rows of row_sparse tables are left out: they are a few KiB per token.
    """
    ids = np.asarray(expert_ids)
    if ids.ndim != 3 or ids.shape[1] != len(layout.layers):
        raise ModelError(
            f"expert ids have the shape {list(ids.shape)}, the model needs [token, {len(layout.layers)}, k]",
            where=shown(layout.shards[0].path),
            hint="trace this model again",
        )
    total = _known(layout.nbytes(Access.ALWAYS_USED), "the always used weights")
    for i, layer in enumerate(layout.layers):
        distinct = np.unique(ids[:, i])
        distinct = distinct[distinct >= 0]
        if distinct.size and distinct[-1] >= layer.experts:
            raise ModelError(
                f"expert {distinct[-1]} was chosen in block {layer.block}, which has {layer.experts} experts",
                where=shown(layout.shards[0].path),
                hint="trace this model again",
            )
        if distinct.size:
            total += distinct.size * layout.routed_bytes(i)
    return total


def read_model(path: Path, overrides: Mapping[str, int] | None = None) -> ModelLayout:
    """Read the layout of the model at `path`: a GGUF file, any shard of one, or a folder with one model.

    `overrides` replaces metadata as llama.cpp's --override-kv does; only `<architecture>.expert_used_count`,
    1 to the number of experts. Raises ModelError for a broken or incomplete model.
    """
    shards = read_shards(path)
    where = shown(shards[0].path)
    names = [(i, t, *_name_parts(t.name)) for i, s in enumerate(shards) for t in s.header.tensors]
    present = frozenset(block for _, _, block, *_ in names if block is not None)
    hp = read_hparams(
        shards[0].header.metadata,
        blocks_seen=max(present, default=-1) + 1,
        overrides=overrides or {},
        where=where,
    )
    nextn = frozenset(block for _, _, block, base, _ in names if base == "nextn" and block is not None)
    prediction = _prediction_blocks(hp, nextn, present)
    tied = all(t.name != "output.weight" for _, t, *_ in names)
    tensors = tuple(
        ModelTensor(
            info=info,
            shard=shard,
            access=_access(info, block, base, suffix, hp, prediction, tied, where),
            block=block,
            base=base,
        )
        for shard, info, block, base, suffix in names
    )
    layers = _layers(hp, tensors, prediction, where)
    layout = ModelLayout(
        architecture=hp.architecture,
        shards=shards,
        tensors=tensors,
        layers=layers,
        prediction_blocks=tuple(sorted(nextn)),
        overrides=MappingProxyType(dict(overrides or {})),
        notes=(
            *(note for s in shards for note in s.header.notes),
            *_remarks(hp, shards, layers, nextn, present),
        ),
    )
    _check_sums(layout, where)
    return layout


def _total(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for n in sizes:
        if n is None:
            return None
        total += n
    return total


def _known(size: int | None, what: str) -> int:
    if size is None:
        raise ModelError(
            f"the size of {what} is unknown", hint="moe-madv model info FILE names the tensor of unknown type"
        )
    return size


def _prediction_blocks(hp: HParams, nextn: frozenset[int], present: frozenset[int]) -> frozenset[int]:
    """Blocks that are no decode layers: those with nextn tensors, and announced ones that are absent."""
    announced = range(max(hp.n_blocks - hp.prediction_blocks, 0), hp.n_blocks)
    return nextn | {b for b in announced if b not in present}


def _access(
    info: TensorInfo,
    block: int | None,
    base: str,
    suffix: str,
    hp: HParams,
    prediction: frozenset[int],
    tied: bool,
    where: str,
) -> Access:
    if block in prediction or (block is not None and block >= hp.n_blocks) or base == "mtp":
        return Access.UNUSED
    if base in _EXPERTS and suffix in ("weight", "bias") and block is not None:
        _check_slices(info, hp.experts[block], 2 if suffix == "weight" else 1, where)
        return Access.ROUTED
    if base in _DENSE_FFN and suffix.partition(".")[0].isdigit():
        raise ModelError(
            f"tensor {info.name!r} holds one expert: an old layout that llama.cpp does not load any more",
            where=where,
            hint="convert the original weights again; the experts of a layer belong in one tensor",
        )
    # Without output.weight, token_embd is the output matrix too and is read whole.
    if base in _ROW_TABLES or (info.name == "token_embd.weight" and not tied):
        return Access.ROW_SPARSE
    return Access.ALWAYS_USED


def _check_slices(info: TensorInfo, experts: int, dim: int, where: str) -> None:
    """Routed tensors have one slice per expert along their last dimension, `dim`."""
    shape = (*info.shape, 1, 1, 1, 1)
    if experts == 0 or shape[dim] != experts or max(shape[dim + 1 :]) > 1:
        raise ModelError(
            f"tensor {info.name!r} has the shape {list(info.shape)}; "
            f"it needs one slice for each of the {experts} experts that expert_count states",
            where=where,
            hint="get the file again, or convert it again",
        )


def _layers(hp: HParams, tensors: tuple[ModelTensor, ...], prediction: frozenset[int], where: str) -> tuple[Layer, ...]:
    routed: dict[int, list[ModelTensor]] = {}
    for t in tensors:
        if t.access is Access.ROUTED and t.block is not None:
            routed.setdefault(t.block, []).append(t)
    tables = {t.block for t in tensors if t.base == "ffn_gate_tid2eid"}
    layers = []
    for block in (b for b in range(hp.n_blocks) if b not in prediction):
        experts, top_k = (hp.experts[block], hp.top_k[block]) if block in routed else (0, 0)
        if experts and not 1 <= top_k <= experts:
            raise ModelError(
                f"{shown(hp.architecture)}.expert_used_count is {top_k} in block {block} of {experts} experts",
                where=where,
                hint="get the file again, or convert it again",
            )
        routing = Routing.TABLE if block in tables else Routing.SCORE
        slices = (None if t.info.nbytes is None else t.info.nbytes // experts for t in routed.get(block, []))
        layers.append(
            Layer(
                block=block,
                routing=routing if experts else Routing.DENSE,
                experts=experts,
                top_k=top_k,
                bytes_per_expert=_total(slices),
                kv_heads=hp.kv_heads[block],
            )
        )
    return tuple(layers)


def _remarks(
    hp: HParams,
    shards: tuple[Shard, ...],
    layers: tuple[Layer, ...],
    nextn: frozenset[int],
    present: frozenset[int],
) -> tuple[str, ...]:
    notes = []
    if hp.prediction_blocks != len(nextn):
        notes.append(
            f"{hp.architecture}.nextn_predict_layers announces {hp.prediction_blocks} prediction block(s), "
            f"the file holds {len(nextn)}"
        )
    empty = [layer.block for layer in layers if layer.block not in present]
    if not any(s.header.tensors for s in shards):
        notes.append("the model has no tensors: metadata and vocabulary only")
    elif empty:
        notes.append(f"no tensors for block(s) {', '.join(map(str, empty))} of {hp.n_blocks}")
    beyond = sorted(b for b in present if b >= hp.n_blocks)
    if beyond:
        notes.append(f"block(s) {', '.join(map(str, beyond))} count as unused: block_count is {hp.n_blocks}")
    for what, n, limit in (
        ("experts", max(hp.experts, default=0), _LLAMA_MAX_EXPERTS),
        ("blocks", hp.n_blocks, _LLAMA_MAX_LAYERS),
    ):
        if n > limit:
            notes.append(f"{n} {what}: the pinned llama.cpp loads at most {limit}")
    if not all(s.header.native for s in shards):
        order = shards[0].header.endianness
        notes.append(f"{order}-endian file: it can be listed, but llama.cpp on this machine cannot run it")
    return tuple(notes)


def _check_sums(layout: ModelLayout, where: str) -> None:
    """Every byte of the tensor tables is in exactly one class; otherwise no figure can be trusted."""
    tables = sum(t.max_nbytes for s in layout.shards for t in s.header.tensors)
    classes = {a.value: layout.max_nbytes(a) for a in Access}
    if sum(classes.values()) != tables:
        raise ModelError(
            f"the classes {classes} do not add up to the {tables:,} bytes of the tensor tables",
            where=where,
            hint="report this with the output of `moe-madv model info FILE --json`",
        )


def _name_parts(name: str) -> tuple[int | None, str, str]:
    """(block, base, suffix): blk.3.ffn_up_exps.weight -> (3, ffn_up_exps, weight)."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) > 2 and _BLOCK_NUMBER.fullmatch(parts[1]):
        return int(parts[1]), parts[2], ".".join(parts[3:])
    return None, parts[0], ".".join(parts[1:])
