"""Weights: the GGUF tensors, or parts of them, that operations read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localllm.quant import row_bytes


class Tensor(Protocol):
    """A tensor of the GGUF, in its stored format."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...  # "F32", "Q4_0", ...: a key of quant.FORMATS
    @property
    def shape(self) -> tuple[int, ...]: ...  # row-major: (experts, rows, columns), (rows, columns) or (columns,)
    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return rows start..stop as uint8 (stop - start, bytes per row), counted over all leading dimensions.

        A one-dimensional tensor is one row. Row r of expert e has index e * rows + r.
        """
        ...


@runtime_checkable
class Gathers(Protocol):
    """An optional method of tensors: reads many single rows at once."""

    def gather(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the given rows, in increasing order, as uint8 (n, bytes per row)."""
        ...


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor, or a part of it that starts at `first` along the first dimension: rows of a matrix, values of a vector.

    A weight is itself a `Tensor`. Two weights are equal if they refer to the same part; their bytes are not compared.
    """

    tensor: str  # the tensor's name in the GGUF
    format: str
    shape: tuple[int, ...]
    first: int
    source: Tensor = field(compare=False, repr=False)
    group: int = 0  # if nonzero: of every `group` rows, only the `taken` rows from `row` on
    row: int = 0
    taken: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> Weight:
        """Return the whole tensor as a weight, or a weight unchanged."""
        if isinstance(tensor, Weight):
            return tensor
        return cls(tensor.name, tensor.format, tuple(tensor.shape), 0, tensor)

    @property
    def name(self) -> str:
        """Unique within a plan: the tensor's name, followed by the range if the weight is only a part."""
        if prod(self.shape) == prod(self.source.shape):
            return self.tensor
        if self.group:
            return f"{self.tensor}[{self.row}:{self.row + self.taken} of each {self.group}]"
        return f"{self.tensor}[{self.first}:{self.first + self.shape[0]}]"

    @property
    def bytes(self) -> int:
        """Number of bytes in the GGUF."""
        return prod(self.shape[:-1]) * row_bytes(self.format, self.shape[-1])

    def part(self, start: int, stop: int) -> Weight:
        """Return entries start..stop along the first dimension."""
        return replace(self, shape=(stop - start, *self.shape[1:]), first=self.first + start)

    def rows_of_each(self, group: int, start: int, stop: int) -> Weight:
        """Return rows start..stop of every `group` rows: of each matrix of a stack, or of equal slices of one matrix.

        For a vector, return values start..stop of every `group`.
        """
        assert (self.group, self.first) == (0, 0), "a slice of a slice"
        if len(self.shape) == 1:
            taken = stop - start
            return replace(self, shape=(self.shape[0] // group * taken,), group=group, row=start, taken=taken)
        rows = self.shape[-2] // group * (stop - start)
        return replace(self, shape=(*self.shape[:-2], rows, self.shape[-1]), group=group, row=start, taken=stop - start)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return rows start..stop of this part, counted as in `Tensor.read`."""
        if self.group and len(self.shape) == 1:
            of, first, last = (row_bytes(self.format, n) for n in (self.group, self.row, self.row + self.taken))
            return np.ascontiguousarray(self.source.read(start, stop).reshape(-1, of)[:, first:last]).reshape(1, -1)
        if self.group:
            return self._read_of_each(start, stop)
        if len(self.shape) == 1:
            first, size = (row_bytes(self.format, values) for values in (self.first, self.shape[0]))
            return self.source.read(start, stop)[:, first : first + size]
        skipped = self.first * prod(self.shape[1:-1])
        return self.source.read(skipped + start, skipped + stop)

    def gather(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return single rows (at least one) of a matrix, in increasing order, as uint8 (n, bytes per row)."""
        if isinstance(self.source, Gathers) and not self.group:
            return self.source.gather(rows + self.first)
        return np.concatenate([self.read(row, row + 1) for row in rows.tolist()])

    def _read_of_each(self, start: int, stop: int) -> NDArray[np.uint8]:
        parts = []
        while start < stop:
            group, row = divmod(start, self.taken)
            count = min(self.taken - row, stop - start)
            at = group * self.group + self.row + row
            parts.append(self.source.read(at, at + count))
            start += count
        return np.concatenate(parts)


def given(*weights: Weight | None) -> tuple[Weight, ...]:
    """Return the weights that are not None."""
    return tuple([weight for weight in weights if weight is not None])
