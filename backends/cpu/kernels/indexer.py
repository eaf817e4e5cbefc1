"""The indexer of top-k attention: scores all visible positions and selects the best ones (`plan.IndexerTopK`).

The score of a position is one chain of operations: over the width of a key for each head, then over the heads. With few
rows, the threads share the work of each row: a task scores SHARE cache blocks of a row, and a second kernel selects.
With more rows, a task scores and selects for some neighbouring rows, and keeps their scores in the thread's scratch
memory. One read of the keys serves all rows of the task. The scores and the selection are the same either way.

The selection maps the scores to integers in the same order. A binary search finds the lowest selected integer. All
scores above it are selected, then the first of the equal scores. So the result does not depend on the order of a sort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

from localllm.backends.base import Limits
from localllm.backends.cpu.arguments import Address, Int64, Output, Rows, RowsOrNone, Struct, Target
from localllm.backends.cpu.cache import CACHE, CacheRow
from localllm.backends.cpu.kernels.attend import prepare_queries, query_bytes, scores
from localllm.backends.cpu.kernels.common import PlanKernel, Step, f32x16, i32x16, kernel, tasks
from localllm.backends.cpu.memory import aligned
from localllm.backends.cpu.simd import F32, I32, I64, LANES, Function, Value
from localllm.plan import BLOCK, rows_of_block
from localllm.plan import Rows as RowsOf

SPLIT_ROWS = 32  # up to this batch size, threads share the work of each row
SHARE = 16  # cache blocks per task
LOWEST = -(1 << 31)
SURE = (1 << 31) - 1  # the score of blocks that are always selected
QUERIES = 64  # maximum number of query heads that share a read of the keys; they stay in L1
TOGETHER = 4  # maximum number of rows scored together, if every position has a score


class IndexerArguments(Struct):
    step: Address
    q: Rows
    weights: RowsOrNone
    k_cache: Address
    y: Output
    counter: Address
    scratch: Rows  # one row per thread
    scores: Target  # scores for small batches: float32 (rows, groups, positions)
    room: Int64  # number of scores per group: one per position, or one per cache block


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """The parameters that specialize a kernel; `plan.IndexerTopK` defines them."""

    heads: int
    head_dim: int
    count: int
    block: int
    local: int
    weighted: bool
    pooled: bool
    key_type: str
    every: int = 1  # positions per key in the cache

    @property
    def name(self) -> str:
        of = f"{self.heads}_{self.head_dim}_{self.count}_{self.block}_{self.local}_{self.key_type}"
        of += f"{'_pooled' * self.pooled}{f'_every_{self.every}' if self.every > 1 else ''}"
        return f"{of}{'' if self.weighted else '_each'}"

    @property
    def keys(self) -> CacheRow:
        return CACHE[self.key_type]

    @property
    def groups(self) -> int:
        return 1 if self.weighted else self.heads

    @property
    def most(self) -> int:
        return self.count * self.block + (self.block - 1 if self.pooled else 0)

    @property
    def coarse(self) -> bool:
        """Whether the selection is by whole cache blocks, so that only the highest score of each block is kept."""
        return self.block % BLOCK == 0 and not self.pooled

    @property
    def together(self) -> int:
        """Number of neighbouring rows that are scored with one read of the keys."""
        return max(1, min(QUERIES // self.heads, LANES if self.coarse else TOGETHER))

    @property
    def offsets(self) -> tuple[int, int, int]:
        """Offsets within a thread's scratch memory: a padded head, the scores of a block's heads, the rows' scores."""
        heads = self.together * self.heads
        head = aligned(heads * query_bytes(self.keys, self.head_dim))
        block = head + aligned(4 * (self.head_dim + 32))
        return head, block, block + aligned(4 * BLOCK * heads)

    def room(self, positions: int) -> int:
        """Return the number of scores per group, in whole vectors."""
        blocks = -(-positions // BLOCK)
        return -(-blocks // LANES) * LANES if self.coarse else blocks * BLOCK


def scratch_bytes(shape: IndexerShape, limits: Limits) -> int:
    return shape.offsets[-1] + 4 * shape.together * shape.groups * shape.room(limits.positions)


def shared_bytes(shape: IndexerShape, limits: Limits, rows: RowsOf) -> int:
    most = limits.rows if rows == "batch" else limits.logit_rows
    return 4 * min(most, SPLIT_ROWS) * shape.groups * shape.room(limits.positions)


def score(shape: IndexerShape) -> PlanKernel[IndexerArguments]:
    """Score the positions of every row. In large batches, also select."""

    def body(f: Function, a: IndexerArguments, thread: Value, threads: Value) -> None:
        step, size = Step.at(a.step), a.room * (4 * shape.groups)
        rows, split = step.rows, step.rows <= SPLIT_ROWS
        longest = f.var(f.i64(0))
        with f.when(split), f.loop(0, rows) as row:
            position = f.load_i32(step.positions, row)
            longest.set(f.select(position > longest.get(), position, longest.get()))
        parts = f.select(split, longest.get() // (SHARE * BLOCK) + 1, f.i64(1))
        together = f.select(split, f.i64(1), f.i64(shape.together))
        own = a.scratch.row(thread) + shape.offsets[-1]
        with tasks(f, a.counter, (rows + together - 1) // together * parts, thread, threads) as task:
            first, part = task // parts * together, task % parts
            last = f.minimum(first + together, rows)
            alike = rows < 0
            if shape.together > 1:  # not needed if threads share the rows: a task then has a single row
                same = f.load_i32(step.sequence, first).equals(f.load_i32(step.sequence, last - 1))
                alike = same & (f.load_i32(step.positions, first) >= shape.most) & (last - first).equals(shape.together)
                with f.when(alike):
                    blocks = f.load_i32(step.positions, last - 1) // BLOCK + 1
                    _score(f, a, shape, step, first, shape.together, f.i64(0), blocks, a.scratch.row(thread), own)
            with f.loop(f.select(alike, last, first), last) as row:
                blocks = f.load_i32(step.positions, row) // BLOCK + 1
                start, stop = part * SHARE, f.select(split, f.minimum(part * SHARE + SHARE, blocks), blocks)
                out = f.select(split, a.scores + row * size, own + (row - first) * size)
                with f.when((f.load_i32(step.positions, row) >= shape.most) & (start < stop)):
                    _score(f, a, shape, step, row, 1, start, stop, a.scratch.row(thread), out)
            with f.loop(f.select(split, last, first), last) as row:
                _choose(f, a, shape, step, row, own + (row - first) * size)

    return kernel(f"index_{shape.name}", IndexerArguments, body)


def choose_positions(shape: IndexerShape) -> PlanKernel[IndexerArguments]:
    """Select positions from the scores of a small batch."""

    def body(f: Function, a: IndexerArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        count = f.select(step.rows <= SPLIT_ROWS, step.rows, f.i64(0))
        with tasks(f, a.counter, count, thread, threads) as row:
            _choose(f, a, shape, step, row, a.scores + row * (a.room * (4 * shape.groups)))

    return kernel(f"index_choose_{shape.name}", IndexerArguments, body)


def _score(
    f: Function, a: IndexerArguments, shape: IndexerShape, step: Step, row: Value, rows: int, first: Value, last: Value,
    scratch: Value, out: Value,
) -> None:  # fmt: skip
    """Write the scores of blocks first to last to out, float32 (rows, groups, room), for some rows of a sequence."""
    keys, heads, size = shape.keys, shape.heads, query_bytes(shape.keys, shape.head_dim)
    head_at, block_at, _ = shape.offsets
    with f.loop(0, rows) as number, f.loop(0, heads) as head:
        x, to = a.q.row(row + number) + head * (4 * shape.head_dim), scratch + (number * heads + head) * size
        prepare_queries(f, keys, x, f.constant(F32, 1.0), to, scratch + head_at, shape.head_dim)
    table = step.tables + f.load_i32(step.sequence, row) * step.table_stride
    own, keyed = scratch + block_at, rows_of_block(shape.every)  # float32 (rows, heads, 64); keys per block
    with f.loop(first, last) as block:
        at = a.k_cache + f.load_i32(table, block) * (keys.key_bytes(shape.head_dim) // shape.every)
        scores(
            f, keys, scratch, at, own, rows * heads, shape.head_dim, f.i64(keyed), lambda score, panel, row: score,
            None, keyed // LANES,
        )  # fmt: skip
        with f.loop(0, rows) as number:
            of_row, to = own + number * (4 * BLOCK * heads), out + number * (a.room * (4 * shape.groups))
            if shape.coarse:
                seen = f.load_i32(step.positions, row + number) - block * BLOCK
                with f.loop(0, heads) as head:
                    f.store(to + head * (a.room * 4) + block * 4, _highest(f, of_row + head * (4 * BLOCK), seen))
            else:
                _by_position(f, a, shape, row + number, of_row, to + block * (4 * keyed))


def _highest(f: Function, scores: Value, seen: Value) -> Value:
    """Return the highest score in a block at positions 0 to seen."""
    limit, parts = f.splat(f.truncate(f.minimum(seen, BLOCK), I32)), []
    for first in range(0, BLOCK, LANES):
        here = f.lane_numbers() + first <= limit
        parts.append(f.select(here, f.load(scores + 4 * first, f32x16), f.constant(f32x16, float("-inf"))))
    return f.reduce(reduce(f.fmax, parts), f.fmax)


def _by_position(f: Function, a: IndexerArguments, shape: IndexerShape, row: Value, scores: Value, out: Value) -> None:
    """Write a block's scores (heads, 64), or their weighted sum, to out: one per key of the block."""
    with f.loop(0, rows_of_block(shape.every), LANES) as lane:
        at, to = scores + lane * 4, out + lane * 4
        if shape.weighted:
            weights, total = a.weights.row(row), f.var(f.zeros(f32x16))
            with f.loop(0, shape.heads) as head:
                positive = f.fmax(f.load(at + head * (4 * BLOCK), f32x16), f.zeros(f32x16))
                total.set(f.fma(positive, f.broadcast(weights + head * 4, F32), total.get()))
            f.store(to, total.get())
        else:
            with f.loop(0, shape.heads) as head:
                f.store(to + head * (a.room * 4), f.load(at + head * (4 * BLOCK), f32x16))


def _choose(f: Function, a: IndexerArguments, shape: IndexerShape, step: Step, row: Value, found: Value) -> None:
    """Write a row of y from its scores float32 (groups, room), which are overwritten."""
    seen = f.load_i32(step.positions, row) + 1
    with f.loop(0, shape.groups) as group:
        out, of_group = a.y.row(row) + group * (4 * (1 + shape.most)), found + group * (a.room * 4)
        listed = out + 4
        n = f.var(f.i64(0))
        with f.when(seen <= shape.most):
            with f.loop(0, seen) as position:
                f.store(listed + position * 4, _float(f, position))
            n.set(seen)
        with f.when(seen > shape.most):
            units = _ordered(f, shape, of_group, seen)
            with _chosen(f, shape, of_group, units) as (unit, taken):
                if shape.block == 1:
                    # Once all units are selected, this store goes past the selected ones; the list has room for it.
                    f.store(listed + n.get() * 4, _float(f, unit))
                    n.set(n.get() + taken)
                else:
                    with f.when(taken.differs(0)):
                        first = unit * shape.block
                        with f.loop(first, f.minimum(first + shape.block, seen)) as position:
                            f.store(listed + (n.get() + position - first) * 4, _float(f, position))
                        n.set(n.get() + f.minimum(first + shape.block, seen) - first)
            if shape.pooled:
                with f.loop(units * shape.block, seen) as position:
                    f.store(listed + n.get() * 4, _float(f, position))
                    n.set(n.get() + 1)
        f.store(out, _float(f, n.get()))
        with f.loop(n.get(), f.i64(shape.most)) as rest:
            f.store(listed + rest * 4, f.constant(F32, 0.0))


def _ordered(f: Function, shape: IndexerShape, scores: Value, seen: Value) -> Value:
    """Convert a group's scores to int32 in the same order, one per block of positions. Return the number of blocks."""
    units = (seen + (0 if shape.pooled else shape.block - 1)) // shape.block
    if shape.pooled and shape.every == 1:
        with f.loop(0, units) as unit:
            last = f.load(scores + (unit * (4 * shape.block) + 4 * (shape.block - 1)), F32)
            f.store(scores + unit * 4, last)
    elif shape.coarse:
        blocks, of_unit = (seen + (BLOCK - 1)) // BLOCK, shape.block // BLOCK
        with f.loop(0, units if of_unit > 1 else 0) as unit:
            best = f.var(f.load(scores + unit * (4 * of_unit), F32))
            with f.loop(unit * of_unit + 1, f.minimum(unit * of_unit + of_unit, blocks)) as block:
                best.set(f.fmax(f.load(scores + block * 4, F32), best.get()))
            f.store(scores + unit * 4, best.get())
    elif not shape.pooled and shape.block > 1:
        with f.loop(0, units) as unit:
            best = f.var(f.load(scores + unit * (4 * shape.block), F32))
            first = unit * shape.block
            with f.loop(first + 1, f.minimum(first + shape.block, seen)) as position:
                best.set(f.fmax(f.load(scores + position * 4, F32), best.get()))
            f.store(scores + unit * 4, best.get())
    with f.loop(0, units, LANES) as at:
        bits = f.bits(f.load(scores + at * 4, f32x16) + 0.0, i32x16)  # -0 becomes 0
        order = bits ^ (bits.sra(31) & 0x7FFFFFFF)
        inside = f.lane_numbers() < f.splat(f.truncate(units - at, I32))
        f.store(scores + at * 4, f.select(inside, order, f.constant(i32x16, LOWEST)))
    if shape.local:
        with f.loop(f.select(units > shape.local, units - shape.local, f.i64(0)), units) as unit:
            f.store(scores + unit * 4, f.constant(I32, SURE))
    return units


@contextmanager
def _chosen(f: Function, shape: IndexerShape, order: Value, units: Value) -> Iterator[tuple[Value, Value]]:
    """Loop over all units in order. Yield each with 1 if it is among the best `count`, otherwise with 0."""

    def above(test: Callable[[Value], Value]) -> Value:
        total = f.var(f.zeros(i32x16))
        with f.loop(0, units, LANES) as at:
            here = test(f.load(order + at * 4, i32x16))
            total.set(total.get() + f.select(here, f.constant(i32x16, 1), f.zeros(i32x16)))
        return f.reduce(total.get(), lambda a, b: a + b)

    least = f.var(f.constant(I32, LOWEST))
    step = f.var(f.constant(I32, LOWEST))  # starts at 2^31, then halves
    with f.loop(0, 32):
        higher = f.var(least.get() + step.get())
        enough = above(lambda own: own >= f.splat(higher.get())) >= shape.count
        least.set(f.select(enough, higher.get(), least.get()))
        step.set(step.get() >> 1)
    left = f.var(f.constant(I32, shape.count) - above(lambda own: own > f.splat(least.get())))
    one, none = f.constant(I32, 1), f.constant(I32, 0)
    with f.loop(0, units) as unit:
        own = f.load(order + unit * 4, I32)
        equal = own.equals(least.get()) & (left.get() > 0)
        left.set(left.get() - f.select(equal, one, none))
        yield unit, f.widen(f.select((own > least.get()) | equal, one, none), I64)


def _float(f: Function, number: Value) -> Value:
    return f.to_float(f.truncate(number, I32))
