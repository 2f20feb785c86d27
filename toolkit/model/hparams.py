"""The keys of a model that decide how its tensors are read; `<architecture>.` is their prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import ModelError
from toolkit.model.gguf_header import Skipped
from toolkit.model.text import shown

_MAX_BLOCKS = 1 << 16  # what a header may claim before it is called damaged


@dataclass(frozen=True, kw_only=True)
class HParams:
    """Keys that may hold one number or one per block are always tuples of one value per block."""

    architecture: str
    n_blocks: int  # block_count, prediction blocks included
    experts: tuple[int, ...]  # 0: none
    top_k: tuple[int, ...]  # experts per token
    kv_heads: tuple[int | None, ...]  # attention.head_count_kv; None: not stated
    prediction_blocks: int  # nextn_predict_layers: how many are announced


def read_hparams(metadata: Mapping[str, Any], *, blocks_seen: int, overrides: Mapping[str, int], where: str) -> HParams:
    """Read and check the keys; `blocks_seen` stands in for an absent block_count.

    Raises ModelError for a missing architecture, a wrong type or length, or an override out of range.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        kind = metadata.get("general.type", "unknown")
        raise ModelError(
            f"no general.architecture: this GGUF file is not a language model (general.type: {shown(str(kind))})",
            where=where,
            hint="give the model file itself",
        )
    keys = _Keys(metadata, architecture, where)
    n_blocks = keys.number("block_count", blocks_seen)
    if n_blocks > _MAX_BLOCKS:
        raise keys.error("block_count", f"is {n_blocks:,}; no model has that many blocks")
    keys.per_block("feed_forward_length", n_blocks, None)  # only to check its length
    experts = keys.per_block("expert_count", n_blocks, 0)
    top_k = keys.per_block("expert_used_count", n_blocks, 0)
    for key, value in overrides.items():
        top_k = (_checked_override(key, value, architecture, max(experts, default=0), where),) * n_blocks
    return HParams(
        architecture=architecture,
        n_blocks=n_blocks,
        experts=experts,
        top_k=top_k,
        kv_heads=keys.per_block("attention.head_count_kv", n_blocks, None),
        prediction_blocks=keys.number("nextn_predict_layers", 0),
    )


def _checked_override(key: str, value: int, architecture: str, experts: int, where: str) -> int:
    allowed = f"{shown(architecture)}.expert_used_count"
    if experts == 0:
        raise ModelError(f"cannot override {key}: this model has no experts", where=where, hint="leave it out")
    if key != f"{architecture}.expert_used_count" or not 1 <= value <= experts:
        raise ModelError(
            f"cannot override {key}={value}: this model takes {allowed} from 1 to {experts}",
            where=where,
            hint=f"--override {allowed}={max(experts // 2, 1)}",
        )
    return value


class _Keys:
    def __init__(self, metadata: Mapping[str, Any], architecture: str, where: str) -> None:
        self.metadata, self.architecture, self.where = metadata, architecture, where

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(
            f"{shown(self.architecture)}.{key} {problem}",
            where=self.where,
            hint="get the file again, or convert it again",
        )

    def number(self, key: str, default: int) -> int:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if type(value) is not int or value < 0:
            raise self.error(key, f"is {value!r}; it must be a number, 0 or more")
        return value

    def per_block(self, key: str, n_blocks: int, default: Any) -> tuple[Any, ...]:
        value = self.metadata.get(f"{self.architecture}.{key}")
        if value is None:
            return (default,) * n_blocks
        if isinstance(value, Skipped):
            raise self.error(key, f"has {value.length:,} values, the model has {n_blocks} blocks")
        values = value if isinstance(value, tuple) else (value,) * n_blocks
        if len(values) != n_blocks:
            raise self.error(key, f"has {len(values)} values, the model has {n_blocks} blocks")
        if any(type(v) is not int or v < 0 for v in values):
            raise self.error(key, "must hold numbers, 0 or more")
        return values
