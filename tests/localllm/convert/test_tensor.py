"""Lazy tensor conversions, read in arbitrary row ranges, equal the same operations on arrays."""

from __future__ import annotations

import numpy as np
import pytest

from localllm import quant
from localllm.convert import ConvertError, LazyTensor
from localllm.convert import tensor as t
from localllm.convert.names import natural

RANDOM = np.random.default_rng(5)


def of(values: np.ndarray, fmt: str = "F32") -> LazyTensor:
    """Return a lazy tensor of the values, stored in the format."""
    values = np.asarray(values)
    if fmt in ("U8", "F8_E4M3"):
        rows = values.astype(np.uint8).reshape(-1, values.shape[-1])
    else:
        rows = quant.quantize(values.astype(np.float32).reshape(-1, values.shape[-1]), fmt)
    return LazyTensor("x", fmt, values.shape, rows.shape[1], lambda start, stop: rows[start:stop])


def values_of(tensor: LazyTensor) -> np.ndarray:
    """Return all values of a tensor, after checking that row ranges give the same values."""
    rows = tensor.read(0, tensor.rows)
    assert rows.shape == (tensor.rows, tensor.row_bytes)
    for step in (1, 2, 3, 5, 7):
        pieces = [tensor.read(i, min(i + step, tensor.rows)) for i in range(0, tensor.rows, step)]
        assert b"".join(p.tobytes() for p in pieces) == rows.tobytes()
    assert tensor.read(tensor.rows, tensor.rows).shape == (0, tensor.row_bytes)
    return quant.dequantize(rows, tensor.format).reshape(tensor.shape)


def check(tensor: LazyTensor, expected: object) -> None:
    np.testing.assert_array_equal(values_of(tensor), expected)


X = RANDOM.standard_normal((3, 8, 6)).astype(np.float16)


@pytest.mark.parametrize("fmt", ["F32", "F16"])
def test_rows_and_columns(fmt: str) -> None:
    x = of(X, fmt)
    check(t.strided(x, 0, 4), X[:, :4])
    check(t.strided(x, 4, 8), X[:, 4:])
    check(t.strided(x, 1, 8, 2), X[:, 1::2])
    check(t.picked_columns(x, np.arange(1, 6, 2)), X[:, :, 1::2])
    check(t.transposed(x), X.transpose(0, 2, 1))
    check(t.transposed(of(X[0], fmt)), X[0].T)
    check(t.stacked([of(m, fmt) for m in X]), X)
    check(t.stacked([of(v, fmt) for v in X[0]]), X[0])
    check(t.strided(of(X[0, 0], fmt), 1, 6, 2), X[0, 0, 1::2])
    order = np.array([5, 0, 3, 3, 7, 1, 2, 6])
    check(t.picked(of(X[1], fmt), order, 8), X[1][order])
    check(t.flattened(of(X[0, :1], fmt)), X[0, 0])


def test_float32() -> None:
    check(t.as_float32(of(X, "F16")), X.astype(np.float32))
    np.testing.assert_array_equal(values_of(t.as_float32(of(X[0, 0], "BF16"), 1.0)) - 1, values_of(of(X[0, 0], "BF16")))
    check(t.array_tensor("x", X[0].astype(np.float32)), X[0])


def test_mxfp4_keeps_every_number() -> None:
    """gpt-oss weights are 2^(scale - 127) * E2M1(code), with two codes a byte, the first in the low half.

    Conversion to MXFP4 is lossless.
    """
    codes = RANDOM.integers(0, 256, (2, 6, 3, 16))
    scales = RANDOM.integers(120, 130, (2, 6, 3))
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    wanted = np.stack([e2m1[codes & 15], e2m1[codes >> 4]], -1).reshape(2, 6, 3, 32) * 2.0 ** (scales[..., None] - 127)
    packed = t.mxfp4(of(codes, "U8"), of(scales, "U8"))
    assert packed.format == "MXFP4"
    check(packed, wanted.reshape(2, 6, 96))
    check(t.strided(packed, 1, 6, 2), wanted.reshape(2, 6, 96)[:, 1::2])
    with pytest.raises(ConvertError, match="with scales"):
        t.mxfp4(of(codes, "U8"), of(scales[..., :2], "U8"))


