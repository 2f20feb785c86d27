"""Random quantised weights, made as bytes: valid blocks of a chosen magnitude without quantising anything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class _Format:
    """Where a block's scales are, and the rms of its elements when every scale is 1 and all else is random."""

    scales: slice  # leading float16 words; for MXFP4 the leading exponent byte
    unit_rms: float


# Mean squares: 21.5 of q - 8 for q in 0..15, 5461.5 of an int8, 34.25 / 4 of the values of MXFP4; in Q4_K,
# 1333.5 * 77.5 of scale * q for scale in 0..63 and 1333.5 of the minimum in 0..63. The two have random signs, so
# their product is 0 on average.
_FORMATS = {
    GGMLType.Q4_0: _Format(scales=slice(0, 1), unit_rms=math.sqrt(21.5)),
    GGMLType.Q8_0: _Format(scales=slice(0, 1), unit_rms=math.sqrt(5461.5)),
    GGMLType.Q4_K: _Format(scales=slice(0, 2), unit_rms=math.sqrt(1333.5 * 77.5 + 1333.5)),
    GGMLType.MXFP4: _Format(scales=slice(0, 1), unit_rms=math.sqrt(34.25 / 4)),
}
BLOCK_SIZE = {kind: GGML_QUANT_SIZES[kind][0] for kind in _FORMATS}

_SIGN_AND_LOW_MANTISSA = np.uint16(0x807F)
_E8M0_BIAS = 127


def random_blocks(bits: np.random.BitGenerator, shape: tuple[int, ...], kind: GGMLType, *, rms: float) -> NDArray[Any]:
    """Bytes of random weights [..., elements] as uint8 [..., row bytes].

    Their rms is `rms` within 1/8, for MXFP4 between half of it and all. Every bit is random but the leading ones
    of the scales, so nothing is infinite or NaN.
    """
    fmt, (block, block_bytes) = _FORMATS[kind], GGML_QUANT_SIZES[kind]
    n_blocks = math.prod(shape) // block
    nbytes = n_blocks * block_bytes
    data = bits.random_raw(-(-nbytes // 8)).astype("<u8", copy=False).view(np.uint8)[:nbytes]
    scale = rms / fmt.unit_rms
    if kind == GGMLType.MXFP4:
        data.reshape(n_blocks, block_bytes)[:, fmt.scales] = math.floor(math.log2(scale)) + _E8M0_BIAS
    else:
        words = data.view("<u2").reshape(n_blocks, block_bytes // 2)[:, fmt.scales]
        words &= _SIGN_AND_LOW_MANTISSA
        words |= np.float16(scale).view(np.uint16) & ~_SIGN_AND_LOW_MANTISSA
    return data.reshape(*shape[:-1], shape[-1] // block * block_bytes)
