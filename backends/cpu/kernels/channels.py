"""Linear attention with a separate decay for each key channel: `plan.LinearAttention` with a step size per channel.

The store holds the decay factor exp(rate * step) of every row and channel. From the newest row backwards, the running
product of these factors scales the keys. This takes one multiplication per value; an exponential of a difference of
sums would take twenty operations. The order is the same for every pair of rows, so results are bitwise independent of
the division into steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.cpu.kernels.common import PlanKernel, Step, exp, f32x16, kernel, own_rows
from localllm.backends.cpu.kernels.recurrence import KeysArguments
from localllm.backends.cpu.kernels.state_heads import LINE, TOGETHER, Reads, RecurrenceHead
from localllm.backends.cpu.simd import F32, LANES, Function, Value, Variable
from localllm.backends.cpu.stores import key_bytes, whole_strips
from localllm.plan import BLOCK, StateLayer

LEAST = 1e-30  # smaller products become 0, because subnormal numbers slow down multiplication


def _line(f: Function, at: Value, width: int) -> list[Value]:
    """Return `width` float32 values as vectors, padded with zeros."""
    found = [f.load(at + 4 * first, f32x16) for first in range(0, width, LANES)]
    left = width % LANES
    if left:
        found[-1] = f.select(f.lane_numbers() < left, found[-1], f.zeros(f32x16))
    return found


def append_key_rows(of: StateLayer) -> PlanKernel[KeysArguments]:
    """Write the keys of every row, with channels as lanes."""
    row_bytes = 4 * whole_strips(of.key_dim)

    def body(f: Function, a: KeysArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with own_rows(f, step.rows, thread, threads) as row:
            slot, k = f.load_i32(step.slots, row), a.k.row(row)
            to = a.keys + (slot // BLOCK * (of.key_heads * key_bytes(of)) + slot % BLOCK * row_bytes)
            with f.loop(0, of.key_heads) as head:
                for n, key in enumerate(_line(f, k + head * (4 * of.key_dim), of.key_dim)):
                    f.store(to + head * key_bytes(of) + 64 * n, key)

    return kernel(f"append_key_rows_{of.key_heads}_{of.key_dim}", KeysArguments, body)


@dataclass(frozen=True, slots=True)
class ChannelHead(RecurrenceHead):
    """Emits the steps of one head whose channels have separate decays."""

    @staticmethod
    def scratch_bytes(of: StateLayer) -> int:
        """Return the scratch bytes: for a block's decayed keys and start decay, or update weights, queries and keys."""
        line = 4 * whole_strips(of.key_dim)
        return max((BLOCK + 1) * line, 2 * TOGETHER * (line + LINE))

    @property
    def line_bytes(self) -> int:
        return 4 * whole_strips(self.of.key_dim)

    def whole_products(self) -> list[Variable]:
        """Return one variable per channel vector, initially 1: the product of no decays."""
        one = self.f.constant(f32x16, 1.0)
        return [self.f.var(one) for _ in range(whole_strips(self.of.key_dim) // LANES)]

    def fade(self, product: Variable, decay: Value) -> None:
        f = self.f
        less = product.get() * decay
        product.set(f.select(less < LEAST, f.zeros(f32x16), less))  # this select keeps NaN

    def advance(self, before: Value, block: Value) -> None:
        f, line, products = self.f, self.line_bytes, self.whole_products()
        old, keys = self.own(before), self.keys(before)
        decays, grown = old + self.at.decays, self.scratch + BLOCK * line
        with f.loop(0, BLOCK) as back:
            row = (f.i64(BLOCK - 1) - back) * line
            for n, product in enumerate(products):
                f.store(self.scratch + row + 64 * n, f.load(keys + row + 64 * n, f32x16) * product.get())
                self.fade(product, f.load(decays + row + 64 * n, f32x16))
        for n, product in enumerate(products):
            f.store(grown + 64 * n, product.get())

        def gather(d: Value, count: int) -> None:
            places = [d * 4 + 4 * n for n in range(count)]
            shares = [f.broadcast(grown + place, F32) for place in places]
            self.gather(d, old, block, shares, [self.scratch + place for place in places], line)

        self.in_states(gather)

    def prepare(self, row: Value, count: Value, block: Value, at: Value) -> None:
        """Do nothing: the products depend on the decays of the head."""

    def reads(self, row: Value, block: Value, at: Value, count: int) -> Reads:
        """Store the decay factors of the rows. Walk back to the block's start and scale the keys."""
        f, line = self.f, self.line_bytes
        by_query, by_key = self.scratch, self.scratch + TOGETHER * LINE
        query = self.scratch + 2 * TOGETHER * LINE
        key = query + TOGETHER * line
        with f.loop(0, count) as t:
            self._read(row + t, block, at + t, by_query + t * LINE, by_key + t * LINE, query + t * line, key + t * line)
        bases = (query, line), (key, line), (by_query, LINE), (by_key, LINE)
        queries, keys, *weights = [[to + t * size for t in range(count)] for to, size in bases]
        return Reads(queries, keys, None, *weights)

    def _read(
        self, row: Value, block: Value, at: Value, by_query: Value, by_key: Value, query: Value, key: Value
    ) -> None:
        f, a, width, line = self.f, self.a, self.of.key_dim, self.line_bytes
        decays, keys = self.own(block) + self.at.decays, self.keys(block)
        rate = f.broadcast(a.rate + self.head * 4, F32)
        for n, step in enumerate(_line(f, a.step_sizes.row(row) + self.head * (4 * width), width)):
            f.store(decays + at * line + 64 * n, exp(f, step * rate))
        q, k = (_line(f, rows.row(row) + self.key_head * (4 * width), width) for rows in (a.q, a.k))
        weighers = [(by_query, q)] + ([(by_key, k)] if self.kind.delta else [])
        products = self.whole_products()
        with f.loop(0, at + 1) as back:
            i = at - back
            sums = [f.zeros(f32x16) for _ in weighers]
            for n, product in enumerate(products):
                line_key = f.load(keys + i * line + 64 * n, f32x16) * product.get()
                sums = [f.fma(line_key, x[n], total) for (_, x), total in zip(weighers, sums, strict=True)]
                self.fade(product, f.load(decays + i * line + 64 * n, f32x16))
            for (to, _), total in zip(weighers, sums, strict=True):
                f.store(to + i * 4, f.reduce(total, lambda x, y: x + y))
        for to, numbers in ((query, q), (key, k)):
            for n, product in enumerate(products):
                f.store(to + 64 * n, numbers[n] * product.get())
