"""Read the header of one GGUF file, bounded in time and memory whatever the file claims.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the gguf package is not used:
it stops at the first tensor type it does not know and believes every count it is given.
"""

from __future__ import annotations

import math
import stat
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gguf import GGUFValueType

from toolkit.errors import ModelError
from toolkit.model.cursor import AGAIN, Cursor
from toolkit.model.ggml_types import tensor_nbytes, type_name
from toolkit.model.not_gguf import explain
from toolkit.model.text import shown

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 21  # a huge page; the largest published value seen is 16 KiB
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_KEYS = 1 << 14
_MAX_TENSORS = 1 << 20
_MAX_STRINGS = 1 << 22  # in all arrays together; vocabularies and merge lists stay below 2^20 each
# Longer values are stepped over: chat templates, vocabularies; a list with one value per layer never is.
_KEPT_STRING = 1 << 12  # bytes
_KEPT_STRINGS = 1 << 10  # elements
_KEPT_ARRAY = 1 << 16  # elements
_KEPT_TOTAL = 1 << 20  # elements of all kept arrays together; a string counts by its length too
_STRING_UNIT = 16  # bytes that count as one element

# The smallest possible entries: key (length, 1 byte, type, 1 byte), tensor (length, n_dims, type, offset).
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A value that was stepped over: its GGUF type, and its length in elements (array) or bytes (string)."""

    type: str
    length: int


@dataclass
class _Budget:
    """What the values of one header may still cost, so that many small ones cannot add up."""

    kept: int = _KEPT_TOTAL
    strings: int = _MAX_STRINGS


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]  # ggml order: ne0, the contiguous dimension, first
    type_id: int
    offset: int  # of the data, from the start of the file
    nbytes: int | None  # None: the type is unknown, or a row is not a whole number of its blocks
    max_nbytes: int  # nbytes, or the distance to the next tensor (or to the end of the file)

    @property
    def type_name(self) -> str:
        """ggml's name of the type, or `type N (unknown)`."""
        return type_name(self.type_id)


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """Everything of a GGUF file except the tensor data; the data is known to be complete."""

    version: int
    endianness: str  # "little" | "big"
    alignment: int
    metadata: Mapping[str, Any]  # bool, int, float, str, tuple of these, or Skipped
    tensors: tuple[TensorInfo, ...]
    data_start: int  # bytes from the start of the file
    file_size: int
    notes: tuple[str, ...]  # what a reader should know and what is no reason to stop

    @property
    def native(self) -> bool:
        """Whether this machine's byte order is the file's, which llama.cpp needs."""
        return self.endianness == sys.byteorder


def read_header(path: Path) -> GGUFHeader:
    """Read and check one file's header; the tensor data is only measured.

    Raises ModelError for a file that is not GGUF 2 or 3, contradicts itself, is cut short, or holds joined
    shards.
    """
    where = shown(path)
    try:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise ModelError("this is a folder, not a GGUF file", where=where, hint="name a file in it")
        if not stat.S_ISREG(info.st_mode):  # never opened: a FIFO would wait, a device may act
            raise ModelError("not a regular file", where=where, hint="give a GGUF file on disk")
        with path.open("rb") as file:
            return _read(Cursor(file, path, info.st_size))
    except FileNotFoundError as e:
        raise ModelError("no such file", where=where, hint="check the name; `ls` shows what is there") from e
    except OSError as e:
        raise ModelError(f"cannot be read: {e.strerror}", where=where, hint="check its permissions") from e


