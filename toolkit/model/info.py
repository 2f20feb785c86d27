"""Print a model's layout: as JSON for tools, as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from toolkit.model.layout import Access, Layer, ModelLayout, Routing, expected_distinct
from toolkit.model.text import shown

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_LABELS = {
    Access.ALWAYS_USED: "always used",
    Access.ROUTED: "routed",
    Access.ROW_SPARSE: "row-sparse",
    Access.UNUSED: "unused",
}


def as_json(layout: ModelLayout, tokens: int) -> dict[str, Any]:
    """Sizes in bytes of tensor data, null where a tensor type is unknown; `tokens` is for `expected`.

    `bytes_at_most` counts a tensor of unknown type with the room it has in the file.
    """
    routed = [layer for layer in layout.layers if layer.experts]
    first = layout.shards[0].header
    return {
        "file": str(layout.shards[0].path),
        "architecture": layout.architecture,
        "layers": len(layout.layers),
        "routed_layers": len(routed),
        "experts": _one([layer.experts for layer in routed]),
        "top_k": _one([layer.top_k for layer in routed]),
        "tensors": len(layout.tensors),
        "bytes": {"total": layout.nbytes()} | {a.value: layout.nbytes(a) for a in Access},
        "bytes_at_most": {"total": layout.max_nbytes()} | {a.value: layout.max_nbytes(a) for a in Access},
        "bytes_per_expert": _one([layer.bytes_per_expert for layer in routed]),
        "routed_bytes_per_token": layout.routed_bytes_per_token,
        "always_used_bytes_per_token": layout.nbytes(Access.ALWAYS_USED),
        "shared_expert_bytes": layout.shared_expert_bytes,
        "expected": {"tokens": tokens, **_expected(routed, tokens)},
        "prediction_blocks": list(layout.prediction_blocks),
        "overrides": dict(layout.overrides),
        "format": {"version": first.version, "endianness": first.endianness, "alignment": first.alignment},
        "shards": [
            {
                "file": str(s.path),
                "file_size": s.header.file_size,
                "data_start": s.header.data_start,
                "tensors": len(s.header.tensors),
                "bytes": _sum([t.nbytes for t in s.header.tensors]),
            }
            for s in layout.shards
        ],
        "layer_list": [
            {
                "block": layer.block,
                "routing": layer.routing.value,
                "experts": layer.experts,
                "top_k": layer.top_k,
                "bytes_per_expert": layer.bytes_per_expert,
                "kv_heads": layer.kv_heads,
            }
            for layer in layout.layers
        ],
        "unknown_types": [
            {"tensor": t.info.name, "type": t.info.type_name, "at_most_bytes": t.info.max_nbytes}
            for t in layout.tensors
            if t.info.nbytes is None
        ],
        "notes": list(layout.notes),
    }


def as_text(layout: ModelLayout, tokens: int) -> str:
    """A table for people: one fact per line, sizes exact and rounded."""
    data = as_json(layout, tokens)
    routed = [layer for layer in layout.layers if layer.experts]
    fmt, first = data["format"], layout.shards[0]
    order = f"{fmt['endianness']}-endian, alignment {fmt['alignment']}"
    shards = f", {len(layout.shards)} shards" if len(layout.shards) > 1 else ""
    rows = [
        ("file", shown(first.path)),
        ("format", f"GGUF {fmt['version']}, {order}, {data['tensors']} tensors{shards}, complete"),
        ("architecture", shown(layout.architecture)),
        ("layers", f"{len(layout.layers)}: {len(layout.layers) - len(routed)} dense, {len(routed)} MoE"),
    ]
    if layout.tensors:
        rows += [("", line) for line in _layer_lines(layout.layers)]
    if layout.prediction_blocks:
        blocks = ", ".join(map(str, layout.prediction_blocks))
        rows.append(("", f"block {blocks}: predicts further tokens, not read at decode"))
    rows += [("override", f"{key} = {value}") for key, value in layout.overrides.items()]
    for label, key in (("total", "total"), *((f"  {label}", a.value) for a, label in _LABELS.items())):
        rows.append((label, _size(data["bytes"][key], data["bytes_at_most"][key])))
    rows.append(("shared experts", _size(layout.shared_expert_bytes) + "  (part of always used)"))
    if routed:
        expected = data["expected"]
        rows.append(("per token", _size(layout.routed_bytes_per_token) + "  of routed experts"))
        if tokens > 1:
            distinct = expected["distinct_experts"]
            each = f"{distinct:.2f}" if isinstance(distinct, float) else "several"
            rows.append((f"{tokens:,} tokens", f"{_size(expected['routed_bytes'])}  of {each} experts per layer"))
    if len(layout.shards) > 1:
        rows += [("shard", f"{_size(s['bytes'])}  {shown(s['file'])}") for s in data["shards"]]
    rows += [("note", shown(note)) for note in layout.notes]
    return "\n".join(f"{label:<14}  {value}".rstrip() for label, value in rows)


def _layer_lines(layers: Sequence[Layer]) -> list[str]:
    """Neighbouring layers of one kind as one line."""
    lines = []
    for _, same in groupby(layers, key=lambda x: (x.routing, x.experts, x.top_k, x.bytes_per_expert)):
        group = list(same)
        blocks = f"block {group[0].block}" + (f"-{group[-1].block}" if len(group) > 1 else "")
        layer = group[0]
        if layer.routing is Routing.DENSE:
            lines.append(f"{blocks}: dense")
            continue
        by = "score" if layer.routing is Routing.SCORE else "token table"
        size = _size(layer.bytes_per_expert)
        lines.append(f"{blocks}: routed by {by}, {layer.experts} experts, top {layer.top_k}, {size} per expert")
    return lines


def _expected(routed: Sequence[Layer], tokens: int) -> dict[str, Any]:
    """Distinct experts per layer, and their bytes, if `tokens` tokens chose independently and uniformly."""
    distinct = [expected_distinct(layer.experts, layer.top_k, tokens) for layer in routed]
    sizes = [layer.bytes_per_expert for layer in routed]
    known = None if None in sizes else sum(d * (n or 0) for d, n in zip(distinct, sizes, strict=True))
    return {"distinct_experts": _one(distinct), "routed_bytes": known if known is None else round(known)}


def _one(values: Sequence[Any]) -> Any:
    """The value all layers share, 0 without layers, the list where they differ."""
    if not values:
        return 0
    return values[0] if len(set(values)) == 1 else list(values)


def _sum(sizes: Sequence[int | None]) -> int | None:
    return None if None in sizes else sum(n or 0 for n in sizes)


def _size(n: int | None, at_most: int | None = None) -> str:
    if n is None:
        return "unknown" if at_most is None else f"unknown, at most {_size(at_most)}"
    for unit, name in _UNITS:
        if n >= unit:
            return f"{n:,} B ({n / unit:.1f} {name})"
    return f"{n:,} B"
