"""Names and sizes of ggml's tensor types; numbers that are not in the table are allowed and have no size."""

from __future__ import annotations

import math

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

# Type number -> (name, elements per block, bytes per block), from ggml.h and ggml-common.h; the gguf package
# knows the types up to its own release.
_NEWER = {39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18)}
_TYPES: dict[int, tuple[str, int, int]] = _NEWER | {
    int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType
}


def type_name(type_id: int) -> str:
    """ggml's name of a tensor type, or `type N (unknown)`."""
    return _TYPES[type_id][0] if type_id in _TYPES else f"type {type_id} (unknown)"


def tensor_nbytes(shape: tuple[int, ...], type_id: int) -> int | None:
    """Bytes of a tensor; None if the type is unknown or its blocks do not divide a row."""
    if 0 in shape:
        return 0
    if type_id not in _TYPES:
        return None
    _, block, block_bytes = _TYPES[type_id]
    row = shape[0] if shape else 1
    return None if row % block else math.prod(shape) // block * block_bytes
