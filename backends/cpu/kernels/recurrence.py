"""Recurrent layers: convolutions, linear attention and selective scans, as `plan.recurrence` defines them.

A task is a head, or a run of channels, of one sequence of the batch. It processes the rows in order of position. Every
value has one chain of operations, in the order of positions and dimensions, and neighbouring outputs are the lanes. So
a row's result depends neither on the other rows of a step nor on the threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from localllm.backends.cpu.arguments import Address, AddressOrZero, Output, Rows, Struct, Target
from localllm.backends.cpu.kernels.common import PlanKernel, Step, exp, f32x16, kernel, own_rows, tasks
from localllm.backends.cpu.simd import F32, I32, LANES, Function, Value
from localllm.backends.cpu.stores import HeadState, head_state, key_bytes, whole_strips
from localllm.plan import BLOCK, StateLayer

TILE = 4  # vectors of a row that are computed together
CHAINS = 4  # partial sums of a score, added in pairs; in a single chain, each product would wait for the previous one


class ConvolveArguments(Struct):
    step: Address
    x: Rows
    y: Output
    weight: Address  # float32 (K, width), rows padded to whole vectors
    bias: AddressOrZero
    store: Target
    zeros: Address  # float32 (width,)


def convolve(width: int, size: int) -> PlanKernel[ConvolveArguments]:
    """Emit `plan.Convolve` for K = `size`. Rows of the batch are read from x, older rows from the store."""
    row_bytes = 4 * whole_strips(width)

    def body(f: Function, a: ConvolveArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        positions, sequence = step.positions, step.sequence
        bias = a.bias
        with own_rows(f, step.rows, thread, threads) as row:
            position, own = f.load_i32(positions, row), f.load_i32(sequence, row)
            table = step.tables + own * step.table_stride
            sources: list[Value] = []
            for back in range(size - 1, 0, -1):
                found = f.var(a.zeros)
                with f.when(position >= back):
                    at = position - back
                    block = f.load_i32(table, at // BLOCK)
                    found.set(a.store + (block * BLOCK + at % BLOCK) * row_bytes)
                with f.when(row >= back):
                    before = row - back
                    here = f.load_i32(sequence, before).equals(own) & f.load_i32(positions, before).equals(
                        position - back
                    )
                    with f.when(here):
                        found.set(a.x.row(before))
                sources.append(found.get())
            x, y = a.x.row(row), a.y.row(row)
            sources.append(x)
            to = a.store + f.load_i32(step.slots, row) * row_bytes
            with f.loop(0, whole_strips(width), LANES) as i:
                total = f.var(f.zeros(f32x16))
                with f.when(bias.differs(0)):
                    total.set(f.load(f.pointer(bias) + i * 4, f32x16))
                for j, source in enumerate(sources):
                    w = f.load(a.weight + (i * 4 + j * row_bytes), f32x16)
                    total.set(f.fma(w, f.load(source + i * 4, f32x16), total.get()))
                f.store(y + i * 4, total.get())
                f.store(to + i * 4, f.load(x + i * 4, f32x16))

    return kernel(f"convolve_{width}_{size}", ConvolveArguments, body)


class KeysArguments(Struct):
    step: Address
    k: Rows
    keys: Target  # (blocks, key heads, key_dim, 64)


def append_keys(key_heads: int, key_dim: int) -> PlanKernel[KeysArguments]:
    """Write the keys of every row, with positions as lanes."""

    def body(f: Function, a: KeysArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with own_rows(f, step.rows, thread, threads) as row:
            slot, k = f.load_i32(step.slots, row), a.k.row(row)
            to = a.keys + (slot // BLOCK * (4 * BLOCK * key_heads * key_dim) + slot % BLOCK * 4)
            with f.loop(0, key_heads * key_dim) as d:
                f.store(to + d * (4 * BLOCK), f.load(k + d * 4, F32))

    return kernel(f"append_keys_{key_heads}_{key_dim}", KeysArguments, body)


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


def linear_attention(kind: Attending, emits: type[RecurrenceHead]) -> PlanKernel[AttendArguments]:
    """Emit `plan.LinearAttention`."""
    of = kind.of
    heads, group = of.heads, of.heads // of.key_heads

    def body(f: Function, a: AttendArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with tasks(f, a.counter, step.runs * heads, thread, threads) as task:
            head, run = task % heads, task // heads
            key_head = head % of.key_heads if kind.tiled else head // group
            emitter = emits(f, a, kind, head, key_head, a.scratch.row(thread))
            first, last = f.load_i32(step.run_starts, run), f.load_i32(step.run_starts, run + 1)
            table = step.tables + f.load_i32(step.sequence, first) * step.table_stride
            with f.loop(first, last) as row:
                position = f.load_i32(step.positions, row)
                column = position // BLOCK
                block = f.load_i32(table, column)
                with f.when((position % BLOCK).equals(0)):
                    with f.when(position.equals(0)):
                        emitter.clear(block)
                    with f.when(position.differs(0)):
                        emitter.advance(f.load_i32(table, column - 1), block)
                emitter.token(row, block, position % BLOCK)

    return kernel(f"linear_attention_{kind.name}", AttendArguments, body)


class Reads(NamedTuple):
    """The factors by which a row multiplies the state and the updates."""

    query: Value  # address of float32 (key_dim,)
    key: Value
    grown: Value | None  # decay vector that multiplies both products with the state; None: included in query and key
    by_query: Value  # address of float32 (64,)
    by_key: Value


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
        """Return the scratch bytes: for the update weights of keys and queries, and for two rows of keys."""
        return 4 * BLOCK * 4

    @property
    def of(self) -> StateLayer:
        return self.kind.of

    @property
    def at(self) -> HeadState:
        return head_state(self.of)

    @property
    def row_bytes(self) -> int:
        return 4 * whole_strips(self.of.value_dim)

    def tiles(self) -> list[tuple[int, int]]:
        """Return (offset in bytes, vectors) of the pieces of a row that are computed together."""
        vectors = whole_strips(self.of.value_dim) // LANES
        return [(64 * first, min(TILE, vectors - first)) for first in range(0, vectors, TILE)]

    def own(self, block: Value) -> Value:
        return self.a.states + (block * self.of.heads + self.head) * self.at.size

    def keys(self, block: Value) -> Value:
        return self.a.keys + (block * self.of.key_heads + self.key_head) * key_bytes(self.of)

    def clear(self, block: Value) -> None:
        f, state = self.f, self.own(block) + self.at.state
        with f.loop(0, self.of.key_dim * self.row_bytes, 64) as i:
            f.store(state + i, f.zeros(f32x16))

    def advance(self, before: Value, block: Value) -> None:
        """Compute a block's state from the full previous block."""
        f, of = self.f, self.of
        old, keys = self.own(before), self.keys(before)
        decays = old + self.at.decays
        last = f.broadcast(decays + 4 * (BLOCK - 1), F32)
        grown = exp(f, last)
        with f.loop(0, 4 * BLOCK, 64) as i:
            f.store(self.scratch + i, exp(f, last - f.load(decays + i, f32x16)))
        weighted = self.scratch + 4 * BLOCK
        with f.loop(0, of.key_dim) as d:
            with f.loop(0, 4 * BLOCK, 64) as i:
                weights = f.load(self.scratch + i, f32x16)
                f.store(weighted + i, f.load(keys + (d * (4 * BLOCK) + i), f32x16) * weights)
            self.gather(d, old, block, grown, weighted, 4)

    def gather(self, d: Value, old: Value, block: Value, grown: Value, weights: Value, stride: int) -> None:
        """Compute row d of the state: the previous row times `grown`, plus the updates times their weights."""
        f, row = self.f, self.row_bytes
        source, target = old + self.at.state + d * row, self.own(block) + self.at.state + d * row
        for offset, vectors in self.tiles():
            sums = [f.var(f.load(source + (offset + 64 * n), f32x16) * grown) for n in range(vectors)]
            with f.loop(0, BLOCK) as i:
                weight, update = f.broadcast(weights + i * stride, F32), old + (i * row + offset)
                for n, total in enumerate(sums):
                    total.set(f.fma(weight, f.load(update + 64 * n, f32x16), total.get()))
            for n, total in enumerate(sums):
                f.store(target + (offset + 64 * n), total.get())

    def token(self, row: Value, block: Value, at: Value) -> None:
        """Process one row: write its update to the block and its output to y."""
        f, a, of, size, delta = self.f, self.a, self.of, self.row_bytes, self.kind.delta
        own, state = self.own(block), self.own(block) + self.at.state
        v, y = (rows.row(row) + self.head * (4 * of.value_dim) for rows in (a.v, a.y))
        q, k, grown, by_query, by_key = self.reads(row, block, at)
        strength = f.broadcast(a.strength.row(row) + self.head * 4, F32) if self.kind.strengths else None
        newest = f.broadcast(by_query + at * 4, F32)
        skip = f.var(f.zeros(f32x16))
        with f.when(a.skip.differs(0)):
            skip.set(f.broadcast(f.pointer(a.skip) + self.head * 4, F32))
        for offset, vectors in self.tiles():
            seen = [f.var(f.zeros(f32x16)) for _ in range(vectors)]  # query products
            known = [f.var(f.zeros(f32x16)) for _ in range(vectors if delta else 0)]  # key products
            with f.loop(0, of.key_dim) as d:
                line, query, key = state + (d * size + offset), f.broadcast(q + d * 4, F32), f.broadcast(k + d * 4, F32)
                for n, total in enumerate(seen):
                    part = f.load(line + 64 * n, f32x16)
                    total.set(f.fma(part, query, total.get()))
                    if delta:
                        known[n].set(f.fma(part, key, known[n].get()))
            if grown is not None:
                for total in (*seen, *known):
                    total.set(total.get() * grown)
            with f.loop(0, at) as i:
                update, query, key = (
                    own + (i * size + offset), f.broadcast(by_query + i * 4, F32), f.broadcast(by_key + i * 4, F32)
                )  # fmt: skip
                for n, total in enumerate(seen):
                    part = f.load(update + 64 * n, f32x16)
                    total.set(f.fma(part, query, total.get()))
                    if delta:
                        known[n].set(f.fma(part, key, known[n].get()))
            for n, total in enumerate(seen):
                value = f.load(v + (offset + 64 * n), f32x16)
                made = value - known[n].get() if delta else value
                made = made if strength is None else made * strength
                f.store(own + (at * size + (offset + 64 * n)), made)
                out = f.fma(skip.get(), value, f.fma(newest, made, total.get()))
                left = of.value_dim - (offset // 4 + LANES * n)
                f.store_lanes(y + (offset + 64 * n), out, min(LANES, left))

    def reads(self, row: Value, block: Value, at: Value) -> Reads:
        """Store the sum of decays up to this row, and compute the weights of the block's rows."""
        f, a, of = self.f, self.a, self.of
        q, k = (rows.row(row) + self.key_head * (4 * of.key_dim) for rows in (a.q, a.k))
        decays, rate = self.own(block) + self.at.decays, f.load(a.rate + self.head * 4, F32)
        g = f.var(f.load(a.step_sizes.row(row) + self.head * 4, F32) * rate if self.kind.steps else rate)
        with f.when(at > 0):
            g.set(g.get() + f.load(decays + (at * 4 - 4), F32))
        f.store(decays + at * 4, g.get())
        now = f.splat(g.get())
        grown = exp(f, now)
        by_key, by_query = self.scratch, self.scratch + 4 * BLOCK
        self._weights(block, at, now, decays, q, k, by_key, by_query)
        return Reads(q, k, grown, by_query, by_key)

    def _weights(
        self, block: Value, at: Value, now: Value, decays: Value, q: Value, k: Value, by_key: Value, by_query: Value
    ) -> None:
        """Compute exp(g_t - g_i) (k_i . k_t) for rows i < t of the block.

        For rows i <= t, do the same with the query.
        """
        f, of, keys = self.f, self.of, self.keys(block)
        number = f.splat(Value(f, f.builder.trunc(at.ir, I32)))
        with f.loop(0, at // LANES + 1) as panel:
            lanes = f.lane_numbers() + f.splat(Value(f, f.builder.trunc((panel * LANES).ir, I32)))
            line = keys + panel * 64
            seen = lanes <= number
            apart = f.select(seen, now - f.load(decays + panel * 64, f32x16), f.zeros(f32x16))
            shrunk = exp(f, apart)
            scores = [(by_query, q)] + ([(by_key, k)] if self.kind.delta else [])
            sums = [[f.var(f.zeros(f32x16)) for _ in range(CHAINS)] for _ in scores]

            def add(d: Value, chains: int) -> None:
                for chain in range(chains):
                    key = f.load(line + ((d + chain) * (4 * BLOCK)), f32x16)
                    for (_, x), totals in zip(scores, sums, strict=True):
                        other = f.broadcast(x + (d + chain) * 4, F32)
                        totals[chain].set(f.fma(key, other, totals[chain].get()))

            full = of.key_dim // CHAINS * CHAINS
            with f.loop(0, full, CHAINS) as d:
                add(d, CHAINS)
            add(f.i64(full), of.key_dim - full)
            for (to, _), totals in zip(scores, sums, strict=True):
                a, b, c, d = (total.get() for total in totals)
                f.store(to + panel * 64, f.select(seen, ((a + b) + (c + d)) * shrunk, f.zeros(f32x16)))
