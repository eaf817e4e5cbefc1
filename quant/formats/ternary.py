"""TQ1_0 and TQ2_0: super-blocks of 256 ternary values, d * (t - 1) with t in 0, 1, 2 (BitNet b1.58, TriLM).

TQ1_0 (54 bytes): 0-31 hold values 0-159, five per byte; 32-47 values 160-239, five per byte; 48-51 values 240-255, four
per byte; 52-53 f16 d. Within each run of w bytes, the k-th digit of byte j is value k * w + j of the run. A byte is
ceil(256 / 243 * the base-3 number of its digits), first digit most significant, so the k-th digit is
((byte * 3**k mod 256) * 3) >> 8.

TQ2_0 (66 bytes): 0-63 two-bit fields; 64-65 f16 d. Each half of the block (128 values) has 32 bytes; bits 2k and
2k + 1 of byte j are value 32 * k + j.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.pack import half_bytes, half_scale, join_bits, planes, reciprocal, round_away

_RUNS = ((0, 32, 5), (32, 48, 5), (48, 52, 4))  # first byte, last byte + 1, digits per byte
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)


def dequantize_tq1_0(blocks: U8) -> F32:
    n = len(blocks)
    parts = [blocks[:, None, start:stop] * _POWERS[:digits, None] for start, stop, digits in _RUNS]  # modulo 256
    shifted = np.concatenate([part.reshape(n, -1) for part in parts], axis=1)  # (n, 256)
    t = (shifted.astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    return (t.astype(np.float32) - np.float32(1)) * half_scale(blocks, 52)


def dequantize_tq2_0(blocks: U8) -> F32:
    n = len(blocks)
    t = planes(blocks[:, :64].reshape(n, 2, 32), 2).reshape(n, 256)
    return (t.astype(np.float32) - np.float32(1)) * half_scale(blocks, 64)


def _ternary(x: F32) -> tuple[U8, U8]:
    """Return stored scales (n, 2) and digits 0 .. 2 (n, 256); d is the largest magnitude. ggml ignores importance."""
    blocks = x.reshape(-1, 256)
    d = np.abs(blocks).max(axis=1, keepdims=True)
    t = round_away(blocks * reciprocal(d)) + np.float32(1)
    return half_bytes(d), t.astype(np.uint8)


def quantize_tq1_0(x: F32, importance: F32 | None) -> U8:
    d, t = _ternary(x)
    parts = []
    at = 0
    for start, stop, digits in _RUNS:
        width = stop - start
        run = t[:, at : at + digits * width].reshape(-1, digits, width)
        number = np.zeros((len(t), width), np.uint16)
        for k in range(digits):
            number += run[:, k] * np.uint16(3 ** (4 - k))
        parts.append(((number * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8))
        at += digits * width
    return np.concatenate([*parts, d], axis=1).reshape(len(x), -1)


def quantize_tq2_0(x: F32, importance: F32 | None) -> U8:
    d, t = _ternary(x)
    q = join_bits(t.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.concatenate([q, d], axis=1).reshape(len(x), -1)
