"""Second-order error feedback (GPTQ, Frantar et al. 2022, arXiv:2210.17323) for block formats.

The output is in the ordinary format. Columns are rounded in order, and later columns compensate each rounding error as
far as the matrix inputs are correlated. At the first column of a block, the format's ordinary quantizer sets the
block's scales; from then on only codes are chosen. Formats without an entry in `quant.codes` feed back the error of
whole blocks. If that does not help, as with the coarsest formats, rows are rounded normally.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.quant.codes import CODED, grid
from localllm.quant.format import F32, U8

F64 = NDArray[np.float64]

DAMPING = 0.01  # fraction of the mean diagonal, added to the diagonal for a stable inverse of the Hessian
STRIPE = 32  # columns per update of the remaining columns


@dataclass(frozen=True, slots=True)
class GptqFeedback:
    """Data shared by matrices with the same input; computing it takes as long as quantizing a square matrix."""

    upper: F32  # (columns, columns): U with U^T U = (H + damping)^-1
    importance: F32  # (columns,): cost of an error in each column if all later columns compensate it


def gptq_quantize(weights: F32, hessian: F64, format_name: str, shared: GptqFeedback | None = None) -> U8:
    """Quantize a matrix float32 (rows, columns) to stored rows uint8 (rows, bytes).

    `hessian` (columns, columns) is the sum of x x^T over inputs x of the matrix; a column whose inputs were all zero
    counts as unimportant. `shared` is the result of `feedback`, if already computed. Raises the errors of
    `quant.quantize`.
    """
    squares = np.maximum(np.diagonal(hessian), 0)
    plain = quant.quantize(weights, format_name, (squares / max(squares.mean(), 1e-30)).astype(np.float32))
    made = _with_feedback(weights, shared or feedback(hessian), format_name)
    errors = [output_error(weights, quant.dequantize(rows, format_name), hessian) for rows in (made, plain)]
    return made if errors[0] < errors[1] else plain


def _with_feedback(weights: F32, shared: GptqFeedback, format_name: str) -> U8:
    upper, importance = shared.upper, shared.importance
    fmt, columns = quant.FORMATS[format_name], weights.shape[1]
    w = np.ascontiguousarray(weights.T)  # (columns, rows): remaining values of every column
    out = []
    for start in range(0, columns, fmt.block_values):
        stop = start + fmt.block_values
        rows = quant.quantize(np.ascontiguousarray(w[start:stop].T), format_name, importance[start:stop])
        if format_name in CODED:
            _choose_codes(rows, w, upper, start, stop, format_name)
        else:
            missed = w[start:stop] - quant.dequantize(rows, format_name).T
            # e / U_ii of every column; this solves the feedback within the block at once
            carried = np.linalg.solve(upper[start:stop, start:stop].T.astype(np.float64), missed.astype(np.float64))
            w[stop:] -= upper[start:stop, stop:].T @ carried.astype(np.float32)
        out.append(rows)
    return np.concatenate(out, axis=1)


def _choose_codes(rows: U8, w: F32, upper: F32, start: int, stop: int, format_name: str) -> None:
    """Write codes into the blocks `rows` (rows, bytes of one block), and feed the error back into later columns."""
    coded = CODED[format_name]
    scale, offset = (np.ascontiguousarray(part.T) for part in grid(rows, format_name))  # (block, rows)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale != 0, 1 / scale, np.float32(0))
    chosen = np.empty(scale.shape, np.uint8)
    for first in range(start, stop, STRIPE):
        last = min(first + STRIPE, stop)
        carried = np.empty((last - first, w.shape[1]), np.float32)
        for column in range(first, last):
            i = column - start
            level = coded.nearest((w[column] - offset[i]) * inverse[i])
            chosen[i] = coded.codes[level]
            missed = w[column] - (offset[i] + scale[i] * coded.levels[level])
            carried[column - first] = missed / upper[column, column]
            w[column + 1 : last] -= upper[column, column + 1 : last, None] * carried[column - first]
        w[last:] -= upper[first:last, last:].T @ carried
    coded.write(rows, np.ascontiguousarray(chosen.T))


def feedback(hessian: F64) -> GptqFeedback:
    """Return the feedback data for a Hessian, computed by two matrix decompositions."""
    h = hessian.astype(np.float64)
    diagonal = np.einsum("ii->i", h)
    diagonal[diagonal <= 0] = max(float(diagonal.mean()), 1e-12)
    diagonal += DAMPING * diagonal.mean()
    inverse = np.linalg.inv(h)
    upper = np.linalg.cholesky((inverse + inverse.T) / 2).T
    importance = 1.0 / np.square(np.diagonal(upper))
    return GptqFeedback(np.ascontiguousarray(upper, np.float32), (importance / importance.mean()).astype(np.float32))


def output_error(weights: F32, stored: F32, hessian: F64) -> float:
    """Return the squared output error of a matrix stored as `stored`, summed over the inputs of `hessian`."""
    missed = (weights - stored).astype(np.float64)
    return float(np.einsum("rc,rc->", missed @ hessian, missed))
