"""Q3_K: super-blocks of 256 values in 16 groups of 16, 3-bit signed integers with a signed 6-bit scale per group.

Block (110 bytes): 0-31 high bits; 32-95 low two bits, laid out as in Q2_K; 96-107 scales; 108-109 f16 d. Bit k of byte
j of the high bits belongs to q[32 * k + j]; if it is 0, 4 is subtracted: q = low - 4 + 4 * high. Scales: byte j (0-7)
holds the low nibbles of s[j] and s[j + 8]; bits 2k and 2k + 1 of byte 8 + j are the upper two bits of s[4 * k + j].
Value = (d * (s - 32)) * q.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.kernel import search
from localllm.quant.pack import half_scale, planes


def dequantize(blocks: U8) -> F32:
    n = len(blocks)
    s = planes(blocks[:, 96:104], 4).reshape(n, 16) | (planes(blocks[:, 104:108], 2).reshape(n, 16) << 4)
    scale = half_scale(blocks, 108) * (s.astype(np.float32) - np.float32(32))
    q = planes(blocks[:, :32], 1)  # (n, 8, 32)
    q <<= 2
    q |= planes(blocks[:, 32:96].reshape(n, 2, 32), 2).reshape(n, 8, 32)
    out = q.reshape(n, 16, 16).astype(np.float32)
    out -= np.float32(4)
    out *= scale[:, :, None]
    return out.reshape(n, 256)


quantize = search("k_quants", "q3_k", 256, 110)
