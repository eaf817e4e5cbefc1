"""Q2_K: super-blocks of 256 values in 16 groups of 16, 2-bit integers with a 4-bit scale and minimum per group.

Block (84 bytes): 0-15 one byte per group, scale s in the low nibble and minimum t in the high one; 16-79 the integers;
80-81 f16 d; 82-83 f16 dmin. Value = (d * s) * q - (dmin * t).
Each half of the block (128 values) has 32 bytes of integers; bits 2k and 2k + 1 of byte j are q[32 * k + j].
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.kernel import search
from localllm.quant.pack import half_scale, planes


def dequantize(blocks: U8) -> F32:
    n = len(blocks)
    scale = half_scale(blocks, 80) * (blocks[:, :16] & 15)
    minimum = half_scale(blocks, 82) * (blocks[:, :16] >> 4)
    out = planes(blocks[:, 16:80].reshape(n, 2, 32), 2).reshape(n, 16, 16).astype(np.float32)
    out *= scale[:, :, None]
    out -= minimum[:, :, None]
    return out.reshape(n, 256)


quantize = search("k_quants", "q2_k", 256, 84)
