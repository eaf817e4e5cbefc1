"""Activation-aware scaling (AWQ, Lin et al. 2023, arXiv:2306.00978).

Columns with large inputs are scaled up before rounding, and their inputs scaled down by the same factors, to reduce
their rounding error. `search` finds the factors for matrices that read the same input; the caller folds the inverse
factors into the operation that makes that input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.quant.format import F32
from localllm.quant.gptq import output_error

F64 = NDArray[np.float64]

EXPONENTS = tuple(i / 10 for i in range(10))  # powers of the input size; 0 changes nothing
ROWS = 256  # maximum rows of a matrix to try: more rows take longer and give the same result


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix (rows, columns) that reads the input, the sum of x x^T over its inputs, and its stored form."""

    values: F32
    hessian: F64  # (columns, columns)
    rounded: Callable[[F32, F32], F32]  # (matrix, mean squares of its inputs) -> its values after storing

    def error(self, scale: F32) -> float:
        """Return the squared error of the outputs relative to their squares if columns are stored times `scale`."""
        tried = self.values[:: max(len(self.values) // ROWS, 1)]
        squares = np.diagonal(self.hessian).astype(np.float32)
        stored = self.rounded(tried * scale, squares / scale**2) / scale
        outputs = output_error(tried, np.zeros_like(tried), self.hessian)
        return output_error(tried, stored, self.hessian) / outputs if outputs else 0.0


def factors(mean_squares: F32, exponent: float) -> F32:
    """Return the factors of columns (columns,): the magnitude of their inputs to a power, centred on 1."""
    size = np.sqrt(np.maximum(mean_squares, 0, dtype=np.float64))
    size = np.maximum(size, 1e-4 * (size.max() or 1.0)) ** exponent
    centred: F32 = (size / np.sqrt(size.max() * size.min())).astype(np.float32)
    return centred


def search(
    matrices: Sequence[Matrix], mean_squares: F32, spread: Callable[[F32], F32] = lambda scale: scale
) -> tuple[F32, float, float]:
    """Return the factors with the least total error over all matrices, that error, and the error without factors.

    Factors and `mean_squares` belong to the operation that makes the input; `spread` maps them to the columns.
    """
    errors = [sum(matrix.error(spread(factors(mean_squares, e))) for matrix in matrices) for e in EXPONENTS]
    best = int(np.argmin(errors))
    return factors(mean_squares, EXPONENTS[best]), errors[best], errors[0]
