"""FP8 (E4M3): sign, 4 exponent bits (bias 7), 3 mantissa bits; maximum 448, no infinity. For the KV cache, not GGUF.

Source: Micikevicius et al., "FP8 formats for deep learning" (2022), the E4M3 encoding; 0x7F and 0xFF are NaN.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8

LARGEST = 448.0
_BIAS = np.float32(2.0**120)  # adjusts float32's exponent bias to this format's
_SUBNORMAL = np.float32(2.0**14)  # below this, float32 values are multiples of 2^-9, the smallest FP8 value


def dequantize(blocks: U8) -> F32:
    bits = blocks.astype(np.uint32)
    magnitude = ((bits & np.uint32(0x7F)) << np.uint32(20)).view(np.float32) * _BIAS
    magnitude[(bits & np.uint32(0x7F)) == 0x7F] = np.nan
    return np.where(bits & np.uint32(0x80), -magnitude, magnitude)


def quantize(x: F32, importance: F32 | None) -> U8:
    """Round to nearest, ties to even; magnitudes above 448 become 448, NaN stays NaN."""
    size = np.minimum(np.abs(x), np.float32(LARGEST))
    bits = size.view(np.uint32)
    normal = ((bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - np.uint32(960)
    small = (size + _SUBNORMAL).view(np.uint32) - _SUBNORMAL.view(np.uint32)
    code = np.where(np.isnan(x), np.uint32(0x7F), np.where(size < 2.0**-6, small, normal))
    return (code | np.where(np.signbit(x), np.uint32(0x80), np.uint32(0))).astype(np.uint8)
