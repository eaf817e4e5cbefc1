"""Activation-aware scaling (AWQ, Lin et al. 2023, arXiv:2306.00978): columns that see large inputs are made larger
before they are rounded, and their inputs smaller by the same factors, so that they lose less.

`search` finds the factors for matrices that read the same input; whoever calls it folds their inverse into what makes
that input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.quant.format import F32
from localllm.quant.gptq import output_error

F64 = NDArray[np.float64]

EXPONENTS = tuple(i / 10 for i in range(10))  # of the size of the inputs; 0 leaves everything as it is
ROWS = 256  # of a matrix that are tried: more take longer and choose the same


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix (rows, columns) that reads the input, the sum of x x^T over its inputs, and how it will be stored."""

    matrix: F32
    hessian: F64  # (columns, columns)
    rounded: Callable[[F32, F32], F32]  # (matrix, mean squares of its inputs) to the values it has once it is stored

    def error(self, scale: F32) -> float:
        """Squared error of the outputs over their squares, where the columns are times `scale` while stored."""
        tried = self.matrix[:: max(len(self.matrix) // ROWS, 1)]
        squares = np.diagonal(self.hessian).astype(np.float32)
        stored = self.rounded(tried * scale, squares / scale**2) / scale
        outputs = output_error(tried, np.zeros_like(tried), self.hessian)
        return output_error(tried, stored, self.hessian) / outputs if outputs else 0.0


def factors(mean_squares: F32, exponent: float) -> F32:
    """What columns are multiplied by, (columns,): the size of their inputs to a power, centred on 1."""
    size = np.sqrt(np.maximum(mean_squares, 0, dtype=np.float64))
    size = np.maximum(size, 1e-4 * (size.max() or 1.0)) ** exponent
    centred: F32 = (size / np.sqrt(size.max() * size.min())).astype(np.float32)
    return centred


def search(
    parts: Sequence[Part], mean_squares: F32, spread: Callable[[F32], F32] = lambda scale: scale
) -> tuple[F32, float, float]:
    """The factors with the least error of all parts together, that error, and the error without factors.

    Factors belong to what makes the input, as `mean_squares` do; `spread` turns them into those of its columns.
    """
    errors = [sum(part.error(spread(factors(mean_squares, e))) for part in parts) for e in EXPONENTS]
    best = int(np.argmin(errors))
    return factors(mean_squares, EXPONENTS[best]), errors[best], errors[0]
