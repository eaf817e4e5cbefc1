"""Weights: the tensors of a model file, as operations read them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Weight(Protocol):
    """A tensor of the model file, still in its file format."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...  # "F32", "Q4_0", ... : a key of quant.FORMATS
    @property
    def shape(self) -> tuple[int, ...]: ...  # row-major: (experts, rows, columns), (rows, columns) or (columns,)
    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows start..stop as uint8 (stop - start, bytes per row), counted over all leading dimensions.

        A one-dimensional tensor is one row; row r of expert e is row e * rows + r.
        """
        ...
