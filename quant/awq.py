"""Activation-aware scaling (AWQ, Lin et al. 2023, arXiv:2306.00978).

To reduce the rounding error of columns with large inputs, these columns are scaled up before rounding and their inputs
are scaled down by the same factors. `search` finds the factors for matrices with the same input; the caller folds the
inverse factors into the operation that computes the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.quant.format import F32
from localllm.quant.gptq import output_error

F64 = NDArray[np.float64]

EXPONENTS = tuple(i / 10 for i in range(10))  # powers of the input magnitude; 0 leaves the columns unscaled
ROWS = 256  # maximum rows of a matrix to try; more rows take longer and give the same result


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix (rows, columns), the sum of x x^T over its inputs x, and its quantizer."""

    values: F32
    hessian: F64  # (columns, columns)
    rounded: Callable[[F32, F32], F32]  # (matrix, mean squares of its inputs) -> its values after quantization

    def error(self, scale: F32) -> float:
        """Return the relative squared error of the outputs if columns are scaled by `scale` before quantization."""
        tried = self.values[:: max(len(self.values) // ROWS, 1)]
        squares = np.diagonal(self.hessian).astype(np.float32)
        stored = self.rounded(tried * scale, squares / scale**2) / scale
        outputs = output_error(tried, np.zeros_like(tried), self.hessian)
        return output_error(tried, stored, self.hessian) / outputs if outputs else 0.0


def factors(mean_squares: F32, exponent: float) -> F32:
    """Return the scale factors (columns,): the magnitude of the column inputs raised to `exponent`, centred on 1."""
    size = np.sqrt(np.maximum(mean_squares, 0, dtype=np.float64))
    size = np.maximum(size, 1e-4 * (size.max() or 1.0)) ** exponent
    centred: F32 = (size / np.sqrt(size.max() * size.min())).astype(np.float32)
    return centred


def search(
    matrices: Sequence[Matrix], mean_squares: F32, spread: Callable[[F32], F32] = lambda scale: scale
) -> tuple[F32, float, float]:
    """Return the factors with the least total error over all matrices, that error, and the error without factors.

    Factors and `mean_squares` are per output of the operation that computes the input; `spread` maps them to columns.
    """
    errors = [sum(matrix.error(spread(factors(mean_squares, e))) for matrix in matrices) for e in EXPONENTS]
    best = int(np.argmin(errors))
    return factors(mean_squares, EXPONENTS[best]), errors[best], errors[0]
