"""IQ4_NL and IQ4_XS: 4-bit indices into 16 unevenly spaced levels.

IQ4_NL (18 bytes, 32 values): 0-1 f16 d; 2-17 nibbles, low halves values 0-15, high halves values 16-31;
value = d * LEVELS[q].
IQ4_XS (136 bytes, 256 values in 8 groups of 32): 0-1 f16 d; 2-3 upper two bits of the group scales, group k at bits 2k
and 2k + 1 of the little-endian word; 4-7 low nibbles of the scales, group 2j in the low half of byte j, 2j + 1 in the
high half; 8-135 nibbles, 16 bytes per group as in IQ4_NL. Value = (d * (s - 32)) * LEVELS[q].
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.kernel import search
from localllm.quant.pack import half_scale, planes

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def dequantize_iq4_nl(blocks: U8) -> F32:
    values = LEVELS[planes(blocks[:, 2:], 4).reshape(-1, 32)]
    values *= half_scale(blocks, 0)
    return values


def dequantize_iq4_xs(blocks: U8) -> F32:
    n = len(blocks)
    low = planes(blocks[:, 4:8, None], 4).reshape(n, 8)
    high = planes(blocks[:, 2:4, None], 2).reshape(n, 8)
    s = (low | (high << 4)).astype(np.float32) - np.float32(32)
    values = LEVELS[planes(blocks[:, 8:].reshape(n, 8, 16), 4).reshape(n, 8, 32)]
    values *= (half_scale(blocks, 0) * s)[:, :, None]
    return values.reshape(n, 256)


quantize_iq4_nl = search("iq4", "iq4_nl", 32, 18)
quantize_iq4_xs = search("iq4", "iq4_xs", 256, 136)
