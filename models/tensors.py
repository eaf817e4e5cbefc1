"""The tensors of a model file, handed out one by one and checked: present, of the expected shape, of a readable format.

What was handed out is remembered, so that `show` can list what a file holds and the forward does not use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import quant
from models.errors import ModelError

_NOT_WEIGHTS = ("I8", "I16", "I32", "I64")  # formats of files, never of a weight


class Weight(Protocol):
    """A tensor of the model file, still in its file format."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...  # row-major: (rows, columns) or (columns,)
    def read(self, start: int, stop: int) -> NDArray[np.uint8]: ...  # rows as (stop - start, bytes per row)


class Tensors:
    """Checked access by name; every method raises ModelError naming the tensor, what was found and what is expected."""

    def __init__(self, tensors: Mapping[str, Weight]) -> None:
        self._tensors = tensors
        self._used: set[str] = set()

    def matrix(self, name: str, rows: int, columns: int) -> Weight:
        return self._checked(name, (rows, columns))

    def vector(self, name: str, width: int) -> Weight:
        return self._checked(name, (width,))

    def optional_vector(self, name: str, width: int) -> Weight | None:
        return self.vector(name, width) if name in self else None

    def optional_numbers(self, name: str, width: int) -> NDArray[np.float32] | None:
        """The values float32 (width,) of a small vector that becomes part of the plan; they must be finite."""
        if name not in self:
            return None
        weight = self.vector(name, width)
        values: NDArray[np.float32] = quant.dequantize(weight.read(0, 1), weight.format)[0]
        if not np.isfinite(values).all():
            raise ModelError(f"{name}: holds NaN or infinity")
        return values

    def unused(self) -> tuple[str, ...]:
        """Names that nothing asked for, in the file's order."""
        return tuple(name for name in self._tensors if name not in self._used)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def _checked(self, name: str, shape: tuple[int, ...]) -> Weight:
        if name not in self:
            raise ModelError(f"{name}: the file does not hold this tensor; expected shape {_text(shape)}")
        weight = self._tensors[name]
        if tuple(weight.shape) != shape:
            raise ModelError(f"{name}: expected shape {_text(shape)} (rows, columns), found {_text(weight.shape)}")
        if weight.format not in quant.FORMATS or weight.format in _NOT_WEIGHTS:
            readable = ", ".join(f for f in quant.FORMATS if f not in _NOT_WEIGHTS)
            raise ModelError(f"{name}: format {weight.format} is not a weight format; supported: {readable}")
        try:
            quant.row_bytes(weight.format, shape[-1])
        except quant.QuantError as error:
            raise ModelError(f"{name}: {error}") from None
        self._used.add(name)
        return weight


def _text(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(str(n) for n in shape) + ")"
