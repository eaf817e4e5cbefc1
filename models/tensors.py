"""Checked access to the tensors of a GGUF: each must be present, have the expected shape, and be in a known format.

The class records the names that were used, so that `show` can list tensors that the forward pass does not use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.models import derived
from localllm.models.errors import ModelError
from localllm.plan import Tensor, Weight

_LAYER = re.compile(r"^blk\.\d+\.")
_NOT_WEIGHTS = ("I8", "I16", "I32", "I64")  # integer formats, which never hold weights


class Tensors:
    """Checked access to tensors by name. ModelError names the tensor and the expected and found values."""

    def __init__(
        self, tensors: Mapping[str, Tensor], ignored: Collection[str] = (), stored: Callable[[str], str] = str
    ) -> None:
        """Wrap the tensors of a GGUF except the `ignored` ones; for layer tensors, give the name after `blk.N.`.

        `stored` maps a tensor name to the name in the GGUF, for GGUFs in which several layers share one block.
        """
        self._stored = stored
        self._tensors = {name: tensor for name, tensor in tensors.items() if _LAYER.sub("", name) not in ignored}
        self._used: set[str] = set()

    def renamed(self, stored: Callable[[str], str]) -> Tensors:
        """Return the same tensors under other names; both objects share the record of used names."""
        other = Tensors(self._tensors, (), stored)
        other._used = self._used
        return other

    def matrix(self, name: str, rows: int, columns: int) -> Weight:
        return self._checked(name, (rows, columns))

    def vector(self, name: str, width: int) -> Weight:
        return self._checked(name, (width,))

    def stack(self, name: str, experts: int, rows: int, columns: int) -> Weight:
        """Return a tensor of stacked expert matrices."""
        return self._checked(name, (experts, rows, columns))

    def shared_stack(self, name: str, experts: int, group: int, rows: int, columns: int) -> Weight:
        """Return one matrix per expert; the GGUF contains one for each group of consecutive experts."""
        stack = self.stack(name, experts // group, rows, columns)
        return stack if group == 1 else Weight.of(derived.Shared(stack, group))

    def optional(self, name: str, *shape: int) -> Weight | None:
        return self._checked(name, shape) if name in self else None

    def either(self, name: str, *shapes: tuple[int, ...]) -> Weight:
        """Return a tensor that may have one of several shapes; the error for any other shape names the first."""
        found = self._shape(name)
        return self._checked(name, found if found in shapes else shapes[0])

    def folded(self, name: str, *shape: int) -> Weight:
        """Return a tensor of this shape; in the GGUF, size-1 dimensions before the last may be missing or added."""
        found = self._shape(name) or shape
        same = [n for n in found if n != 1] == [n for n in shape if n != 1] and found[-1] == shape[-1]
        return replace(self._checked(name, found if same else shape), shape=shape)

    def values(self, name: str) -> int:
        """Return the number of values of a tensor; 0 if it is missing."""
        found = self._shape(name)
        return math.prod(found) if found else 0

    def any_shape(self, name: str, values: int) -> Weight | None:
        """Return a tensor of any shape with this number of values; None if the GGUF does not contain it."""
        found = self._shape(name)
        if not found:
            return None
        return self._checked(name, found if math.prod(found) == values else (values,))

    def column(self, name: str, width: int) -> Weight:
        """Return a vector, which some GGUFs store as a column (width, 1)."""
        return self.folded(name, width, 1) if self.height(name) else self.vector(name, width)

    def ones(self, width: int) -> Weight:
        """Return a vector of ones, the weights of a norm without learned weights."""
        return self.numbers(f"ones({width})", [1.0] * width)

    def numbers(self, name: str, values: Sequence[float]) -> Weight:
        """Return a constant vector that is not in the GGUF; vectors with the same name must have the same values."""
        return Weight.of(derived.vector(name, values))

    def shaped(self, name: str, shape: tuple[int, ...], *stored: tuple[int, ...]) -> Weight:
        """Return a small tensor reshaped to `shape`; in the GGUF it has one of the `stored` shapes."""
        weight = self.either(name, *stored)
        return weight if weight.shape == shape else Weight.of(derived.shaped(weight, shape))

    def constant_rows(self, name: str, row: Sequence[float], rows: int) -> Weight:
        """Return a constant matrix of equal rows that is not in the GGUF; the same name must mean the same row."""
        return replace(self.numbers(f"{name}({rows})", row), shape=(rows, len(row)))

    def constant_stack(self, name: str, row: Sequence[float], heads: int) -> Weight:
        """Return a constant stack (heads, 1, len(row)) not in the GGUF; the same name must mean the same row."""
        return replace(self.numbers(f"{name}({heads}, {len(row)})", row), shape=(heads, 1, len(row)))

    def streams(self, name: str, streams: int, width: int) -> Weight:
        """Return norm weights for every residual stream, (streams, width); some GGUFs store them as one vector."""
        return self.shaped(name, (streams, width), (streams, width), (streams * width,))

    def dilated(self, name: str, channels: int, count: int, step: int) -> Weight:
        """Return a dilated convolution kernel: the taps of a kernel (channels, count) placed `step` apart, zeros
        between them.
        """
        return Weight.of(derived.dilated(self.folded(name, channels, count), step))

    def flat(self, name: str, matrices: int, rows: int, columns: int) -> Weight:
        """Return a stack reshaped to a matrix (matrices * rows, columns)."""
        return replace(self.stack(name, matrices, rows, columns), shape=(matrices * rows, columns))

    def repeated(self, name: str, heads: int, width: int, factor: float = 1.0) -> Weight:
        """Return weights (heads, width): one value per head, multiplied by `factor` and broadcast over `width`."""
        return Weight.of(derived.repeated(self.column(name, heads), width, factor))

    def integers(self, name: str, rows: int, width: int, most: int) -> Weight:
        """Return a table (rows, width) of integers 0..most - 1 as float32."""
        name = self._stored(name)
        if name not in self._tensors:
            raise ModelError(f"{name}: this tensor is missing; expected I32 {_text((rows, width))}")
        tensor = self._tensors[name]
        if tensor.format != "I32" or tuple(tensor.shape) != (rows, width):
            found = f"{tensor.format} {_text(tensor.shape)}"
            raise ModelError(f"{name}: expected I32 {_text((rows, width))} (rows, columns), found {found}")
        self._used.add(name)
        values = np.ascontiguousarray(tensor.read(0, rows)).view(np.int32).reshape(rows, width)
        outside = np.argwhere((values < 0) | (values >= most))
        if len(outside):
            row, column = outside[0]
            text = f"expected numbers from 0 to {most - 1}, found {values[row, column]} (row {row})"
            raise ModelError(f"{name}: {text}")
        return Weight.of(derived.table(name, values.astype(np.float32)))

    def inverse(self, name: str, width: int) -> Weight:
        """Return the reciprocals of a vector's values."""
        return Weight.of(derived.inverse(self.vector(name, width)))

    def slopes(self, heads: int, steepness: float) -> Weight:
        """Return the ALiBi slopes by head (arXiv:2108.12409), which are not in the GGUF; the usual steepness is 8."""
        return Weight.of(derived.slopes(heads, steepness))

    def row(self, name: str, width: int) -> Weight:
        """Return a vector as a matrix (1, width)."""
        return replace(self.vector(name, width), shape=(1, width))

    def rows(self, name: str, start: int, stop: int, of: int, columns: int) -> Weight:
        """Return rows start..stop of a matrix (of, columns)."""
        return self.matrix(name, of, columns).part(start, stop)

    def transposed(self, name: str, heads: int, rows: int, of: int, columns: int) -> Weight:
        """Return the first `rows` of every `of` rows of a matrix, transposed: a stack (heads, columns, rows).

        Quantized formats are converted to F16, because their blocks cannot be transposed. Other formats keep their
        values.
        """
        matrix = self.matrix(name, heads * of, columns)
        plain = quant.FORMATS[matrix.format].block_values == 1
        return Weight.of(derived.transposed(matrix, matrix.format if plain else "F16", heads, rows, of))

    def optional_part(self, name: str, start: int, stop: int, of: int) -> Weight | None:
        """Return values start..stop of a vector (of,), or None if the GGUF does not contain it."""
        vector = self.optional(name, of)
        if vector is None:
            return None
        try:
            quant.row_bytes(vector.format, start)
            quant.row_bytes(vector.format, stop)
        except quant.QuantError as error:
            raise ModelError(f"{name}: {error}") from None
        return vector.part(start, stop)

    def height(self, name: str) -> int:
        """Return the number of rows of a matrix, or of each matrix of a stack; 0 if the tensor is missing."""
        shape = self._shape(name)
        return int(shape[-2]) if len(shape) > 1 else 0

    def width(self, name: str) -> int:
        """Return the number of columns of a tensor; 0 if it is missing."""
        shape = self._shape(name)
        return int(shape[-1]) if shape else 0

    def optional_numbers(self, name: str, width: int) -> NDArray[np.float32] | None:
        """Return a small vector (width,) as float32 for use as plan constants; its values must be finite."""
        if name not in self:
            return None
        weight = self.vector(name, width)
        values: NDArray[np.float32] = quant.dequantize(weight.read(0, 1), weight.format)[0]
        if not np.isfinite(values).all():
            raise ModelError(f"{name}: contains NaN or infinity")
        return values

    def used(self) -> frozenset[str]:
        """Return the names of the tensors that were used."""
        return frozenset(self._used)

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._tensors

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; () if it is missing."""
        return tuple(self._tensors[self._stored(name)].shape) if name in self else ()

    def _checked(self, name: str, shape: tuple[int, ...]) -> Weight:
        name = self._stored(name)
        if name not in self._tensors:
            raise ModelError(f"{name}: this tensor is missing; expected shape {_text(shape)}")
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
        return Weight.of(weight)


def _text(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(str(n) for n in shape) + ")"