def test_fp8() -> None:
    """In FP8 E4M3, the code 0x38 is 1, 0x7E is 448 (the largest), and 0x01 is 2^-9 (the smallest)."""
    codes = np.array([[0x38, 0xB8, 0x7E, 0x01, 0x00, 0x44]])
    numbers = np.array([[1, -1, 448, 2.0**-9, 0, 3]])
    check(t.scaled_fp8(of(codes, "F8_E4M3"), of([0.5])), numbers / 2)
    rows = np.repeat(codes, 3, axis=0)
    by_row = t.scaled_fp8(of(rows, "F8_E4M3"), of([[1.0], [2.0], [4.0]]))
    check(by_row, numbers * [[1], [2], [4]])
    wide = np.full((130, 256), 0x38)
    scales = np.array([[1.0, 2.0], [3.0, 4.0]])
    expected = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[:130]
    check(t.scaled_fp8(of(wide, "F8_E4M3"), of(scales)), expected)
    with pytest.raises(ConvertError, match="do not divide"):
        t.scaled_fp8(of(codes, "F8_E4M3"), of([1.0, 2.0]))


def test_what_is_stacked_must_be_alike() -> None:
    with pytest.raises(ConvertError, match="they must be of the same shape and format"):
        t.stacked([of(X[0]), of(X[0, :4])])


def test_shapes_and_functions() -> None:
    x = of(X[0, 0], "F16")
    check(t.shaped(x, 2), X[0, 0].reshape(3, 2))
    check(t.squeezed(of(X[:, :1], "F16")), X[:, 0])
    check(t.divided(of(X[0], "F16"), 4), X[0].reshape(4, 2, 6))
    check(t.padded_rows(of(X[0], "F16"), 11), np.pad(X[0], ((0, 3), (0, 0))))
    factors = np.arange(8, dtype=np.float32)
    check(t.scaled(of(X[0], "F16"), factors), X[0] * factors[:, None].astype(np.float16))
    check(t.computed(x, np.negative), -X[0, 0].astype(np.float32))
    for wrong, message in ((lambda: t.shaped(x, 4), "rows of 4"), (lambda: t.squeezed(of(X)), "expected")):
        with pytest.raises(ConvertError, match=message):
            wrong()


def test_integers_of_32_bits() -> None:
    numbers = np.array([[0, -5, 2**31 - 1], [7, 8, -(2**31)]])

    def wide(x: np.ndarray) -> LazyTensor:
        rows = np.ascontiguousarray(x).view(np.uint8)
        return LazyTensor("x", "I64", x.shape, rows.shape[1], lambda start, stop: rows[start:stop])

    small = t.as_int32(wide(numbers))
    assert (small.format, t.as_int32(small)) == ("I32", small)
    np.testing.assert_array_equal(small.read(0, 2).view(np.int32), numbers)
    with pytest.raises(ConvertError, match="x: holds 2147483648, which does not fit in 32 bits"):
        t.as_int32(wide(numbers + 1)).read(0, 2)
    with pytest.raises(ConvertError, match="x: is stored as F32; expected I32 or I64"):
        t.as_int32(of(np.zeros((2, 2))))


def test_exponents_of_two() -> None:
    rows = np.array([[0, 1, 127], [128, 254, 255]], np.uint8)
    tensor = t.powers(LazyTensor("x", "F8_E8M0", (2, 3), 3, lambda start, stop: rows[start:stop]))
    check(tensor, [[2.0**-127, 2.0**-126, 1.0], [2.0, 2.0**127, np.nan]])


def test_layer_2_comes_before_layer_10() -> None:
    names = ["blk.2.ffn_up.weight", "blk.10.attn_q.weight", "output.weight", "token_embd.weight"]
    assert sorted(names, key=natural) == names


def test_products_of_tensors_of_one_shape() -> None:
    one, other = RANDOM.standard_normal((2, 4, 3)).astype(np.float32)
    check(t.multiplied(of(one), of(other)), one * other)
    with pytest.raises(ConvertError, match=r"x: is \(2, 3\), but x is \(4, 3\); expected the same"):
        t.multiplied(of(one), of(other[:2]))
