"""Expert trace files: which experts each token took in each layer of a real run, appended as the run goes on.

Layout, little-endian: the magic `MOETRACE`, uint32 version, uint32 length of the header, the header as JSON padded
with spaces, then one record of fixed size per token: int32 token id, uint8 phase (0 prompt, 1 decode), three bytes
of zero, uint16 expert ids [layer, k] (65535: not recorded), and, if the header says so, float16 router weights
[layer, k]. A record that was cut off by a kill is at the end and is ignored; the next writer removes it.
"""

# History of the format, newest first:
# 1 - token, phase, ids, optional weights

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from toolkit.errors import ModelError
from toolkit.files import atomic_path
from toolkit.model import routing
from toolkit.model.eviction import Workload
from toolkit.model.layout import ModelLayout
from toolkit.model.text import shown

SUFFIX = ".moetrace"
FORMAT = 1

_MAGIC = b"MOETRACE"
_PREFIX = struct.Struct("<8sII")
_ALIGN = 16
_MAX_HEADER = 1 << 20
_MISSING = 0xFFFF
# routing.Trace holds ids as int16; far above any model.
_MAX_EXPERTS = 1 << 15
_MAX_ROW = 1 << 20  # layers * top_k
_BY_LAYER = ("blocks", "expert_bytes", "dense_bytes")  # fields of the header with a number for each layer, or none


@dataclass(frozen=True, kw_only=True)
class Header:
    """The model a trace was recorded with."""

    model: str  # file name
    layers: int  # those with experts
    experts: int
    top_k: int
    blocks: tuple[int, ...] = ()  # N of blk.N, by layer; empty: not known
    expert_bytes: tuple[int, ...] = ()  # of one expert, by layer; empty: not known
    dense_bytes: tuple[int, ...] = ()  # what every token reads, by layer
    weights: bool = False  # records hold the router's weights

    @property
    def record(self) -> np.dtype[Any]:
        """The type of one record."""
        shape = (self.layers, self.top_k)
        fields = [("token", "<i4"), ("phase", "u1"), ("zero", "V3"), ("experts", "<u2", shape)]
        return np.dtype([*fields, ("weights", "<f2", shape)] if self.weights else fields)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """A trace file as read. The records of a trace file stay on disk until they are used."""

    path: Path
    header: Header
    records: NDArray[Any]  # [token], of type header.record
    cut_bytes: int = 0  # of an unfinished record at the end

    @property
    def experts(self) -> NDArray[np.int16]:
        """Ids [token, layer, k], -1 where none was recorded."""
        ids = self.records["experts"]
        return np.where(ids == _MISSING, -1, ids.astype(np.int32)).astype(np.int16)

    @property
    def weights(self) -> NDArray[np.float32] | None:
        """The router's weights [token, layer, k], 0 where none was recorded."""
        return np.nan_to_num(self.records["weights"].astype(np.float32)) if self.header.weights else None

    def workload(self) -> Workload:
        """For statistics and caches: complete, as `routing.complete` fills it. Raises ModelError."""
        trace = routing.complete(self.experts, self.records["phase"], self.header.experts, path=self.path)
        return Workload(trace=trace, weights=self.weights)


