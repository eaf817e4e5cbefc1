"""The weights and inputs of a conformance check: few distinct values, equal in every run.

Inputs are small integers times a power of two. Half precision and activation blocks represent inputs exactly, so a
product may differ from the reference only by its summation order. A large matrix repeats PERIOD rows. The reference
computes only the distinct rows, the device computes all rows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.plan import F32, Value

U8 = NDArray[np.uint8]
PERIOD = 61  # distinct rows of a matrix: a prime, so that equal rows are at different offsets in different tiles
EXPERTS = 3  # distinct experts of a stack
BLOCKS = 256  # distinct blocks of a format
UNIT = 2.0**-6


@dataclass(frozen=True)
class Sample:
    """A tensor with generated values that acts as `plan.Tensor`. `kind` is a key of VECTORS, or "" for a matrix."""

    name: str
    format: str
    shape: tuple[int, ...]
    kind: str = ""

    def read(self, start: int, stop: int) -> U8:
        rows = np.arange(start, stop)
        shift = zlib.crc32(self.name.encode())  # depends on the name, so that a plan has no two equal matrices
        if self.kind:
            values = VECTORS[self.kind](_random(self.name, self.shape), self.shape).astype(np.float32)
            own: U8 = np.ascontiguousarray(values.reshape(-1, self.shape[-1])[rows]).view(np.uint8)
            return own
        if len(self.shape) == 3:  # row n of each expert
            expert, row = np.divmod(rows, self.shape[1])
            rows = expert % EXPERTS * PERIOD + (row + shift) % PERIOD
        else:
            rows = (rows + shift) % PERIOD
        found: U8 = _rows(self.format, self.shape[-1])[rows]
        return found


def _random(*key: object) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(repr(key).encode()))


@cache
def _blocks(format: str) -> U8:
    """Return BLOCKS blocks of random bytes that use every bit of the format and have similar largest magnitudes."""
    fmt, random = quant.FORMATS[format], _random(format)
    found = np.empty((0, fmt.block_bytes), np.uint8)
    while len(found) < BLOCKS:
        blocks = random.randint(0, 256, (32 * BLOCKS, fmt.block_bytes), np.uint8)
        with np.errstate(all="ignore"):
            largest = np.abs(quant.dequantize(blocks, format)).max(axis=1)
            found = np.concatenate([found, blocks[(largest >= 0.5) & (largest <= 4.0)]])
    return found[:BLOCKS]


@cache
def _rows(format: str, columns: int) -> U8:
    """Return EXPERTS * PERIOD rows of a format, uint8 (rows, bytes)."""
    random, count = _random(format, columns), EXPERTS * PERIOD
    if quant.FORMATS[format].block_values == 1:
        return quant.quantize(random.standard_normal((count, columns)).astype(np.float32), format)
    own = _blocks(format)
    blocks = columns // quant.FORMATS[format].block_values
    return own[random.randint(0, len(own), (count, blocks))].reshape(count, -1)


Vector = Callable[[np.random.RandomState, tuple[int, ...]], NDArray[np.float64]]
VECTORS: dict[str, Vector] = {
    "gain": lambda random, shape: random.uniform(0.5, 1.5, shape),
    "bias": lambda random, shape: random.standard_normal(shape),
    "periodic": lambda random, shape: np.resize(random.standard_normal(PERIOD), shape),
    "rate": lambda random, shape: -random.uniform(0.05, 0.5, shape),  # decay rates
    "slope": lambda random, shape: random.uniform(0.05, 0.5, shape),
    "mean": lambda random, shape: random.standard_normal(shape) / shape[-1] ** 0.5,  # weights whose sum stays small
}


def exact(random: np.random.RandomState, rows: int, width: int, factor: float = 1.0) -> F32:
    """Return integers -127..127 times UNIT and `factor`, a power of two.

    Every 32 values contain the largest magnitude.
    """
    found = random.randint(-127, 128, (rows, width)).astype(np.float32)
    for start in range(0, width, 32):
        at = start + random.randint(0, min(32, width - start), rows)
        found[np.arange(rows), at] = 127 * random.choice([-1.0, 1.0], rows)
    return found * np.float32(UNIT * factor)


Input = Callable[[np.random.RandomState, int, Value], NDArray[Any]]


def _magnified(random: np.random.RandomState, rows: int, value: Value) -> F32:
    """Return rows of several magnitudes."""
    return exact(random, rows, value.width) * (2.0 ** (np.arange(rows) % 5 - 2.0)).astype(np.float32)[:, None]


def _ranks(random: np.random.RandomState, rows: int, value: Value) -> NDArray[np.float64]:
    """Return rows without equal values, for top-k: permutations, spread over about -3 to 3."""
    order = np.argsort(random.random_sample((rows, value.width)), axis=1)
    return np.asarray((order - (value.width - 1) / 2) * (6.0 / max(value.width, 2)))


def _numbers(random: np.random.RandomState, rows: int, value: Value) -> NDArray[np.float64]:
    """Return permutations of 0, 1, 2, ... for operations that take expert numbers as input."""
    return np.argsort(random.random_sample((rows, value.width)), axis=1).astype(np.float64)


def _between(low: float, high: float) -> Input:
    return lambda random, rows, value: random.uniform(low, high, (rows, value.width))


def _of_unit(size: float) -> Input:
    """Return an input generator for values of about this magnitude."""
    factor = 2.0 ** round(math.log2(size))
    return lambda random, rows, value: exact(random, rows, value.width, factor)


def _integers(random: np.random.RandomState, rows: int, value: Value) -> NDArray[np.float64]:
    """Return small integers. Sums of their products are exact, so the scores have the same order everywhere."""
    return np.asarray(random.randint(-3, 4, (rows, value.width)), np.float64)


INPUTS: dict[str, Input] = {
    "": _magnified,
    "unit": _of_unit(1.0),
    "small": _of_unit(0.125),
    "tiny": _of_unit(1 / 64),
    "step": _between(0.01, 0.2),
    "share": _between(0.1, 0.9),
    "decay": _between(0.8, 0.99),
    "ranks": _ranks,
    "numbers": _numbers,
    "integers": _integers,
}


def sample_inputs(kind: str, seed: object, rows: int, value: Value) -> F32:
    """Return generated rows (rows, width) for a value.

    `kind` is a key of INPUTS, optionally followed by a space and a factor.
    """
    name, _, factor = kind.partition(" ")
    found = INPUTS[name](_random(kind, seed, value.width), rows, value)
    return np.ascontiguousarray(found, np.float32) * np.float32(factor or 1.0)
