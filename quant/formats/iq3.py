"""IQ3_XXS and IQ3_S: 256 values in 64 runs of 4; each run is a codebook point with a sign per coordinate.

IQ3_XXS (98 bytes)  0-1 f16 d; 2-65 point indices; 66-97 a little-endian word per 32 values: four 7-bit sign codes
                    from bit 0 (8 values each, as in IQ2_XXS) and the scale s in bits 28-31;
                    value = d * (s + 1/2) / 2 * coordinate * sign
IQ3_S (110 bytes)   0-1 f16 d; 2-65 low bytes of the point indices; 66-73 their ninth bits, bit i of byte j for run
                    8 * j + i; 74-105 signs, bit i of byte j for value 8 * j + i; 106-109 scales, a nibble per 32
                    values, low first; value = d * (2 * s + 1) * coordinate * sign
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.formats.grids import grid
from localllm.quant.formats.iq2 import signs, signs_of_codes, words
from localllm.quant.kernel import search
from localllm.quant.pack import bits_of, half_scale, planes


def _values(points: F32, sign: F32, scale: F32) -> F32:
    """Multiply points (n, 64, 4) by the signs of 256 values and scales (n, 8): float32 (n, 256)."""
    out = points.reshape(-1, 8, 32) * sign.reshape(-1, 8, 32)
    out *= scale[:, :, None]
    return out.reshape(-1, 256)


def dequantize_iq3_xxs(blocks: U8) -> F32:
    word = words(blocks, 66, 98, "<u4")  # (n, 8)
    codes = (word[:, :, None] >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(127)
    s = (word >> np.uint32(28)).astype(np.float32)
    scale = half_scale(blocks, 0) * ((s + np.float32(0.5)) * np.float32(0.5))
    return _values(grid("IQ3XXS")[blocks[:, 2:66]], signs_of_codes(codes), scale)


def dequantize_iq3_s(blocks: U8) -> F32:
    index = blocks[:, 2:66] | (bits_of(blocks[:, 66:74]).astype(np.uint16) << np.uint16(8))
    s = planes(blocks[:, 106:110, None], 4).reshape(-1, 8).astype(np.float32)
    scale = half_scale(blocks, 0) * (np.float32(2) * s + np.float32(1))
    return _values(grid("IQ3S")[index], signs(blocks[:, 74:106]), scale)


quantize_iq3_xxs = search("iq2_iq3", "iq3_xxs", 256, 98, book="IQ3XXS")
quantize_iq3_s = search("iq2_iq3", "iq3_s", 256, 110, book="IQ3S")
