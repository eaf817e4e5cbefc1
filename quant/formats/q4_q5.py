"""Q4_0, Q4_1, Q5_0 and Q5_1: blocks of 32 values, 4- or 5-bit integers q with one scale d and, in *_1, one offset m.

    Q4_0  bytes 0-1 f16 d; 2-17 nibbles                                      value = d * (q - 8)
    Q4_1  bytes 0-1 f16 d; 2-3 f16 m; 4-19 nibbles                           value = d * q + m
    Q5_0  bytes 0-1 f16 d; 2-5 fifth bits, bit i of q[i]; 6-21 nibbles       value = d * (q - 16)
    Q5_1  bytes 0-1 f16 d; 2-3 f16 m; 4-7 fifth bits; 8-23 nibbles           value = d * q + m

Byte j of the nibbles holds the low four bits of q[j] (its low half) and of q[j + 16] (its high half).
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.pack import bits_of, half_bytes, half_scale, join_bits, lowest, peak, planes, reciprocal
from localllm.quant.search import row_weights, search_affine, search_symmetric


def _nibbles(blocks: U8, at: int) -> U8:
    return planes(blocks[:, at : at + 16], 4).reshape(-1, 32)


def _five_bits(blocks: U8, at: int) -> U8:
    q = bits_of(blocks[:, at : at + 4])
    q <<= 4
    q |= _nibbles(blocks, at + 4)
    return q  # (n, 32)


def _symmetric(q: U8, d: F32, zero: int) -> F32:
    out = q.astype(np.float32)
    out -= np.float32(zero)
    out *= d
    return out


def _affine(q: U8, d: F32, m: F32) -> F32:
    out = q.astype(np.float32)
    out *= d
    out += m
    return out


def dequantize_q4_0(blocks: U8) -> F32:
    return _symmetric(_nibbles(blocks, 2), half_scale(blocks, 0), 8)


def dequantize_q4_1(blocks: U8) -> F32:
    return _affine(_nibbles(blocks, 4), half_scale(blocks, 0), half_scale(blocks, 2))


def dequantize_q5_0(blocks: U8) -> F32:
    return _symmetric(_five_bits(blocks, 2), half_scale(blocks, 0), 16)


def dequantize_q5_1(blocks: U8) -> F32:
    return _affine(_five_bits(blocks, 4), half_scale(blocks, 0), half_scale(blocks, 2))


def _quantize_symmetric(x: F32, importance: F32 | None, zero: int) -> tuple[F32, U8]:
    """Return scales (n, 1) and integers 0 .. 2 * zero - 1 (n, 32); the value of largest magnitude becomes -zero."""
    if importance is not None:
        return search_symmetric(x.reshape(-1, 32), row_weights(x, importance).reshape(-1, 32), zero)
    blocks = x.reshape(-1, 32)
    d = peak(blocks) / np.float32(-zero)
    y = blocks * reciprocal(d)
    y += np.float32(zero + 0.5)
    np.minimum(y, np.float32(2 * zero - 1), out=y)
    return d, y.astype(np.uint8)


def _quantize_affine(x: F32, importance: F32 | None, top: int) -> tuple[F32, F32, U8]:
    """Return scales, offsets (n, 1) and integers 0 .. top (n, 32); the smallest value becomes 0, the largest `top`."""
    if importance is not None:
        return search_affine(x.reshape(-1, 32), row_weights(x, importance).reshape(-1, 32), top)
    blocks = x.reshape(-1, 32)
    m = lowest(blocks)
    d = np.abs(blocks.max(axis=1, keepdims=True) - m) / np.float32(top)  # 0, not -0, for zeros of both signs
    y = blocks - m
    y *= reciprocal(d)
    y += np.float32(0.5)
    np.minimum(y, np.float32(top), out=y)
    return d, m, y.astype(np.uint8)


def _rows(parts: list[U8], x: F32) -> U8:
    return np.concatenate(parts, axis=1).reshape(len(x), -1)


def _low(q: U8) -> U8:
    return join_bits((q & np.uint8(15)).reshape(-1, 2, 16), 4)


def _fifth(q: U8) -> U8:
    return np.packbits(q >> 4, axis=1, bitorder="little")


def quantize_q4_0(x: F32, importance: F32 | None) -> U8:
    d, q = _quantize_symmetric(x, importance, 8)
    return _rows([half_bytes(d), _low(q)], x)


def quantize_q4_1(x: F32, importance: F32 | None) -> U8:
    d, m, q = _quantize_affine(x, importance, 15)
    return _rows([half_bytes(d), half_bytes(m), _low(q)], x)


def quantize_q5_0(x: F32, importance: F32 | None) -> U8:
    d, q = _quantize_symmetric(x, importance, 16)
    return _rows([half_bytes(d), _fifth(q), _low(q)], x)


def quantize_q5_1(x: F32, importance: F32 | None) -> U8:
    d, m, q = _quantize_affine(x, importance, 31)
    return _rows([half_bytes(d), half_bytes(m), _fifth(q), _low(q)], x)
