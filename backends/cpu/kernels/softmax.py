"""Online softmax of attention: the state of some query rows, the update by a block of scores, and the merge of states.

The maxima of 16 rows share one vector, and the sums share another. So an update of both costs little per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add

from localllm.backends.cpu.kernels.attend import LOWEST, divisor, each
from localllm.backends.cpu.kernels.common import f32x16
from localllm.backends.cpu.memory import aligned
from localllm.backends.cpu.simd import F32, I32, LANES, Function, Value, vector
from localllm.plan import BLOCK

# e^r = 1 + r + r^2 p(r) for |r| <= ln 2 / 2; p has the minimum relative error, 3e-9.
_LOG2E, _LN2 = 1.44269504088896341, 0.69314718055994531
_POLYNOMIAL = (1.38145985669e-3, 8.36871688496e-3, 4.16683880474e-2, 1.66665206319e-1, 4.99999934478e-1)
_ROUND = 1.5 * 2.0**23 + 127.0  # adding this constant puts the nearest integer + 127 into the lowest bits


def exp_negative(f: Function, x: Value) -> Value:
    """Return e^x for float32 x <= 0, with a relative error below 1.3e-7: exactly 1 at 0, and 0 below -87.7."""

    def c(number: float) -> Value:
        return f.constant(x.type, number)

    clamped = f.fmax(c(-88.0), x)  # this operand order propagates NaN
    shifted = f.fma(clamped, c(_LOG2E), c(_ROUND))
    n = shifted - _ROUND
    r = f.fma(n, c(-_LN2), clamped)
    p = c(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = f.fma(p, r, c(coefficient))
    integer = vector(I32, x.type.count)
    return (f.fma(p, r * r, r) + 1.0) * f.bits(f.bits(shifted, integer) << 23, x.type)


@dataclass(frozen=True, slots=True)
class SoftmaxState:
    """Addresses of the outputs (rows, width), maxima and sums of some query rows."""

    outputs: Value
    rows: int
    width: int

    @property
    def maxima(self) -> Value:
        return self.outputs + 4 * self.rows * self.width

    @property
    def sums(self) -> Value:
        return self.maxima + partial_row_bytes(self.rows)

    def clear(self, f: Function) -> None:
        with f.loop(0, self.rows * self.width, LANES) as i:
            f.store(self.outputs + i * 4, f.zeros(f32x16))
        for at in _vectors(f, self.rows):
            f.store(self.maxima + at, f.constant(f32x16, LOWEST))
            f.store(self.sums + at, f.zeros(f32x16))

    def merge(self, f: Function, other: SoftmaxState, factors: Value) -> None:
        """Merge `other` into this state. `factors` is scratch for two floats per row."""
        for at in _vectors(f, self.rows):
            before, coming = (f.load(state.maxima + at, f32x16) for state in (self, other))
            now = f.fmax(before, coming)
            old, new = (exp_negative(f, m - now) for m in (before, coming))
            f.store(factors + at, old)
            f.store(factors + (at + partial_row_bytes(self.rows)), new)
            f.store(self.maxima + at, now)
            total = f.load(self.sums + at, f32x16) * old
            f.store(self.sums + at, f.fma(f.load(other.sums + at, f32x16), new, total))
        with f.loop(0, self.rows) as row:
            old = f.broadcast(factors + row * 4, F32)
            new = f.broadcast(factors + (row * 4 + partial_row_bytes(self.rows)), F32)
            with f.loop(0, self.width, LANES) as d:
                place = (row * self.width + d) * 4
                more = f.load(other.outputs + place, f32x16) * new
                f.store(self.outputs + place, f.fma(f.load(self.outputs + place, f32x16), old, more))


def partial_row_bytes(rows: int) -> int:
    """Return the bytes of one float per row, in whole vectors."""
    return aligned(4 * rows)


def state_bytes(rows: int, width: int) -> int:
    return aligned(4 * rows * width) + 2 * partial_row_bytes(rows)


def _vectors(f: Function, rows: int) -> Iterator[int | Value]:
    """Yield the byte offsets of the vectors of per-row floats. Lanes without a row are undefined."""
    return each(f, partial_row_bytes(rows), 4 * LANES)


def softmax(f: Function, scores: Value, state: SoftmaxState, shrink: Value) -> None:
    """Convert scores (rows, 64) to weights exp(score - maximum); update maxima, sums and `shrink`.

    `shrink` receives the factors by which earlier sums shrink. Several rows are processed together to hide the latency
    of each step.
    """
    rows = state.rows
    together = divisor(rows, f.isa.registers // 8)
    with f.loop(0, rows, together) as base:
        for row in (base + r for r in range(together)):
            f.store(shrink + row * 4, f.reduce(reduce(f.fmax, _parts(f, scores, row)), f.fmax))
    for at in _vectors(f, rows):
        old = f.load(state.maxima + at, f32x16)
        new = f.fmax(old, f.load(shrink + at, f32x16))
        f.store(state.maxima + at, new)
        f.store(shrink + at, exp_negative(f, old - new))
    together = divisor(rows, f.isa.registers // 16)
    with f.loop(0, rows, together) as base:
        for row in (base + r for r in range(together)):
            maximum = f.broadcast(state.maxima + row * 4, F32)
            weights = [exp_negative(f, x - maximum) for x in _parts(f, scores, row)]
            for j, weight in enumerate(weights):
                f.store(scores + (row * BLOCK + j * LANES) * 4, weight)
            total, factor = (f.load(numbers + row * 4, F32) for numbers in (state.sums, shrink))
            f.store(state.sums + row * 4, f.fma(total, factor, f.reduce(reduce(add, weights), add)))


def _parts(f: Function, scores: Value, row: Value) -> list[Value]:
    return [f.load(scores + (row * BLOCK + j) * 4, f32x16) for j in range(0, BLOCK, LANES)]
