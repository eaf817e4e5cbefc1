"""GPTQ writes codes where dequantization reads them, and its error feedback lowers the output error. AWQ
finds good scales.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm import quant
from localllm.quant import awq, gptq
from localllm.quant.codes import CODED, grid

BLOCKS = np.load(Path(__file__).with_name("blocks.npz"))
RANDOM = np.random.RandomState(4)
COLUMNS = 512


def correlated(rows: int) -> np.ndarray:
    """Return inputs with correlated columns of very different magnitudes, as in a language model."""
    mixed = RANDOM.standard_normal((rows, COLUMNS)) @ (
        RANDOM.standard_normal((COLUMNS, COLUMNS)) / 20 + np.eye(COLUMNS)
    )
    return mixed * np.exp(RANDOM.standard_normal(COLUMNS))


X = correlated(1500)
HESSIAN = X.T @ X
W = RANDOM.standard_normal((48, COLUMNS)).astype(np.float32)
WRITABLE = [name for name in CODED if quant.FORMATS[name].quantize]


@pytest.mark.parametrize("name", CODED)
def test_every_code_lies_where_it_is_written(name: str) -> None:
    """The scales, offsets and nearest levels of blocks quantized by ggml, written over other codes, give the
    same values.
    """
    fmt, coded = quant.FORMATS[name], CODED[name]
    blocks = BLOCKS[f"{name}.imatrix"].reshape(-1, fmt.block_bytes)
    values = fmt.dequantize(blocks)
    scale, offset = grid(blocks, name)
    with np.errstate(all="ignore"):
        level = coded.nearest(np.where(scale != 0, (values - offset) / scale, 0).astype(np.float32))
    other = blocks.copy()
    coded.write(other, np.broadcast_to(coded.codes[RANDOM.randint(0, len(coded.codes), values.shape)], values.shape))
    assert not np.array_equal(fmt.dequantize(other), values)
    coded.write(other, coded.codes[level])
    np.testing.assert_array_equal(fmt.dequantize(other), values)


@pytest.mark.parametrize("name", CODED)
def test_nearest_is_nearest(name: str) -> None:
    coded = CODED[name]
    y = np.linspace(coded.levels[0] - 1, coded.levels[-1] + 1, 777).astype(np.float32)
    distance = np.abs(y[:, None] - coded.levels[None])
    np.testing.assert_allclose(distance[np.arange(777), coded.nearest(y)], distance.min(axis=1), atol=1e-5)


def error(rows: np.ndarray, name: str) -> float:
    return gptq.output_error(W, quant.dequantize(rows, name), HESSIAN)


@pytest.mark.parametrize("name", WRITABLE)
def test_feedback_beats_rounding_alone(name: str) -> None:
    """The output error, on the inputs of the Hessian, is lower than after plain or importance-weighted rounding."""
    squares = (np.diagonal(HESSIAN) / len(X)).astype(np.float32)
    plain, weighted = error(quant.quantize(W, name), name), error(quant.quantize(W, name, squares), name)
    assert error(gptq.gptq_quantize(W, HESSIAN, name), name) < 0.75 * min(plain, weighted)


@pytest.mark.parametrize("name", ["Q2_0", "TQ2_0", "Q1_0", "Q4_0"])
def test_it_is_never_worse_than_rounding_by_importance(name: str) -> None:
    """In the coarsest formats the feedback is harmful, because errors are as large as the remaining weights."""
    squares = (np.diagonal(HESSIAN) / len(X)).astype(np.float32)
    assert error(gptq.gptq_quantize(W, HESSIAN, name), name) <= error(quant.quantize(W, name, squares), name) * (
        1 + 1e-6
    )


def test_output_error_is_the_squared_error_of_the_outputs() -> None:
    rows = quant.quantize(W, "Q4_0")
    missed = X @ (W - quant.dequantize(rows, "Q4_0")).T
    assert error(rows, "Q4_0") == pytest.approx(float((missed**2).sum()), rel=1e-6)


def test_columns_that_do_not_hang_together_are_rounded_to_the_nearest() -> None:
    """With a diagonal Hessian, no column can compensate the error of another. So blocks keep their scales,
    and every weight gets the nearest code.
    """
    alone = [quant.quantize(W[:, i : i + 32].copy(), "Q4_1", np.ones(32, np.float32)) for i in range(0, COLUMNS, 32)]
    scale, offset = (part.reshape(W.shape) for part in grid(np.concatenate(alone, axis=1).reshape(-1, 20), "Q4_1"))
    nearest = np.clip(np.rint((W - offset) / scale), 0, 15) * scale + offset
    found = quant.dequantize(gptq.gptq_quantize(W, np.eye(COLUMNS), "Q4_1"), "Q4_1")
    np.testing.assert_allclose(found, nearest, atol=1e-5)


def test_dead_inputs_and_few_rows_do_no_harm() -> None:
    few = X[:5].copy()
    few[:, 7] = 0
    rows = gptq.gptq_quantize(W, few.T @ few, "Q4_0")
    assert np.isfinite(quant.dequantize(rows, "Q4_0")).all()
    assert np.abs(quant.dequantize(rows, "Q4_0") - W).max() < 4


# -- AWQ -----------------------------------------------------------------------------------------------------------


def test_factors_are_a_power_of_the_size_of_inputs() -> None:
    squares = np.array([16.0, 1.0, 4.0], np.float32)
    assert awq.factors(squares, 0.0).tolist() == [1, 1, 1]
    assert awq.factors(squares, 1.0).tolist() == pytest.approx([2.0, 0.5, 1.0])
    assert awq.factors(squares, 0.5).tolist() == pytest.approx([2**0.5, 2**-0.5, 1.0])
    assert np.isfinite(awq.factors(np.zeros(3, np.float32), 0.9)).all()


def test_scaling_protects_columns_with_large_inputs() -> None:
    """One input is a hundred times larger than the others. Without scaling factors, its column is rounded as
    coarsely as the others.
    """
    x = RANDOM.standard_normal((400, 64))
    x[:, 5] *= 100
    hessian = x.T @ x

    def rounded(matrix: np.ndarray, squares: np.ndarray) -> np.ndarray:
        return quant.dequantize(quant.quantize(matrix, "Q4_0"), "Q4_0")

    matrix = awq.Matrix(RANDOM.standard_normal((32, 64)).astype(np.float32), hessian, rounded)
    scale, best, before = awq.search([matrix], np.diagonal(hessian).astype(np.float32))
    assert best < 0.2 * before
    assert scale[5] == scale.max()
    assert matrix.error(np.ones(64, np.float32)) == pytest.approx(before)