def _read(cur: Cursor) -> GGUFHeader:
    head = cur.file.read(512)
    if not head.startswith(MAGIC):
        if head and MAGIC.startswith(head):
            raise cur.error(f"the file ends inside its header after {len(head)} bytes", AGAIN)
        what, hint = explain(head, cur.size)
        raise ModelError(what, where=shown(cur.path), hint=hint)
    cur.file.seek(len(MAGIC))
    cur.pos = len(MAGIC)

    version = _read_version(cur)
    n_tensors, n_keys = cur.scalar("Q", "the tensor count"), cur.scalar("Q", "the key count")
    _check_count(cur, n_keys, "keys", _MIN_KEY_BYTES, _MAX_KEYS)
    _check_count(cur, n_tensors, "tensors", _MIN_TENSOR_BYTES, _MAX_TENSORS)

    metadata: dict[str, Any] = {}
    budget = _Budget()
    for i in range(n_keys):
        key = cur.name(f"key {i + 1} of {n_keys}")
        if not key or key in metadata:
            raise cur.error(f"key {i + 1} is {'a second ' + repr(key) if key else 'empty'}")
        metadata[key] = _read_value(cur, key, cur.scalar("I", f"the type of key {key!r}"), budget)
    alignment = _alignment(cur, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    table = _read_table(cur, n_tensors)
    header_end = cur.pos
    data_start = _align(header_end, alignment)
    tensors, notes = _place(cur, table, data_start, alignment)
    _check_complete(cur, tensors)
    notes += _check_tail(cur, max([header_end, *(t.offset + t.max_nbytes for t in tensors)]), alignment)
    return GGUFHeader(
        version=version,
        endianness="little" if cur.order == "<" else "big",
        alignment=alignment,
        metadata=MappingProxyType(metadata),
        tensors=tensors,
        data_start=data_start,
        file_size=cur.size,
        notes=tuple(notes),
    )


def _read_version(cur: Cursor) -> int:
    raw = cur.take(4, "the version")
    version = int.from_bytes(raw, "little")
    # The magic is the same in both byte orders; a small number in the upper half is a swapped one.
    if version and not version & 0xFFFF:
        cur.order = ">"
        version = int.from_bytes(raw, "big")
    if version in _VERSIONS:
        return version
    if version == 1:
        raise cur.error(
            "GGUF version 1 (August 2023) is not read by llama.cpp any more",
            "get a newer file of the model, or convert the original weights again",
        )
    raise cur.error(
        f"GGUF version {version} is unknown; this reader knows 2 and 3",
        "update moe-madv if the format is new; otherwise get the file again",
    )


def _check_count(cur: Cursor, count: int, what: str, smallest: int, limit: int) -> None:
    left = cur.size - cur.pos
    if count * smallest > left:
        raise cur.error(f"the header promises {count:,} {what}; the {left:,} bytes left cannot hold them")
    if count > limit:
        raise cur.error(f"the header promises {count:,} {what}; no model has more than {limit:,}")


def _read_value(cur: Cursor, key: str, kind: int, budget: _Budget) -> Any:
    what = f"the value of {key!r}"
    if kind in _SCALARS:
        return cur.scalar(_SCALARS[kind], what)
    if kind == _STRING:
        return _read_string(cur, what, budget)
    if kind != _ARRAY:
        raise cur.error(f"{what} has type {kind}, which GGUF does not define")
    kind, count = cur.scalar("I", what), cur.scalar("Q", what)
    limit = _KEPT_STRINGS if kind == _STRING else _KEPT_ARRAY
    keep = count <= min(limit, budget.kept) and not key.startswith("tokenizer.")
    if keep:
        budget.kept -= count
    if kind in _SCALARS:
        layout = f"{cur.order}{{}}{_SCALARS[kind]}"
        nbytes = count * struct.calcsize(layout.format(""))
        if keep:
            return struct.unpack(layout.format(count), cur.take(nbytes, what))
        cur.skip(nbytes, what)
    elif kind == _STRING:
        cur.need(8 * count, what)
        budget.strings -= count
        if budget.strings < 0:
            total = _MAX_STRINGS - budget.strings
            raise cur.error(f"with {what} the arrays hold {total:,} strings; no vocabulary is that large")
        if keep:
            return tuple(_read_string(cur, what, budget) for _ in range(count))
        cur.skip_strings(count, what)
    else:
        raise cur.error(f"{what} is an array of type {kind}, which GGUF does not allow")
    return Skipped(type=GGUFValueType(kind).name.lower(), length=count)


def _read_string(cur: Cursor, what: str, budget: _Budget) -> str | Skipped:
    length = cur.scalar("Q", what)
    cost = length // _STRING_UNIT
    if length > _KEPT_STRING or cost > budget.kept:
        cur.skip(length, what)
        return Skipped(type="string", length=length)
    budget.kept -= cost
    return cur.take(length, what).decode("utf-8", "backslashreplace")


def _alignment(cur: Cursor, value: Any) -> int:
    if type(value) is not int or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        raise cur.error(f"general.alignment is {value!r}; it must be a power of two up to {_MAX_ALIGNMENT:,}")
    return value


def _align(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


_Row = tuple[str, tuple[int, ...], int, int]  # name, shape, type, offset from the data start


def _read_table(cur: Cursor, n_tensors: int) -> list[_Row]:
    table: dict[str, _Row] = {}
    for i in range(n_tensors):
        name = cur.name(f"the name of tensor {i + 1} of {n_tensors}")
        what = f"the entry of tensor {name!r}"
        if name in table:
            raise cur.error(f"two tensors have the name {name!r}")
        n_dims = cur.scalar("I", what)
        if n_dims > _MAX_DIMS:
            raise cur.error(f"tensor {name!r} has {n_dims:,} dimensions; ggml has at most {_MAX_DIMS}")
        shape = struct.unpack(f"{cur.order}{n_dims}Q", cur.take(8 * n_dims, what))
        if max(shape, default=0) >= 1 << 63 or math.prod(shape) >= 1 << 63:
            raise cur.error(f"the shape {list(shape)} of tensor {name!r} overflows 63 bits")
        table[name] = (name, shape, cur.scalar("I", what), cur.scalar("Q", what))
    return list(table.values())


def _place(cur: Cursor, table: list[_Row], data_start: int, alignment: int) -> tuple[tuple[TensorInfo, ...], list[str]]:
    """Give every tensor its place. As in ggml, data follows the order of the table, without overlap."""
    tensors: list[TensorInfo] = []
    notes: list[str] = []
    used, exact = 0, True  # data bytes taken so far, and whether that is known or only a lower bound
    for i, (name, shape, type_id, offset) in enumerate(table):
        if offset % alignment:
            raise cur.error(f"tensor {name!r} starts at data byte {offset:,}, not a multiple of {alignment}")
        if offset < used:
            raise cur.error(
                f"tensor {name!r} starts at data byte {offset:,}, before the end of the tensor listed before it"
                f" ({used:,})"
            )
        if exact and offset > used:
            notes.append(f"{offset - used:,} unused bytes before {name!r}; llama.cpp refuses such a file")
        nbytes = tensor_nbytes(shape, type_id)
        limit = table[i + 1][3] if i + 1 < len(table) else cur.size - data_start
        tensor = TensorInfo(
            name=name,
            shape=shape,
            type_id=type_id,
            offset=data_start + offset,
            nbytes=nbytes,
            max_nbytes=max(limit - offset, 1) if nbytes is None else nbytes,
        )
        used, exact = (offset + 1, False) if nbytes is None else (_align(offset + nbytes, alignment), True)
        tensors.append(tensor)
        notes += _remarks(tensor)
    return tuple(tensors), notes


def _remarks(tensor: TensorInfo) -> list[str]:
    if not tensor.shape and tensor.nbytes is not None:
        return [f"tensor {tensor.name!r} has no dimensions: a single element"]
    if tensor.nbytes == 0:
        return [f"tensor {tensor.name!r} is empty: shape {list(tensor.shape)}"]
    if tensor.nbytes is None:
        why = tensor.type_name
        if "unknown" not in why:
            why += f", whose blocks do not divide rows of {tensor.shape[0] if tensor.shape else 1}"
        return [f"the size of tensor {tensor.name!r} is unknown: {why}; at most {tensor.max_nbytes:,} bytes"]
    return []


def _check_complete(cur: Cursor, tensors: tuple[TensorInfo, ...]) -> None:
    missing = max((t.offset + t.max_nbytes for t in tensors), default=0) - cur.size
    if missing > 0:
        first = next(t for t in tensors if t.offset + t.max_nbytes > cur.size)
        raise ModelError(
            f"the file is cut short: {missing:,} bytes of tensor data are missing, from tensor {first.name!r} on",
            where=shown(cur.path),
            hint=AGAIN,
        )


def _check_tail(cur: Cursor, end: int, alignment: int) -> list[str]:
    """Look at what follows the last tensor: nothing, padding, or a second file."""
    for at in (end, _align(end, alignment)):
        cur.file.seek(at)
        if cur.file.read(len(MAGIC)) == MAGIC:
            raise ModelError(
                "these are joined files: a second GGUF header follows the first one's data",
                where=f"{shown(cur.path)}, byte {at:,}",
                hint="keep the shards as separate files; `llama-gguf-split --merge` makes one file of them",
            )
    rest = cur.size - _align(end, alignment)
    return [f"{rest:,} bytes follow the last tensor and belong to none"] if rest > 0 else []
