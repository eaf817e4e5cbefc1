"""Unquantized formats, little-endian: F32, F16, BF16, F64 and the integer types of GGUF.

A block is one value. BF16 is the upper half of a float32. Integers and F64 are converted to the nearest float32 (a
double out of range to infinity); they are never weights of a matrix product, so they cannot be written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.quant.format import F32, U8


def dequantize_f32(blocks: U8) -> F32:
    return blocks.view("<f4")


def dequantize_f16(blocks: U8) -> F32:
    return blocks.view("<f2").astype(np.float32)


def dequantize_bf16(blocks: U8) -> F32:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _as_float32(blocks: U8, dtype: str) -> F32:
    numbers: Any = blocks.view(dtype)
    return np.asarray(numbers.astype(np.float32))


def dequantize_f64(blocks: U8) -> F32:
    return _as_float32(blocks, "<f8")


def dequantize_i8(blocks: U8) -> F32:
    return _as_float32(blocks, "<i1")


def dequantize_i16(blocks: U8) -> F32:
    return _as_float32(blocks, "<i2")


def dequantize_i32(blocks: U8) -> F32:
    return _as_float32(blocks, "<i4")


def dequantize_i64(blocks: U8) -> F32:
    return _as_float32(blocks, "<i8")


def quantize_f32(x: F32, importance: F32 | None) -> U8:
    return x.view(np.uint8)


def quantize_f16(x: F32, importance: F32 | None) -> U8:
    """Round to the nearest half, ties to even; magnitudes of 65520 and more become infinity."""
    return x.astype("<f2").view(np.uint8)


def quantize_bf16(x: F32, importance: F32 | None) -> U8:
    """Round to the nearest bfloat16, ties to even. NaN is made quiet, so that truncation cannot
    turn it into infinity."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(64)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet, rounded).astype("<u2").view(np.uint8)
