"""Weights: the parts of the model file's tensors that operations read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.quant import row_bytes


class Tensor(Protocol):
    """A tensor of the model file, in its file format."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...  # "F32", "Q4_0", ... : a key of quant.FORMATS
    @property
    def shape(self) -> tuple[int, ...]: ...  # row-major: (experts, rows, columns), (rows, columns) or (columns,)
    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return rows start..stop as uint8 (stop - start, bytes per row), counted over all leading dimensions.

        A one-dimensional tensor is one row. Row r of expert e is row e * rows + r.
        """
        ...


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor, or a part of it that starts at `first` along its first dimension: rows of a matrix, values of a vector.

    A weight is a `Tensor` too. Two weights are equal if they name the same part; their bytes are not compared.
    """

    tensor: str  # its name in the file
    format: str
    shape: tuple[int, ...]
    first: int
    source: Tensor = field(compare=False, repr=False)

    @classmethod
    def of(cls, tensor: Tensor) -> Weight:
        """Return the whole tensor as a weight; a weight is returned unchanged."""
        if isinstance(tensor, Weight):
            return tensor
        return cls(tensor.name, tensor.format, tuple(tensor.shape), 0, tensor)

    @property
    def name(self) -> str:
        """Unique within a plan: the tensor's name, and the range if the weight is a part of it."""
        if prod(self.shape) == prod(self.source.shape):
            return self.tensor
        return f"{self.tensor}[{self.first}:{self.first + self.shape[0]}]"

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape[:-1]) * row_bytes(self.format, self.shape[-1])

    def part(self, start: int, stop: int) -> Weight:
        """Return entries start..stop along the first dimension."""
        return replace(self, shape=(stop - start, *self.shape[1:]), first=self.first + start)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return rows start..stop of this part, as `Tensor.read` counts them."""
        if len(self.shape) == 1:
            first, size = (row_bytes(self.format, values) for values in (self.first, self.shape[0]))
            return self.source.read(start, stop)[:, first : first + size]
        skipped = self.first * prod(self.shape[1:-1])
        return self.source.read(skipped + start, skipped + stop)
