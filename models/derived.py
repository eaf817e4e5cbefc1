"""Weights that are not stored in the GGUF: constants, or tensors computed from the GGUF's tensors
when they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.plan import Weight

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """A tensor whose rows are computed when they are read."""

    name: str
    shape: tuple[int, ...]
    rows: Callable[[int, int], F32]  # (start, stop) -> rows start..stop, counted as in `Tensor.read`
    format: str = "F32"

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        return quant.quantize(np.ascontiguousarray(self.rows(start, stop), np.float32), self.format)


@dataclass(frozen=True, slots=True)
class Shared:
    """A stack (experts, rows, columns) in which a group of consecutive experts shares one matrix."""

    stack: Weight
    group: int

    @property
    def name(self) -> str:
        return self.stack.name

    @property
    def format(self) -> str:
        return self.stack.format

    @property
    def shape(self) -> tuple[int, ...]:
        return self.group * self.stack.shape[0], *self.stack.shape[1:]

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        rows, parts = self.stack.shape[1], []
        for expert in range(start // rows, -(-stop // rows)):
            first, last = (min(max(at - expert * rows, 0), rows) for at in (start, stop))
            own = expert // self.group * rows
            parts.append(self.stack.read(own + first, own + last))
        return np.concatenate(parts)


def values(weight: Weight) -> F32:
    """Return all values of a tensor, (rows, columns); a vector is one row."""
    return quant.dequantize(weight.read(0, math.prod(weight.shape[:-1])), weight.format).astype(np.float32)


def vector(name: str, numbers: Sequence[float]) -> Derived:
    """Return a constant vector."""
    return Derived(name, (len(numbers),), lambda start, stop: np.array([numbers] * (stop - start), np.float32))


def table(name: str, numbers: F32) -> Derived:
    """Return a constant matrix."""
    return Derived(name, numbers.shape, lambda start, stop: numbers[start:stop])


def shaped(weight: Weight, shape: tuple[int, ...]) -> Derived:
    """Return a tensor converted to float32 and reshaped."""
    return Derived(weight.name, shape, lambda start, stop: values(weight).reshape(-1, shape[-1])[start:stop])


@dataclass(frozen=True, slots=True)
class Folded:
    """A tensor whose values are divided into other rows, in their stored format."""

    stored: Weight
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def format(self) -> str:
        return self.stored.format

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        size = quant.row_bytes(self.format, self.shape[-1])
        of_stored = quant.row_bytes(self.format, self.stored.shape[-1])
        first, last = start * size // of_stored, -(-stop * size // of_stored)
        found = self.stored.read(first, last).reshape(-1)
        at = start * size - first * of_stored
        return found[at : at + (stop - start) * size].reshape(stop - start, size)


def folded(weight: Weight, shape: tuple[int, ...]) -> Folded | Weight:
    """Return a tensor with other rows of the same values."""
    return weight if weight.shape == shape else Folded(weight, shape)


def repeated(weight: Weight, width: int, factor: float) -> Derived:
    """Return one value per head, (heads,) or (heads, 1), times `factor` and broadcast to `width` values."""
    name = f"{weight.name} x {width}" + (f" times {factor:g}" if factor != 1.0 else "")

    def rows(start: int, stop: int) -> F32:
        return np.repeat(values(weight).reshape(-1, 1)[start:stop] * np.float32(factor), width, axis=1)

    return Derived(name, (weight.shape[0], width), rows)


def dilated(weight: Weight, step: int) -> Derived:
    """Return a dilated convolution kernel from (channels, count) taps, with zeros between them."""
    channels, count = weight.shape
    width = (count - 1) * step + 1

    def rows(start: int, stop: int) -> F32:
        wide = np.zeros((stop - start, width), np.float32)
        wide[:, ::step] = quant.dequantize(weight.read(start, stop), weight.format)
        return wide

    return Derived(f"{weight.name} by {step}", (channels, width), rows)


def inverse(weight: Weight) -> Derived:
    """Return the reciprocals of a vector's values."""

    def rows(start: int, stop: int) -> F32:
        with np.errstate(divide="ignore"):
            return np.float32(1.0) / values(weight)

    return Derived(f"1 / {weight.name}", weight.shape, rows)


def slopes(heads: int, steepness: float) -> Derived:
    """Return ALiBi slopes: a geometric series down to 2^-steepness; heads beyond a power of two get the steps in
    between.
    """
    power = 1 << heads.bit_length() - 1  # largest power of two not above the number of heads
    steps = [*range(2, 2 * power + 1, 2), *range(1, 2 * (heads - power), 2)]  # exponents in half steps
    return vector(f"slopes({heads}, {steepness:g})", (2.0 ** (-steepness / (2 * power) * np.array(steps))).tolist())


def transposed(matrix: Weight, format: str, heads: int, rows: int, of: int) -> Derived:
    """Return the first `rows` of every `of` rows of a matrix, transposed to a stack (heads, columns, rows)."""
    columns = matrix.shape[1]

    def turned(start: int, stop: int) -> F32:
        parts = []
        for head in range(start // columns, -(-stop // columns)):
            own = quant.dequantize(matrix.read(head * of, head * of + rows), matrix.format).T
            first = head * columns
            parts.append(own[max(start - first, 0) : stop - first])
        return np.concatenate(parts)

    return Derived(f"{matrix.name} transposed", (heads, columns, rows), turned, format)
