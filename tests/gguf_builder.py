"""Write small GGUF files for tests, valid ones and every kind of wrong one.

A file is described as data first (`Gguf`), so that a test can change one thing and write it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

U16, U32, I32, BOOL, STRING, ARRAY, U64 = 2, 4, 5, 7, 8, 9, 10
F32, I32_TENSOR = 0, 26
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass
class T:
    """A tensor: its bytes in the file are `nbytes`, at `offset` if given, else after the one before."""

    name: str | bytes
    shape: list[int]
    type: int = F32
    nbytes: int | None = None  # None: as F32
    offset: int | None = None

    def size(self) -> int:
        if self.nbytes is not None:
            return self.nbytes
        product = 4
        for n in self.shape:
            product *= n
        return product


@dataclass
class Gguf:
    """A whole file; the counts may lie. An array value is (element type, [values])."""

    keys: list[tuple[str | bytes, int, Any]] = field(default_factory=list)
    tensors: list[T] = field(default_factory=list)
    version: int = 3
    order: str = "<"
    alignment: int = 32
    n_keys: int | None = None
    n_tensors: int | None = None
    magic: bytes = b"GGUF"

    def _pack(self, code: str, *values: Any) -> bytes:
        return struct.pack(self.order + code, *values)

    def _text(self, value: str | bytes) -> bytes:
        raw = value.encode("utf-8") if isinstance(value, str) else value
        return self._pack("Q", len(raw)) + raw

    def _value(self, kind: int, value: Any) -> bytes:
        if kind == STRING:
            return self._text(value)
        if kind == ARRAY:
            element, values = value
            return self._pack("IQ", element, len(values)) + b"".join(self._value(element, v) for v in values)
        return self._pack(_CODES[kind], value)

    def _padding(self, n: int) -> int:
        return -n % self.alignment

    def data_bytes(self) -> int:
        """Bytes of the data section, every tensor padded."""
        return sum(t.size() + self._padding(t.size()) for t in self.tensors)

    def encode(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        out = bytearray(self.magic + self._pack("IQQ", self.version, n_tensors, n_keys))
        for key, kind, value in self.keys:
            out += self._text(key) + self._pack("I", kind) + self._value(kind, value)
        free = 0
        for t in self.tensors:
            out += self._text(t.name) + self._pack("I", len(t.shape)) + self._pack(f"{len(t.shape)}Q", *t.shape)
            out += self._pack("IQ", t.type, free if t.offset is None else t.offset)
            free += t.size() + self._padding(t.size())
        return bytes(out) + bytes(self._padding(len(out)) + free)

    def write(self, path: Path, cut: int | None = None) -> Path:
        """Write the file, or only its first `cut` bytes."""
        path.write_bytes(self.encode()[:cut])
        return path

    def tensor(self, name: str) -> T:
        return next(t for t in self.tensors if t.name == name)

    def drop(self, wanted: Callable[[str], bool]) -> None:
        self.tensors = [t for t in self.tensors if not wanted(str(t.name))]


def moe(
    *,
    layers: int = 4,
    experts: int = 8,
    top_k: int = 2,
    width: int = 64,
    ff: int = 32,
    merged: bool = False,
    shared: bool = True,
    dense: int = 1,
    arch: str = "qwen3moe",
) -> Gguf:
    """A tiny F32 Mixture-of-Experts model without vocabulary: `dense` dense layers, then routed ones."""
    keys: list[tuple[str | bytes, int, Any]] = [("general.architecture", STRING, arch)]
    for key, value in (
        ("block_count", layers),
        ("embedding_length", width),
        ("expert_count", experts),
        ("expert_used_count", top_k),
        ("leading_dense_block_count", dense),
    ):
        keys.append((f"{arch}.{key}", U32, value))
    tensors = [T("token_embd.weight", [width, 16])]
    up, down = [width, ff], [ff, width]
    for i in range(layers):
        parts = {"attn_norm": [width]}
        if i < dense:
            parts |= {"ffn_gate": up, "ffn_up": up, "ffn_down": down}
        else:
            parts["ffn_gate_inp"] = [width, experts]
            if merged:
                parts["ffn_gate_up_exps"] = [width, 2 * ff, experts]
            else:
                parts |= {"ffn_gate_exps": [*up, experts], "ffn_up_exps": [*up, experts]}
            parts["ffn_down_exps"] = [*down, experts]
            if shared:
                parts |= {"ffn_gate_shexp": up, "ffn_up_shexp": up, "ffn_down_shexp": down}
        tensors += [T(f"blk.{i}.{base}.weight", shape) for base, shape in parts.items()]
    return Gguf(keys=keys, tensors=tensors)


def split(model: Gguf, folder: Path, stem: str, counts: list[int], **extra: Any) -> list[Path]:
    """Write `model` as shards with `counts[i]` tensors each; later shards carry only the split keys."""
    paths, start = [], 0
    for i, n in enumerate(counts):
        keys: list[tuple[str | bytes, int, Any]] = [
            ("split.no", U16, extra.get("numbers", range(len(counts)))[i]),
            ("split.count", U16, extra.get("count", len(counts))),
            ("split.tensors.count", I32, extra.get("total", len(model.tensors))),
        ]
        shard = Gguf(keys=(model.keys if i == 0 else []) + keys, tensors=model.tensors[start : start + n])
        paths.append(shard.write(folder / f"{stem}-{i + 1:05d}-of-{len(counts):05d}.gguf"))
        start += n
    return paths
