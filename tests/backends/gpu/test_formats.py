"""Every weight format on a device: dequantized values are exact, and products are within rounding of the definition."""

from __future__ import annotations

import numpy as np
import pytest

from localllm import quant
from localllm.backends.base import Backend, BackendError
from localllm.backends.gpu import formats
from localllm.backends.gpu.kernels.kernel import FEW_ROWS
from tests.backends.cpu.test_linear import VOCABULARY, activations, columns, quantized
from tests.backends.support import UNIT, bind, feed, record, stored
from tests.models.support import MemoryWeight


def test_every_format_that_holds_weights_is_there() -> None:
    assert set(formats.FORMATS) == set(quant.FORMATS) - {"F64", "I8", "I16", "I32", "I64"}


@pytest.mark.parametrize("format", formats.FORMATS)
def test_embed_gives_the_numbers_of_the_file(gpu: Backend, format: str) -> None:
    """Embeddings equal the values in the GGUF bit for bit, for blocks of every magnitude from subnormal numbers up."""
    width = 2 * quant.FORMATS[format].block_values if quant.FORMATS[format].block_values > 1 else 21
    weight = stored("table", format, (VOCABULARY, width), low=0.0, high=3e38)
    tokens = np.arange(VOCABULARY)[::-1]
    rows = feed(bind(gpu, record(weight, lambda r, x: x)), tokens)
    np.testing.assert_array_equal(rows, weight.values()[tokens])


@pytest.mark.parametrize("format", formats.QUANTIZED)
def test_products(gpu: Backend, format: str) -> None:
    """Products with one token, a few tokens, and many in tiles are within float32 rounding of the definition
    (`test_linear`).

    A single token gives the same bits as among a few tokens.
    """
    for rows, blocks in ((17, 2), (70, 3)):
        width = columns(format, blocks)
        x = activations(width)
        weight = stored("w", format, (rows, width))
        executable = bind(gpu, record(MemoryWeight.of("table", x), lambda r, v, w=weight: r.linear(v, w)))
        tokens = np.arange(VOCABULARY)
        w = weight.values().astype(np.float64)
        integers, scales = quantized(x)
        defined = (integers * scales).reshape(x.shape) @ w.T
        largest = np.repeat(np.abs(w).reshape(rows, -1, 16).max(axis=2), 16, axis=1)  # (rows, width)
        rounding = (width / 16 + 8) * 3 * UNIT * (np.abs(x) @ largest.T)
        many = feed(executable, tokens)
        few = feed(executable, tokens, [FEW_ROWS, 9, 8, 7, 3, 2])
        assert (np.abs(many - defined) <= rounding).all()
        assert (np.abs(few - defined) <= rounding).all()
        alone = feed(executable, tokens[:12], [1] * 12)
        np.testing.assert_array_equal(few[:12], alone)
        np.testing.assert_array_equal(feed(executable, tokens[:12], [5, 7]), alone)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_activation_that_is_no_number_shows(gpu: Backend, value: float) -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 5] = value
    weight = stored("w", "Q8_0", (20, 64))
    rows = feed(bind(gpu, record(MemoryWeight.of("table", x), lambda r, v: r.linear(v, weight))), np.arange(2))
    assert not np.isfinite(rows[0]).any()
    assert np.isfinite(rows[1]).all()


def test_a_format_without_kernels_is_refused_by_name(gpu: Backend) -> None:
    weight = MemoryWeight("w", "F64", (4, 8), np.zeros((4, 64), np.uint8))
    with pytest.raises(BackendError, match="w: no GPU kernels for F64; supported: F32, "):
        bind(gpu, record(weight, lambda r, x: x))
