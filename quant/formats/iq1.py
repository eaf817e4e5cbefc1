"""IQ1_S and IQ1_M: 256 values in 32 runs of 8; each run is one of 2048 ternary codebook points, shifted by +-1/8.

    IQ1_S (50 bytes)  0-1 f16 d; 2-33 low bytes of the point indices; 34-49 a little-endian word per 32 values: the
                      upper three bits of its four point indices from bit 0, scale s in bits 12-14, shift in bit 15
    IQ1_M (56 bytes)  0-31 low bytes of the point indices; 32-47 a nibble per run, low first: upper three bits of the
                      point number, shift in bit 3; 48-55 four little-endian words: 3-bit scales s, one per 16 values,
                      from bit 0, and in bits 12-15 the four nibbles of f16 d, lowest first

Value = d * (2 * s + 1) * (coordinate + shift); the shift is -1/8 if its bit is set, else +1/8.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.formats.grids import grid
from localllm.quant.formats.iq2 import words
from localllm.quant.kernel import search
from localllm.quant.pack import half_scale, planes

_SHIFT = np.float32(0.125)


def dequantize_iq1_s(blocks: U8) -> F32:
    n = len(blocks)
    word = words(blocks, 34, 50, "<u2")  # (n, 8)
    high = (word[:, :, None] >> np.array([0, 3, 6, 9], np.uint32)) & np.uint32(7)
    points = grid("IQ1S")[blocks[:, 2:34] | (high.reshape(n, 32) << np.uint32(8))]  # (n, 32, 8)
    shift = np.where(word >> np.uint32(15), -_SHIFT, _SHIFT)
    scale = half_scale(blocks, 0) * (
        np.float32(2) * ((word >> np.uint32(12)) & np.uint32(7)).astype(np.float32) + np.float32(1)
    )
    out = points.reshape(n, 8, 32) + shift[:, :, None]
    out *= scale[:, :, None]
    return out.reshape(n, 256)


def dequantize_iq1_m(blocks: U8) -> F32:
    n = len(blocks)
    word = words(blocks, 48, 56, "<u2")  # (n, 4)
    nibbles = (word >> np.uint32(12)) << np.array([0, 4, 8, 12], np.uint32)
    d = np.bitwise_or.reduce(nibbles, axis=1, keepdims=True).astype("<u2").view("<f2").astype(np.float32)
    s = ((word[:, :, None] >> np.array([0, 3, 6, 9], np.uint32)) & np.uint32(7)).reshape(n, 16)
    high = planes(blocks[:, 32:48, None], 4).reshape(n, 32)
    points = grid("IQ1S")[blocks[:, :32] | ((high & 7).astype(np.uint16) << np.uint16(8))]  # (n, 32, 8)
    out = points + np.where(high & 8, -_SHIFT, _SHIFT)[:, :, None]
    grouped = out.reshape(n, 16, 16)
    grouped *= (d * (np.float32(2) * s.astype(np.float32) + np.float32(1)))[:, :, None]
    return out.reshape(n, 256)


quantize_iq1_s = search("iq1", "iq1_s", 256, 50, book="IQ1S", weighted=True)
quantize_iq1_m = search("iq1", "iq1_m", 256, 56, book="IQ1S")
