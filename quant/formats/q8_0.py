"""Q8_0: blocks of 32 values, signed bytes q with one scale d.

Block (34 bytes): bytes 0-1 f16 d; 2-33 int8 q[0..31]; value = d * q.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.pack import half_bytes, half_scale, reciprocal, round_away


def dequantize(blocks: U8) -> F32:
    out = blocks[:, 2:].view(np.int8).astype(np.float32)
    out *= half_scale(blocks, 0)
    return out


def quantize(x: F32, importance: F32 | None) -> U8:
    """Map the largest magnitude to +-127; ties round away from zero. Importance is ignored, as in ggml."""
    values = x.reshape(-1, 32)
    d = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    q = round_away(values * reciprocal(d)).astype(np.int8).view(np.uint8)
    return np.concatenate([half_bytes(d), q], axis=1).reshape(len(x), -1)