class TraceWriter:
    """Appends tokens to a trace file, which it makes, or continues if it is of the same model; a context manager.

    Each append is one write, so that a kill cuts off at most the last tokens. Raises ModelError.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        if not path.exists():
            with atomic_path(path) as partial:
                partial.write_bytes(_prefix(header))
        found = _read(path)
        if found.header != header:
            raise ModelError(
                "the trace file is of another model or shape", where=path, hint="give another name, or remove it"
            )
        self._file: BinaryIO = path.open("r+b", buffering=0)
        self._file.truncate(path.stat().st_size - found.cut_bytes)
        self._file.seek(0, 2)

    def append(
        self,
        experts: ArrayLike,
        *,
        phase: int,
        tokens: Sequence[int] | None = None,
        weights: ArrayLike | None = None,
    ) -> None:
        """Add n tokens: ids [n, layer, k], -1 where not known; weights of the same shape if the header has them."""
        self._file.write(
            pack(
                self.header, np.asarray(experts), phase=phase, tokens=tokens, weights=weights, where=self.path
            ).tobytes()
        )

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def pack(
    header: Header,
    experts: NDArray[Any],
    *,
    phase: ArrayLike,
    tokens: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    where: object,
) -> NDArray[Any]:
    """Records [n] of ids [n, layer, k], a phase for all or for each, and the rest if known. Raises ModelError."""
    shape = (header.layers, header.top_k)
    if experts.ndim != 3 or experts.shape[1:] != shape or experts.dtype.kind not in "iu":
        raise ModelError(
            f"experts has shape {list(experts.shape)} and type {experts.dtype}", where=where, hint=_shape_hint(shape)
        )
    if experts.size and (experts.min() < -1 or experts.max() >= header.experts):
        raise ModelError(f"ids are {experts.min()}..{experts.max()}; the model has {header.experts}", where=where)
    if header.weights != (weights is not None):
        raise ModelError(f"the header says weights: {header.weights}, the tokens do not", where=where)
    records = np.zeros(len(experts), dtype=header.record)
    records["token"] = -1 if tokens is None else tokens
    records["phase"] = phase
    records["experts"] = np.where(experts < 0, _MISSING, experts)
    if weights is not None:
        records["weights"] = weights
    return records


def of_run(
    layout: ModelLayout, experts: NDArray[Any], tokens: Sequence[int], *, n_prompt: int, where: Path
) -> Recording:
    """What a run of the model selected: ids [token, decode layer, k], -1 where none was computed. Raises ModelError."""
    routed = [i for i, layer in enumerate(layout.layers) if layer.experts]
    if not routed:
        raise ModelError("no layer of the model has experts", where=layout.shards[0].path)
    layers = [layout.layers[i] for i in routed]
    sizes = [layer.bytes_per_expert for layer in layers]
    header = Header(
        model=shown(layout.shards[0].path.name),
        layers=len(layers),
        experts=max(layer.experts for layer in layers),
        top_k=experts.shape[2],
        blocks=tuple(layer.block for layer in layers),
        expert_bytes=() if None in sizes else tuple(size or 0 for size in sizes),
    )
    phase = np.arange(len(experts)) >= n_prompt
    records = pack(header, experts[:, routed], phase=phase, tokens=np.asarray(tokens), where=where)
    return Recording(path=where, header=header, records=records)


def _shape_hint(shape: tuple[int, int]) -> str:
    return f"give integers [token, {shape[0]}, {shape[1]}]"


def read(path: Path) -> Recording:
    """Read a trace file, or a recorded routing (.npz, see `routing.load_trace`). Raises ModelError."""
    _require_file(path)
    with path.open("rb") as f:
        magic = f.read(len(_MAGIC))
    return _read(path) if magic == _MAGIC else _read_npz(path)


def _require_file(path: Path) -> None:
    if not path.is_file():  # opening a FIFO would wait for a writer
        raise ModelError("not a file", where=path, hint="give a trace file or an .npz routing trace")


def write(recording: Recording, out: Path) -> None:
    """Write a whole recording, as .npz if the name ends so, else as a trace file. Replaces `out` atomically."""
    header = recording.header
    with atomic_path(out) as partial, partial.open("wb") as f:
        if out.suffix != ".npz":
            f.write(_prefix(header))
            f.write(recording.records.tobytes())
            return
        arrays: dict[str, Any] = {
            "experts": recording.experts,
            "phase": recording.records["phase"],
            "n_expert": np.int32(header.experts),
        }
        if header.weights:
            arrays["weights"] = recording.records["weights"]
        if np.any(recording.records["token"] >= 0):
            arrays["token"] = recording.records["token"]
        for name in _BY_LAYER:
            if getattr(header, name):
                arrays[name] = np.array(getattr(header, name), dtype=np.int64)
        np.savez_compressed(f, **arrays)


def _prefix(header: Header) -> bytes:
    text = json.dumps(asdict(header)).encode()
    text += b" " * (-(_PREFIX.size + len(text)) % _ALIGN)
    return _PREFIX.pack(_MAGIC, FORMAT, len(text)) + text


def _read(path: Path) -> Recording:
    _require_file(path)
    size = path.stat().st_size
    with path.open("rb") as f:
        prefix = f.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
            raise ModelError("not an expert trace file", where=path)
        _, version, length = _PREFIX.unpack(prefix)
        if version != FORMAT:
            raise ModelError(f"trace format {version}; this version reads {FORMAT}", where=path, hint="update moe-madv")
        text = f.read(min(length, _MAX_HEADER))
    if len(text) < length:
        raise ModelError("the header of the trace file is cut off", where=path)
    header = _header(text, path)
    start, item = _PREFIX.size + length, header.record.itemsize
    count, cut = divmod(size - start, item)
    records: NDArray[Any] = np.empty(0, dtype=header.record)
    if count:
        records = np.memmap(path, dtype=header.record, mode="r", offset=start, shape=(count,))
    return Recording(path=path, header=header, records=records, cut_bytes=cut)


def _header(text: bytes, path: Path) -> Header:
    """Check every field: the file comes from outside, and the sizes decide what is mapped."""
    try:
        raw = json.loads(text)
        for name in _BY_LAYER:
            raw[name] = tuple(raw[name])
        header = Header(**raw)
        counts = (header.layers, header.experts, header.top_k)
        fine = (
            all(type(n) is int and n > 0 for n in counts)
            and header.experts <= _MAX_EXPERTS
            and header.top_k <= header.experts
            and header.layers * header.top_k <= _MAX_ROW
            and type(header.weights) is bool
            and isinstance(header.model, str)
            and all(len(getattr(header, name)) in (0, header.layers) for name in _BY_LAYER)
            and all(type(n) is int for name in _BY_LAYER for n in getattr(header, name))
        )
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ModelError(f"the header of the trace file is broken: {e}", where=path) from e
    if not fine:
        raise ModelError("the header of the trace file says what cannot be", where=path)
    return header


def _read_npz(path: Path) -> Recording:
    trace = routing.load_trace(path)  # refuses what is no trace, with the reason
    with np.load(path, allow_pickle=False) as arrays:
        experts = np.asarray(arrays["experts"], dtype=np.int64)
        phase = np.asarray(arrays["phase"])
        weights = np.asarray(arrays["weights"]) if "weights" in arrays else None
        tokens = np.asarray(arrays["token"]) if "token" in arrays else None
        by_layer = {name: tuple(int(n) for n in np.ravel(arrays[name])) if name in arrays else () for name in _BY_LAYER}
    header = Header(
        model=path.stem,
        layers=experts.shape[1],
        experts=trace.n_expert,
        top_k=trace.top_k,
        weights=weights is not None,
        **by_layer,
    )
    if weights is not None and weights.shape != experts.shape:
        raise ModelError(f"weights has shape {list(weights.shape)}, experts {list(experts.shape)}", where=path)
    if tokens is not None and (tokens.shape != phase.shape or tokens.dtype.kind not in "iu"):
        raise ModelError(f"token has shape {list(tokens.shape)} and type {tokens.dtype}", where=path)
    if wrong := [name for name in _BY_LAYER if len(by_layer[name]) not in (0, header.layers)]:
        raise ModelError(f"{' and '.join(wrong)} must have one number for each of {header.layers} layers", where=path)
    records = pack(header, experts, phase=phase, tokens=tokens, weights=weights, where=path)
    return Recording(path=path, header=header, records=records)
