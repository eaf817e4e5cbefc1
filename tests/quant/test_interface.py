"""The functions of `quant` with invalid arguments, unusual arrays, and arbitrary byte patterns."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from localllm import quant

WRITABLE = [name for name, fmt in quant.FORMATS.items() if fmt.quantize]
BLOCK_WRITABLE = [name for name in WRITABLE if quant.FORMATS[name].block_values > 1]
NEEDS_IMPORTANCE = ("IQ2_XXS", "IQ2_XS", "IQ1_S")
WITH_AND_WITHOUT = [(name, None) for name in WRITABLE if name not in NEEDS_IMPORTANCE] + [
    (name, fill) for name in WRITABLE for fill in (0, 1)
]
X = np.zeros((2, 256), np.float32)
ROWS = np.zeros((2, 18), np.uint8)


def with_value(value: float) -> np.ndarray:
    x = X.copy()
    x[1, 7] = value
    return x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quant.dequantize(ROWS, "Q4_9"), "unknown format 'Q4_9'; known: F32, F16"),
        (lambda: quant.quantize(X, "q4_0"), "unknown format 'q4_0'"),
        (lambda: quant.row_bytes("", 32), "unknown format ''"),
        (lambda: quant.dequantize(ROWS.astype(np.int8), "Q4_0"), "needs a uint8 array (rows, bytes), got int8 (2, 18)"),
        (lambda: quant.dequantize(ROWS[0], "Q4_0"), "got uint8 (18,)"),
        (lambda: quant.dequantize(ROWS.tobytes(), "Q4_0"), "got bytes"),  # type: ignore[arg-type]
        (lambda: quant.dequantize(ROWS[:, :17], "Q4_0"), "17 bytes is not a multiple of the block of 18"),
        (lambda: quant.quantize(X.astype(np.float64), "Q4_0"), "needs a float32 array (rows, values), got float64"),
        (lambda: quant.quantize(X.astype(">f4"), "Q4_0"), "got >f4"),
        (lambda: quant.quantize(X[0], "Q4_0"), "got float32 (256,)"),
        (lambda: quant.quantize(X[:, :48], "Q4_0"), "48 values does not fill whole blocks of 32"),
        (lambda: quant.quantize(X, "F64"), "F64 cannot be written yet; writable formats: F32, F16, BF16, Q4_0"),
        (lambda: quant.quantize(X, "IQ1_S"), "IQ1_S requires an importance matrix"),
        (lambda: quant.quantize(X, "IQ2_XXS"), "IQ2_XXS requires an importance matrix"),
        (lambda: quant.quantize(X, "IQ2_XS"), "IQ2_XS requires an importance matrix"),
        (lambda: quant.quantize(X[:, :128], "Q4_K"), "128 values does not fill whole blocks of 256"),
        (lambda: quant.row_bytes("Q6_K", 128), "128 values does not fill whole blocks of 256"),
        (lambda: quant.row_bytes("Q8_0", -32), "-32 values"),
        (lambda: quant.quantize(X, "Q4_0", X[0, :32]), "importance must be float32 (256,), got float32 (32,)"),
        (lambda: quant.quantize(X, "Q4_0", X[0] - 1), "negative"),
        (lambda: quant.quantize(X, "Q4_0", X[0] + np.float32(np.nan)), "NaN"),
        (lambda: quant.quantize(X, "IQ1_M", X[0] + np.float32(1e30)), "above 1e+15"),
    ],
)
def test_what_is_wrong_is_said(call: Callable[[], object], message: str) -> None:
    with pytest.raises(quant.QuantError, match=re.escape(message)):
        call()


def test_unknown_type_number() -> None:
    for type_id in (4, 5, 9, 15, 31, 43, -1, 2**32):
        with pytest.raises(KeyError):
            quant.by_type_id(type_id)


@pytest.mark.parametrize("name", BLOCK_WRITABLE)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_block_formats_refuse_what_they_cannot_hold(name: str, value: float) -> None:
    with pytest.raises(quant.QuantError, match="row 1 holds NaN or infinity"):
        quant.quantize(with_value(value), name)


def importance_of(fill: float | None) -> np.ndarray | None:
    return None if fill is None else np.full(256, fill, np.float32)


@pytest.mark.parametrize(("name", "fill"), [row for row in WITH_AND_WITHOUT if row[1] != 0])
def test_a_scale_above_the_halves_is_refused(name: str, fill: float | None) -> None:
    if name in ("MXFP4", "NVFP4", "F32", "F16", "BF16"):
        return  # the format has no scales, or scales without a float16 limit
    for value in (1e9, -3e15, 3e20, -3e38):
        with pytest.raises(quant.QuantError, match="largest half"):
            quant.quantize(with_value(value), name, importance_of(fill))


def test_plain_formats_keep_nan_and_infinity() -> None:
    x = np.array([[np.nan, np.inf, -np.inf, 7e4]], np.float32)
    for name, last in (("F32", 7e4), ("F16", np.inf), ("BF16", 70144.0)):
        np.testing.assert_array_equal(quant.dequantize(quant.quantize(x, name), name)[0, :3], x[0, :3])
        assert quant.dequantize(quant.quantize(x, name), name)[0, 3] == np.float32(last)
    # A signaling NaN, which truncation would turn into infinity.
    signalling = np.array([[0x7F800001]], np.uint32).view(np.float32)
    assert np.isnan(quant.dequantize(quant.quantize(signalling, "BF16"), "BF16")).all()


@pytest.mark.parametrize(("name", "fill"), WITH_AND_WITHOUT)
def test_zeros_and_the_smallest_numbers_stay_quiet(name: str, fill: float | None) -> None:
    x = np.concatenate([X, with_value(1e-45), with_value(-1e-42), with_value(1e-30)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = quant.dequantize(quant.quantize(x, name, importance_of(fill)), name)
    assert np.abs(back).max() <= 2e-30  # MXFP4 represents such values, with rounding
    assert (back[:2] == 0).all()


@pytest.mark.parametrize("name", quant.FORMATS)
@pytest.mark.parametrize("fill", [b"\x00\x7c", b"\x7c\x00", b"\x00\xfc", b"\xff\x7f", b"\xff"])
def test_damaged_blocks_are_read_without_a_sound(name: str, fill: bytes) -> None:
    """Scales of infinity or NaN (float16 0x7C00, 0xFC00, 0x7FFF) and the largest exponents are dequantized
    without a warning.
    """
    stored = np.resize(np.frombuffer(fill, np.uint8), (3, 2 * quant.FORMATS[name].block_bytes))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quant.dequantize(stored, name).shape == (3, 2 * quant.FORMATS[name].block_values)


@pytest.mark.parametrize("name", quant.FORMATS)
def test_strange_arrays(name: str) -> None:
    """Arrays may be read-only, strided, transposed or empty, and a tensor may take several chunks."""
    fmt = quant.FORMATS[name]
    rng = np.random.default_rng(3)
    stored = rng.integers(0, 128, (1 + 160_000 // (4 * fmt.block_values), 4 * fmt.block_bytes), np.uint8)
    stored.flags.writeable = False
    whole = quant.dequantize(stored, name)
    parts = [quant.dequantize(part, name) for part in np.array_split(stored, 9)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    np.testing.assert_array_equal(quant.dequantize(np.asfortranarray(stored)[::2], name), whole[::2])
    one_block = stored[:, : fmt.block_bytes]
    np.testing.assert_array_equal(quant.dequantize(np.asfortranarray(one_block), name), whole[:, : fmt.block_values])
    assert quant.dequantize(stored[:0], name).shape == (0, 4 * fmt.block_values)
    assert quant.dequantize(stored[:, :0], name).shape == (len(stored), 0)
    if fmt.quantize:
        x = rng.standard_normal((300, 512), np.float32)
        x.flags.writeable = False
        importance = np.arange(512, dtype=np.float32)
        packed = quant.quantize(x, name, importance)
        pieces = [quant.quantize(x[i : i + 50], name, importance) for i in range(0, 300, 50)]
        np.testing.assert_array_equal(packed, np.concatenate(pieces))
        np.testing.assert_array_equal(quant.quantize(np.asfortranarray(x)[::2], name, importance), packed[::2])
        assert quant.quantize(x[:0], name, importance).shape == (0, quant.row_bytes(name, 512))
        assert quant.quantize(x[:, :0], name, importance[:0]).shape == (300, 0)


@pytest.mark.parametrize("name", WRITABLE)
def test_threads_give_the_same_bytes(name: str) -> None:
    rng = np.random.default_rng(5)
    x, importance = rng.standard_normal((257, 1024), np.float32), rng.random(1024, np.float32)
    one = quant.quantize(x, name, importance)
    np.testing.assert_array_equal(quant.quantize(x, name, importance, threads=3), one)


def test_an_error_in_a_thread_names_the_first_row() -> None:
    x = np.zeros((2000, 256), np.float32)
    x[1900, 3] = x[700, 5] = np.nan
    with pytest.raises(quant.QuantError, match="row 700 holds NaN"):
        quant.quantize(x, "Q4_K", threads=3)
