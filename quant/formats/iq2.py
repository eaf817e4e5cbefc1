"""IQ2_XXS, IQ2_XS and IQ2_S: 256 values in 32 runs of 8; each run is a codebook point with a sign per coordinate.

    IQ2_XXS (66 bytes)  0-1 f16 d; 2-65 eight groups of 32 values: 4 bytes of point indices, then a little-endian word
                        with four 7-bit sign codes from bit 0 and the group's scale s in bits 28-31
    IQ2_XS (74 bytes)   0-1 f16 d; 2-65 a word per run: point number in bits 0-8, sign code in 9-15; 66-73 scales, a
                        nibble per 16 values, low first
    IQ2_S (82 bytes)    0-1 f16 d; 2-33 low bytes of the point indices; 34-65 signs, a byte per run, bit i of
                        coordinate i; 66-73 upper two bits of the point indices, bits 2k and 2k + 1 of byte j for run
                        4 * j + k; 74-81 scales as in IQ2_XS

Value = d * (s + 1/2) / 4 * coordinate * sign. A 7-bit sign code holds the signs of coordinates 0-6; the eighth sign
makes the number of minus signs even.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.quant.format import F32, U8
from localllm.quant.formats.grids import grid
from localllm.quant.kernel import search
from localllm.quant.pack import bits_of, half_scale, planes


def signs(bits: U8) -> F32:
    """Return -1 where a bit is set, else +1: uint8 (...) -> float32 (..., 8)."""
    return np.float32(1) - np.float32(2) * bits_of(bits[..., None]).astype(np.float32)


def signs_of_codes(codes: NDArray[np.unsignedinteger]) -> F32:
    """Return the signs (..., 8) of 7-bit sign codes (...); the eighth makes the number of minus signs even."""
    low = codes.astype(np.uint8)
    parity = low ^ (low >> np.uint8(4))
    parity ^= parity >> np.uint8(2)
    parity ^= parity >> np.uint8(1)
    return signs(low | (parity << np.uint8(7)))


def words(blocks: U8, start: int, stop: int, dtype: str) -> NDArray[np.uint32]:
    """Return the little-endian words of `dtype` in bytes start..stop of every block, as uint32 (n, words)."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype).astype(np.uint32)


def _values(points: F32, sign: F32, scale: F32) -> F32:
    """Multiply points and signs (n, 32, 8) by scales (n, groups): float32 (n, 256)."""
    n, groups = scale.shape
    out = points * sign
    grouped = out.reshape(n, groups, -1)
    grouped *= scale[:, :, None]
    return out.reshape(n, 256)


def _scale(blocks: U8, s: NDArray[np.unsignedinteger]) -> F32:
    return half_scale(blocks, 0) * ((s.astype(np.float32) + np.float32(0.5)) * np.float32(0.25))


def _nibble_scales(blocks: U8, at: int) -> F32:
    return _scale(blocks, planes(blocks[:, at : at + 8, None], 4).reshape(-1, 16))


def dequantize_iq2_xxs(blocks: U8) -> F32:
    n = len(blocks)
    groups = blocks[:, 2:].reshape(n, 8, 8)
    word = words(blocks, 2, 66, "<u4")[:, 1::2]  # (n, 8)
    codes = (word[:, :, None] >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(127)
    points = grid("IQ2XXS")[groups[:, :, :4].reshape(n, 32)]
    return _values(points, signs_of_codes(codes.reshape(n, 32)), _scale(blocks, word >> np.uint32(28)))


def dequantize_iq2_xs(blocks: U8) -> F32:
    word = words(blocks, 2, 66, "<u2")  # (n, 32)
    points = grid("IQ2XS")[word & np.uint32(511)]
    return _values(points, signs_of_codes(word >> np.uint32(9)), _nibble_scales(blocks, 66))


def dequantize_iq2_s(blocks: U8) -> F32:
    high = planes(blocks[:, 66:74, None], 2).reshape(-1, 32).astype(np.uint16)
    points = grid("IQ2S")[blocks[:, 2:34] | (high << np.uint16(8))]
    return _values(points, signs(blocks[:, 34:66]), _nibble_scales(blocks, 74))


quantize_iq2_xxs = search("iq2_iq3", "iq2_xxs", 256, 66, book="IQ2XXS", weighted=True)
quantize_iq2_xs = search("iq2_iq3", "iq2_xs", 256, 74, book="IQ2XS", weighted=True)
quantize_iq2_s = search("iq2_iq3", "iq2_s", 256, 82, book="IQ2S")
