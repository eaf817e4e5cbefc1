"""Q1_0 and Q2_0: one or two bits per value and one scale.

Q1_0 (18 bytes, 128 values): 0-1 f16 d; 2-17 bits, bit i of byte j is value 8 * j + i: d if set, else -d. Q2_0 (18
bytes, 64 values): 0-1 f16 d; 2-17 two-bit fields, bits 2i and 2i + 1 of byte j are q[4 * j + i]; value = d * (q - 1),
so -d, 0, d or 2 * d.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.pack import bits_of, half_bytes, half_scale, reciprocal, round_away, sequential_sum

_SHIFTS = np.array([0, 2, 4, 6], np.uint8)


def dequantize_q1_0(blocks: U8) -> F32:
    d = half_scale(blocks, 0)
    return np.where(bits_of(blocks[:, 2:]).view(np.bool_), d, -d)


def dequantize_q2_0(blocks: U8) -> F32:
    q = (blocks[:, 2:, None] >> _SHIFTS) & 3
    return (q.reshape(-1, 64).astype(np.float32) - np.float32(1)) * half_scale(blocks, 0)


def quantize_q1_0(x: F32, importance: F32 | None) -> U8:
    """Quantize with d = the mean magnitude; zero counts as positive. Importance is ignored, as in ggml."""
    blocks = x.reshape(-1, 128)
    d = sequential_sum(np.abs(blocks)) / np.float32(128)
    bits = np.packbits(blocks >= 0, axis=1, bitorder="little")
    return np.concatenate([half_bytes(d), bits], axis=1).reshape(len(x), -1)


def quantize_q2_0(x: F32, importance: F32 | None) -> U8:
    """Quantize with d = the largest magnitude, so 2 * d never occurs. Importance is ignored, as in ggml."""
    blocks = x.reshape(-1, 64)
    d = np.abs(blocks).max(axis=1, keepdims=True)
    q = (round_away(blocks * reciprocal(d)) + np.float32(1)).astype(np.uint8).reshape(-1, 16, 4)
    packed = np.bitwise_or.reduce(q << _SHIFTS, axis=2)
    return np.concatenate([half_bytes(d), packed], axis=1).reshape(len(x), -1)
