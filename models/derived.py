"""Weights that are not stored in the GGUF: constants, or tensors computed from the GGUF's tensors
when they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.plan import Weight


@dataclass(frozen=True, slots=True)
class Numbers:
    """A constant vector as a tensor."""

    name: str
    values: tuple[float, ...]
    format: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.values),)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        return np.array([self.values] * (stop - start), np.float32).view(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A constant float32 matrix as a tensor."""

    name: str
    values: NDArray[np.float32]
    format: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.values[start:stop]).view(np.uint8)


@dataclass(frozen=True, slots=True)
class Shaped:
    """A tensor converted to float32 and reshaped."""

    weight: Weight
    shape: tuple[int, ...]
    format: str = "F32"

    @property
    def name(self) -> str:
        return self.weight.name

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        numbers = quant.dequantize(self.weight.read(0, math.prod(self.weight.shape[:-1])), self.weight.format)
        return np.ascontiguousarray(numbers.astype(np.float32).reshape(-1, self.shape[-1])[start:stop]).view(np.uint8)


@dataclass(frozen=True, slots=True)
class Repeated:
    """One value per head, broadcast to `width` values."""

    weight: Weight  # (heads,) or (heads, 1)
    width: int
    factor: float
    format: str = "F32"

    @property
    def name(self) -> str:
        return f"{self.weight.name} x {self.width}" + (f" times {self.factor:g}" if self.factor != 1.0 else "")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.weight.shape[0], self.width)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        every = self.weight.read(0, self.weight.shape[0] if len(self.weight.shape) > 1 else 1)
        numbers = quant.dequantize(every, self.weight.format).reshape(-1, 1)[start:stop] * self.factor
        return np.repeat(numbers.astype(np.float32), self.width, axis=1).view(np.uint8)


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


@dataclass(frozen=True, slots=True)
class Dilated:
    """A dilated convolution kernel with zeros between its taps, float32."""

    weight: Weight  # (channels, count)
    step: int
    format: str = "F32"

    @property
    def name(self) -> str:
        return f"{self.weight.name} by {self.step}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape[0], (self.weight.shape[1] - 1) * self.step + 1

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        wide = np.zeros((stop - start, self.shape[1]), np.float32)
        wide[:, :: self.step] = quant.dequantize(self.weight.read(start, stop), self.weight.format)
        return wide.view(np.uint8)


@dataclass(frozen=True, slots=True)
class Inverse:
    """The reciprocals of a vector's values."""

    weight: Weight
    format: str = "F32"

    @property
    def name(self) -> str:
        return f"1 / {self.weight.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        numbers = quant.dequantize(self.weight.read(start, stop), self.weight.format)
        with np.errstate(divide="ignore"):
            return (1.0 / numbers.astype(np.float32)).view(np.uint8)


@dataclass(frozen=True, slots=True)
class Slopes:
    """ALiBi slopes: a geometric series down to 2^-steepness; heads beyond a power of two get the steps in between."""

    heads: int
    steepness: float
    format: str = "F32"

    @property
    def name(self) -> str:
        return f"slopes({self.heads}, {self.steepness:g})"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.heads,)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        power = 1 << self.heads.bit_length() - 1  # largest power of two not above the number of heads
        steps = [*range(2, 2 * power + 1, 2), *range(1, 2 * (self.heads - power), 2)]  # exponents in half steps
        return (2.0 ** (-self.steepness / (2 * power) * np.array(steps))).astype(np.float32)[None].view(np.uint8)


@dataclass(frozen=True, slots=True)
class Transposed:
    """The first `rows` of every `of` rows of a matrix, transposed to a stack (heads, columns, rows)."""

    matrix: Weight
    format: str
    heads: int
    rows: int
    of: int

    @property
    def name(self) -> str:
        return f"{self.matrix.name} transposed"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.heads, self.matrix.shape[1], self.rows

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        columns, parts = self.matrix.shape[1], []
        for head in range(start // columns, -(-stop // columns)):
            stored = self.matrix.read(head * self.of, head * self.of + self.rows)
            turned = quant.dequantize(stored, self.matrix.format).T
            first = head * columns
            wanted = np.ascontiguousarray(turned[max(start - first, 0) : stop - first])
            parts.append(quant.quantize(wanted, self.format))
        return np.concatenate(parts)
