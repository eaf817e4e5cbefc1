"""Q4_K and Q5_K: super-blocks of 256 values in 8 groups of 32 with a 6-bit scale and a 6-bit minimum per group.

    Q4_K (144 bytes)  0-1 f16 d; 2-3 f16 dmin; 4-15 scales and minimums; 16-143 nibbles
    Q5_K (176 bytes)  0-1 f16 d; 2-3 f16 dmin; 4-15 scales and minimums; 16-47 fifth bits; 48-175 nibbles

Value = (d * s) * q - (dmin * t). Each run of 64 values has 32 bytes of nibbles: low halves q[0..31], high halves
q[32..63]. Bit k of byte j of the fifth bits belongs to q[32 * k + j]. The twelve bytes b of scales s and minimums t:
s[j] = b[j] & 63 and t[j] = b[j + 4] & 63 for groups j = 0-3; for groups 4-7 the low nibble of b[j + 4] and the top two
bits of b[j - 4] make s[j], the high nibble of b[j + 4] and the top two bits of b[j] make t[j].
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.kernel import search
from localllm.quant.pack import half_scale, planes


def scales_and_minimums(b: U8) -> tuple[U8, U8]:
    """Return the 6-bit scales and minimums, (n, 8) each, from their twelve bytes (n, 12)."""
    first, second, third = b[:, 0:4], b[:, 4:8], b[:, 8:12]
    s = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    t = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return s, t


def _values(blocks: U8, q: U8) -> F32:
    s, t = scales_and_minimums(blocks[:, 4:16])
    out = q.reshape(-1, 8, 32).astype(np.float32)
    out *= (half_scale(blocks, 0) * s)[:, :, None]
    out -= (half_scale(blocks, 2) * t)[:, :, None]
    return out.reshape(-1, 256)


def _nibbles(blocks: U8, at: int) -> U8:
    return planes(blocks[:, at : at + 128].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)


def dequantize_q4_k(blocks: U8) -> F32:
    return _values(blocks, _nibbles(blocks, 16))


def dequantize_q5_k(blocks: U8) -> F32:
    q = planes(blocks[:, 16:48], 1)  # (n, 8, 32)
    q <<= 4
    q |= _nibbles(blocks, 48)
    return _values(blocks, q)


quantize_q4_k = search("k_quants", "q4_k", 256, 144)
quantize_q5_k = search("k_quants", "q5_k", 256, 176)
