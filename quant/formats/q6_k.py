"""Q6_K: super-blocks of 256 values in 16 groups of 16, 6-bit integers with a signed 8-bit scale per group.

Block (210 bytes): 0-127 low nibbles; 128-191 upper two bits; 192-207 int8 scales s; 208-209 f16 d.
Value = (d * s) * (q - 32). Each half of the block (128 values) has 64 bytes of nibbles, low halves q[0..63] and high
halves q[64..127], and 32 bytes of upper bits: bits 2k and 2k + 1 of byte j belong to q[32 * k + j].
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.kernel import search
from localllm.quant.pack import half_scale, planes


def dequantize(blocks: U8) -> F32:
    n = len(blocks)
    q = planes(blocks[:, 128:192].reshape(n, 2, 32), 2).reshape(n, 256)
    q <<= 4
    q |= planes(blocks[:, :128].reshape(n, 2, 64), 4).reshape(n, 256)
    out = q.reshape(n, 16, 16).astype(np.float32)
    out -= np.float32(32)
    out *= (half_scale(blocks, 208) * blocks[:, 192:208].view(np.int8))[:, :, None]
    return out.reshape(n, 256)


quantize = search("k_quants", "q6_k", 256, 210)
