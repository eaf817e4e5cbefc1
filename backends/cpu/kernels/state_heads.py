"""The heads of linear attention: how the rows of a block are computed from its state and its updates.

Some rows of a block are computed together, which share every read of the state and of the updates. Every value has one
chain of operations, in the order of positions and dimensions, and neighbouring outputs are the lanes. So a row's result
depends neither on the other rows of a step nor on the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localllm.backends.cpu.arguments import Address, AddressOrZero, Output, Rows, Struct, Target
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.kernels.common import exp, f32x16
from localllm.backends.cpu.simd import F32, I32, LANES, Function, Value, Variable
from localllm.backends.cpu.stores import HeadState, head_state, key_bytes, whole_strips
from localllm.plan import BLOCK, StateLayer

CHAINS = 4  # partial sums of a score, added in pairs; in a single chain, each product would wait for the previous one
TOGETHER = 4  # maximum number of rows that are computed together
STATES = 4  # rows of the state that are computed together from a full block
LINE = 4 * BLOCK  # bytes of one float32 per position of a block
LEAST_DECAY = -88.0  # logarithm; `exp` is 0 below -87. Larger numbers would round away the decays added to them.


class AttendArguments(Struct):
    step: Address
    q: Rows
    k: Rows
    v: Rows
    step_sizes: Rows
    strength: Rows
    y: Output
    keys: Address
    states: Target  # (blocks, heads), in the layout of `HeadState`
    rate: Address  # float32 (heads,)
    skip: AddressOrZero  # float32 (heads,)
    counter: Address
    scratch: Rows  # `RecurrenceHead.scratch_bytes` per thread


@dataclass(frozen=True, slots=True)
class Attending:
    """The variant of `plan.LinearAttention` that a kernel implements."""

    of: StateLayer
    delta: bool
    tiled: bool
    steps: bool  # whether there are step sizes; otherwise all are 1
    strengths: bool

    @property
    def name(self) -> str:
        flags = ("delta", self.delta), ("tiled", self.tiled), ("even", not self.steps), ("full", not self.strengths)
        of, said = self.of, "".join([f"_{name}" for name, on in flags if on])
        return f"{of.heads}_{of.key_heads}_{of.key_dim}_{of.value_dim}{said}{'_channels' * of.channels}"

    def tile(self, isa: Isa) -> tuple[int, int]:
        """Return (rows, vectors of a row) that are computed together; their sums stay in registers."""
        if isa.dot == "vnni512":
            return TOGETHER, 2 if self.delta else 4
        return 2 if self.delta else TOGETHER, 1


class Reads(NamedTuple):
    """The factors by which rows multiply the state and the updates, one of each per row."""

    query: Sequence[Value]  # addresses of float32 (key_dim,)
    key: Sequence[Value]
    grown: Value | None  # address of decays that multiply the products with the state; None: included in query and key
    by_query: Sequence[Value]  # addresses of float32 (64,)
    by_key: Sequence[Value]


@dataclass(frozen=True, slots=True)
class RecurrenceHead:
    """Emits the steps of one head with a single decay."""

    f: Function
    a: AttendArguments
    kind: Attending
    head: Value
    key_head: Value
    scratch: Value

    @staticmethod
    def scratch_bytes(of: StateLayer) -> int:
        """Return the scratch bytes: update weights of queries and keys, decays, and products of a block's keys."""
        return 2 * TOGETHER * LINE + 128 + 2 * BLOCK * LINE

    @property
    def products(self) -> Value:
        """The products of the block's keys with queries, float32 (64, 64), then with keys."""
        return self.scratch + (2 * TOGETHER * LINE + 128)

    @property
    def of(self) -> StateLayer:
        return self.kind.of

    @property
    def at(self) -> HeadState:
        return head_state(self.of)

    @property
    def row_bytes(self) -> int:
        return 4 * whole_strips(self.of.value_dim)

    def pieces(self, size: int) -> list[tuple[int, int]]:
        """Return (offset in bytes, vectors) of the pieces of a row, of at most `size` vectors."""
        vectors = whole_strips(self.of.value_dim) // LANES
        return [(64 * first, min(size, vectors - first)) for first in range(0, vectors, size)]

    def own(self, block: Value) -> Value:
        return self.a.states + (block * self.of.heads + self.head) * self.at.size

    def keys(self, block: Value) -> Value:
        return self.a.keys + (block * self.of.key_heads + self.key_head) * key_bytes(self.of)

    # -- between blocks ----------------------------------------------------------------------------------------------

    def clear(self, block: Value) -> None:
        f, state = self.f, self.own(block) + self.at.state
        with f.loop(0, self.of.key_dim * self.row_bytes, 64) as i:
            f.store(state + i, f.zeros(f32x16))

    def advance(self, before: Value, block: Value) -> None:
        """Compute a block's state from the full previous block."""
        f, old, keys = self.f, self.own(before), self.keys(before)
        decays = old + self.at.decays
        last = f.broadcast(decays + 4 * (BLOCK - 1), F32)
        grown, shrunk, weighted = exp(f, last), self.scratch, self.scratch + LINE
        with f.loop(0, LINE, 64) as i:
            f.store(shrunk + i, exp(f, last - f.load(decays + i, f32x16)))

        def gather(d: Value, count: int) -> None:
            for n in range(count):
                with f.loop(0, LINE, 64) as i:
                    weights = f.load(shrunk + i, f32x16)
                    f.store(weighted + (i + n * LINE), f.load(keys + (d * LINE + i + n * LINE), f32x16) * weights)
            self.gather(d, old, block, [grown] * count, [weighted + n * LINE for n in range(count)], 4)

        self.in_states(gather)

    def in_states(self, emit: Callable[[Value, int], None]) -> None:
        """Call emit(d, count) for runs of rows of the state."""
        f, full = self.f, self.of.key_dim // STATES * STATES
        if full:
            with f.loop(0, full, STATES) as d:
                emit(d, STATES)
        if self.of.key_dim > full:
            emit(f.i64(full), self.of.key_dim - full)

    def gather(
        self, d: Value, old: Value, block: Value, grown: Sequence[Value], weights: Sequence[Value], stride: int
    ) -> None:
        """Compute rows of the state from d: the previous rows times `grown`, plus the updates times their weights."""
        f, size = self.f, self.row_bytes
        source, target = old + self.at.state + d * size, self.own(block) + self.at.state + d * size
        for offset, vectors in self.pieces(4):
            lines = [(row, offset + 64 * n) for row in range(len(weights)) for n in range(vectors)]
            sums = [f.var(f.load(source + (row * size + at), f32x16) * grown[row]) for row, at in lines]
            with f.loop(0, BLOCK) as i:
                updates = [f.load(old + (i * size + (offset + 64 * n)), f32x16) for n in range(vectors)]
                for row, of_row in enumerate(weights):
                    weight = f.broadcast(of_row + i * stride, F32)
                    for n, update in enumerate(updates):
                        total = sums[row * vectors + n]
                        total.set(f.fma(weight, update, total.get()))
            for (row, at), total in zip(lines, sums, strict=True):
                f.store(target + (row * size + at), total.get())

    # -- rows of a block ---------------------------------------------------------------------------------------------

    def segment(self, row: Value, count: Value, block: Value, at: Value) -> None:
        """Process `count` rows of a block: write their updates to the block and their outputs to y."""
        together, vectors = self.kind.tile(self.f.isa)

        def emit(done: Value, size: int) -> None:
            self.rows(row + done, block, at + done, size, vectors if size > 1 else 4)

        in_tiles(self.f, count, together, emit)

    def rows(self, row: Value, block: Value, at: Value, count: int, most: int) -> None:
        """Process `count` neighbouring rows, at most `most` vectors of each at a time."""
        f, a, of = self.f, self.a, self.of
        reads = self.reads(row, block, at, count)
        v, y = ([x.row(row + t) + self.head * (4 * of.value_dim) for t in range(count)] for x in (a.v, a.y))
        strengths = [a.strength.row(row + t) + self.head * 4 for t in range(count)] if self.kind.strengths else None
        skip = f.var(f.zeros(f32x16))
        with f.when(a.skip.differs(0)):
            skip.set(f.broadcast(f.pointer(a.skip) + self.head * 4, F32))
        for offset, vectors in self.pieces(most):
            # sums of the rows' products with queries, and with keys
            seen, known = (
                [[f.var(f.zeros(f32x16)) for _ in range(vectors)] for _ in range(count if used else 0)]
                for used in (True, self.kind.delta)
            )
            self.multiply(self.own(block) + (self.at.state + offset), of.key_dim, reads.query, reads.key, seen, known)
            if reads.grown is not None:
                for totals in (seen, known):
                    for t, of_row in enumerate(totals):
                        grown = f.broadcast(reads.grown + t * 4, F32)
                        for total in of_row:
                            total.set(total.get() * grown)
            updates = self.own(block) + offset
            self.multiply(updates, at, reads.by_query, reads.by_key, seen, known)
            made: list[list[Value]] = []
            for t in range(count):
                for i, update in enumerate(made):
                    for totals, weights in ((seen, reads.by_query), (known, reads.by_key)):
                        if totals:
                            weight = f.broadcast(weights[t] + (at + i) * 4, F32)
                            for total, part in zip(totals[t], update, strict=True):
                                total.set(f.fma(part, weight, total.get()))
                newest = f.broadcast(reads.by_query[t] + (at + t) * 4, F32)
                strength = f.broadcast(strengths[t], F32) if strengths is not None else None
                made.append([])
                for n, total in enumerate(seen[t]):
                    place = offset + 64 * n
                    value = f.load(v[t] + place, f32x16)
                    own = value - known[t][n].get() if known else value
                    own = own if strength is None else own * strength
                    made[t].append(own)
                    f.store(updates + ((at + t) * self.row_bytes + 64 * n), own)
                    out = f.fma(skip.get(), value, f.fma(newest, own, total.get()))
                    f.store_lanes(y[t] + place, out, min(LANES, of.value_dim - place // 4))

    def multiply(
        self, lines: Value, count: Value | int, query: Sequence[Value], key: Sequence[Value],
        seen: list[list[Variable]], known: list[list[Variable]],
    ) -> None:  # fmt: skip
        """Add `count` rows of the state or the updates, from address `lines`, times every row's factors to its sums."""
        f = self.f
        with f.loop(0, count) as i:
            parts = [f.load(lines + (i * self.row_bytes + 64 * n), f32x16) for n in range(len(seen[0]))]
            for totals, factors in ((seen, query), (known, key)):
                for of_row, factor in zip(totals, factors, strict=False):
                    weight = f.broadcast(factor + i * 4, F32)
                    for total, part in zip(of_row, parts, strict=True):
                        total.set(f.fma(part, weight, total.get()))

    def prepare(self, row: Value, count: Value, block: Value, at: Value) -> None:
        """Compute k_i . q_t for `count` rows t of a block and its rows i <= t, and k_i . k_t with the delta rule.

        All heads of the task share the products.
        """
        f, a, of, keys = self.f, self.a, self.of, self.keys(block)
        factors = [a.q, a.k] if self.kind.delta else [a.q]

        def emit(done: Value, size: int) -> None:
            x = [[r.row(row + done + t) + self.key_head * (4 * of.key_dim) for r in factors] for t in range(size)]
            with f.loop(0, (at + done + (size - 1)) // LANES + 1) as panel:
                line = keys + panel * 64
                sums = [[[f.var(f.zeros(f32x16)) for _ in range(CHAINS)] for _ in factors] for _ in range(size)]

                def add(d: Value, chains: int) -> None:
                    for chain in range(chains):
                        key = f.load(line + ((d + chain) * LINE), f32x16)
                        for of_row, totals in zip(x, sums, strict=True):
                            for factor, chained in zip(of_row, totals, strict=True):
                                other = f.broadcast(factor + (d + chain) * 4, F32)
                                chained[chain].set(f.fma(key, other, chained[chain].get()))

                full = of.key_dim // CHAINS * CHAINS
                with f.loop(0, full, CHAINS) as d:
                    add(d, CHAINS)
                add(f.i64(full), of.key_dim - full)
                for t, of_row in enumerate(sums):
                    for number, chained in enumerate(of_row):
                        to = self.products + ((at + done + t) * LINE + panel * 64 + number * (BLOCK * LINE))
                        first, second, third, fourth = (total.get() for total in chained)
                        f.store(to, (first + second) + (third + fourth))

        rows, vectors = self.kind.tile(f.isa)
        in_tiles(f, count, max(1, rows * vectors // CHAINS), emit)

    def reads(self, row: Value, block: Value, at: Value, count: int) -> Reads:
        """Store the sums of decays up to these rows, and compute the weights of the block's rows."""
        f, a, of = self.f, self.a, self.of
        decays, rate = self.own(block) + self.at.decays, f.load(a.rate + self.head * 4, F32)
        by_query, by_key, sums = (self.scratch + part * (TOGETHER * LINE) for part in range(3))
        grown = sums + 64
        g = f.var(f.constant(F32, 0.0))
        with f.when(at > 0):
            g.set(f.load(decays + (at * 4 - 4), F32))
        for t in range(count):
            own = f.load(a.step_sizes.row(row + t) + self.head * 4, F32) * rate if self.kind.steps else rate
            own = f.select(own < LEAST_DECAY, f.constant(F32, LEAST_DECAY), own)  # keeps NaN
            g.set(own + g.get() if t else f.select(at > 0, own + g.get(), own))
            f.store(decays + (at + t) * 4, g.get())
            f.store(sums + t * 4, g.get())
        f.store(grown, exp(f, f.load(sums, f32x16)))
        with f.loop(0, count) as n:
            self._weigh(at + n, f.broadcast(sums + n * 4, F32), decays, by_query + n * LINE, by_key + n * LINE)
        q, k = ([x.row(row + t) + self.key_head * (4 * of.key_dim) for t in range(count)] for x in (a.q, a.k))
        lines = [[to + t * LINE for t in range(count)] for to in (by_query, by_key)]
        return Reads(q, k, grown, *lines)

    def _weigh(self, at: Value, now: Value, decays: Value, by_query: Value, by_key: Value) -> None:
        """Multiply the products of row t with rows i <= t of the block by exp(g_t - g_i)."""
        f, number = self.f, self.f.splat(self.f.truncate(at, I32))
        with f.loop(0, at // LANES + 1) as panel:
            seen = f.lane_numbers() + f.splat(f.truncate(panel * LANES, I32)) <= number
            apart = f.select(seen, now - f.load(decays + panel * 64, f32x16), f.zeros(f32x16))
            shrunk, products = exp(f, apart), self.products + (at * LINE + panel * 64)
            for n, to in enumerate((by_query, by_key) if self.kind.delta else (by_query,)):
                product = f.load(products + n * (BLOCK * LINE), f32x16) * shrunk
                f.store(to + panel * 64, f.select(seen, product, f.zeros(f32x16)))


def in_tiles(f: Function, count: Value, most: int, emit: Callable[[Value, int], None]) -> None:
    """Call emit(done, size) for runs of `most` rows, then for single rows."""
    done = f.var(f.i64(0))
    for size in sorted({most, 1}, reverse=True):
        with f.while_(lambda size=size: done.get() + size <= count):
            emit(done.get(), size)
            done.set(done.get() + size)
