"""MXFP4 and NVFP4: 4-bit floats (E2M1: sign, 2 exponent bits, 1 mantissa bit) with a shared scale.

MXFP4 (17 bytes, 32 values; OCP Microscaling 1.0): 0 scale exponent e (E8M0, 2**(e - 127)); 1-16 nibbles, low halves
values 0-15, high halves values 16-31. NVFP4 (36 bytes, 64 values in 4 groups of 16): 0-3 scales, one unsigned E4M3 byte
per group (bias 7; 0x7F, usually NaN, means 0); 4-35 nibbles, 8 bytes per group, low halves values 0-7 of the group,
high halves values 8-15.

The E2M1 levels are 0, .5, 1, 1.5, 2, 3, 4, 6. As in ggml, the code doubles them to integers and halves the scale.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.pack import join_bits, planes

LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # doubled E2M1
_BOUNDARIES = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # midpoints between adjacent levels; a tie takes the lower level


def half_e8m0(e: U8) -> F32:
    """Return half of the scale, 2**(e - 128), subnormal for e < 2. As in ggml, 255 (NaN in OCP) means 2**127."""
    return np.ldexp(np.float32(1), e.astype(np.int32) - 128)


def half_ue4m3(b: U8) -> F32:
    """Return half of the unsigned E4M3 value b. 0x7F means 0; the top bit is ignored."""
    exponent, mantissa = ((b >> 3) & 15).astype(np.int32), (b & 7).astype(np.float32)
    normal = np.ldexp(np.float32(1) + mantissa / np.float32(8), exponent - 8)
    value = np.where(exponent == 0, mantissa * np.float32(2**-10), normal)
    return np.where(b == 0x7F, np.float32(0), value)


def to_ue4m3(x: F32) -> U8:
    """Return the unsigned E4M3 byte nearest to x >= 0; halves round up, and the maximum is 0x7E (448)."""
    bits = np.minimum(x, np.float32(448)).view(np.uint32)
    rounded = (bits >> np.uint32(20)) + ((bits >> np.uint32(19)) & np.uint32(1))  # exponent and 3 mantissa bits
    normal = rounded.astype(np.int64) - (120 << 3)  # exponent bias 127 becomes 7; a carry moves into the exponent
    subnormal = np.minimum((np.minimum(x, np.float32(1)) * np.float32(512) + np.float32(0.5)).astype(np.int64), 7)
    return np.where(bits >> np.uint32(23) <= 120, subnormal, np.minimum(normal, 0x7E)).astype(np.uint8)


def _nearest(x: F32, d: F32) -> U8:
    """Return the index of the level nearest to x / d, uint8 in x's shape; 0 where d is 0."""
    magnitude = np.abs(x)
    index = np.zeros(x.shape, np.uint8)
    for boundary in _BOUNDARIES:
        index += magnitude > d * np.float32(boundary)  # exact: d has at most 4 significant bits
    index += (((x < 0) & (index > 0)).view(np.uint8)) << 3
    index *= d > 0
    return index


def dequantize_mxfp4(blocks: U8) -> F32:
    values = LEVELS[planes(blocks[:, 1:], 4).reshape(-1, 32)]
    values *= half_e8m0(blocks[:, :1])
    return values


def dequantize_nvfp4(blocks: U8) -> F32:
    values = LEVELS[planes(blocks[:, 4:].reshape(-1, 4, 8), 4).reshape(-1, 4, 16)]
    values *= half_ue4m3(blocks[:, :4])[:, :, None]
    return values.reshape(-1, 64)


def quantize_mxfp4(x: F32, importance: F32 | None) -> U8:
    """Quantize; the scale maps the largest magnitude to 4 ... 8 (above 6 saturates). ggml ignores importance here."""
    blocks = x.reshape(-1, 32)
    top = np.abs(blocks).max(axis=1, keepdims=True)
    # log2 rounded to float32, like C's log2f: a value just below a power of two counts as that power
    exponent = np.floor(np.log2(top.astype(np.float64)).astype(np.float32)) + np.float32(125)
    e = np.maximum(exponent, np.float32(0)).astype(np.uint8)
    q = join_bits(_nearest(blocks, half_e8m0(e)).reshape(-1, 2, 16), 4)
    return np.concatenate([e, q], axis=1).reshape(len(x), -1)


def quantize_nvfp4(x: F32, importance: F32 | None) -> U8:
    """Quantize with group scales that map the largest magnitude to 6, 448 at most. ggml ignores importance here."""
    groups = x.reshape(-1, 16)
    scales = to_ue4m3(np.abs(groups).max(axis=1, keepdims=True) / np.float32(6))
    q = join_bits(_nearest(groups, half_ue4m3(scales)).reshape(-1, 2, 8), 4)
    return np.concatenate([scales.reshape(-1, 4), q.reshape(-1, 32)], axis=1).reshape(len(x), -1)
