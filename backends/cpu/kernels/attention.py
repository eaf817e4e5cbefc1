"""Attention over the paged cache: online softmax block by block in order of position, for decode and prefill.

Positions are divided into partitions of PARTITION cache blocks. A row has a maximum, a sum and an output for each
partition, and merges them in order of position. One thread may compute all partitions, or several threads may divide
them (`attention`, then `merge`). The order is the same either way, so results are bitwise identical. Hidden positions
have weight exactly 0, and blocks that are hidden from all rows of a tile are skipped. So a row's result depends on
neither the tile nor the batch.

A task is a tile of neighbouring rows of one sequence, some pieces, and one partition ("split") or all partitions. A
piece is a KV head with its query heads, or with 16 query heads if there are more. Split tasks process the maximum
number of heads, because the heads of a block are adjacent in memory: one sequential read is two to three times as fast
as reads of 8 KiB. If there are few tasks, the pieces of one head are divided among them; each task then reads the keys
and values again.

In top-k attention, 64 selected positions at a time are gathered into a block in panel layout, unless they already are a
cache block. So if a row selects all visible positions, its result is bitwise identical to full attention. A row that
attends to pools has one list of cache rows to gather: first the rows of the sliding window, then the rows of the pools.
"""

from __future__ import annotations

from collections.abc import Iterator

from localllm.backends.cpu.arguments import (
    Address,
    AddressOrZero,
    Float32,
    Int64,
    Output,
    Rows,
    RowsOrNone,
    Struct,
    Target,
)  # fmt: skip
from localllm.backends.cpu.cache import Blocks, rotate_keys
from localllm.backends.cpu.cache_rows import cache_row_bytes, gather_keys, gather_values, panels_of
from localllm.backends.cpu.kernels.attend import (
    FLOOR,
    LOWEST,
    Reach,
    prepare_queries,
    query_bytes,
    scores,
    weigh_values,
)
from localllm.backends.cpu.kernels.attention_shape import AttentionShape, scratch
from localllm.backends.cpu.kernels.common import PlanKernel, Step, f32x16, kernel, tanh, tasks
from localllm.backends.cpu.kernels.softmax import SoftmaxState, exp_negative, softmax
from localllm.backends.cpu.simd import F32, I32, I64, LANES, Function, Value
from localllm.plan import BLOCK, rows_of_block


class MergeArguments(Struct):
    step: Address
    y: Output
    counter: Address
    scratch: Rows  # one row per thread
    work: Address  # address of a `Work`
    # sliding-window size: the number of visible positions, including the row's own; if not causal, also this number
    # after it
    window: Int64
    sinks: AddressOrZero  # float32 (heads,): attention sinks
    selection: RowsOrNone
    partials: Address  # results of split tasks


class AttentionArguments(MergeArguments):
    q: Rows
    k_cache: Address
    v_cache: Address
    scale: Float32
    softcap: Float32
    slopes: AddressOrZero  # float32 (heads,): ALiBi slopes
    distances: (
        AddressOrZero  # float32 (heads, EDGE + 2 reach + 1 + EDGE): biases by distance, with the outer biases repeated
    )
    partials: Target
    pools_step: Address  # `Step` with the block tables of the pools; the next two fields are the pools' cache
    pool_keys: Address
    pool_values: Address


class Work(Struct):
    """How the attention of a step is divided into tasks. `backends.cpu.sharing` fills it."""

    tiles: Int64  # number of tiles
    tile_rows: Address  # int32 (tiles, 2): first row, number of rows
    split: Int64  # 0 if a task covers all partitions
    heads: Int64  # number of pieces per task
    partitions: Int64  # number of partitions of the longest row, from position 0


PARTITION = 4  # cache blocks per partition
EDGE = LANES - 1  # copies at either end of the biases by distance, so that every vector load stays in the row


class _Rows:
    """Emits the attention of `tokens` rows of the batch, from row `first` on."""

    def __init__(
        self, f: Function, a: MergeArguments, shape: AttentionShape, first: Value, tokens: int, thread: Value,
        work: Work,
        head: Value,
    ) -> None:  # fmt: skip
        self.f, self.a, self.shape, self.first, self.tokens = f, a, shape, first, tokens
        self.rows = tokens * shape.piece
        self.step = Step.at(a.step)
        positions = self.step.positions
        self.positions = [f.load_i32(positions, first + token) for token in range(tokens)]
        if shape.selected:  # the selected positions are renumbered from 0
            of_head = head // shape.of_head * (4 * (1 + shape.selected)) if shape.slices > 1 else f.i64(0)
            self.selection = a.selection.row(first) + of_head
            self.positions = [_integer(f, self.selection) - 1]
        if shape.every:  # the listed cache rows are renumbered from 0
            own, pools = self.positions[0], (self.positions[0] + 1) // shape.every
            if shape.chosen:
                self.selection = a.selection.row(first)
                pools = _integer(f, self.selection) // shape.every  # the last positions may not fill a pool
            self.near = f.minimum(own + 1, a.window)
            self.first_near = own + 1 - self.near
            self.positions = [self.near + pools - 1]
        self.limits = self.positions  # the last visible position of each token
        if not shape.causal:
            ends = [f.load_i32(self.step.ends, first + token) for token in range(tokens)]
            self.limits = ends
            if shape.window:
                self.limits = [f.minimum(e, own + a.window - 1) for e, own in zip(ends, self.positions, strict=True)]
        if shape.spans:
            self.limits = [f.load_i32(self.step.ends, first + token) for token in range(tokens)]
        self.start = f.i64(0)  # the first visible block
        self.oldest: list[Value] = []  # first visible position of each token, for sliding windows
        if shape.window:
            # If all positions of a block are hidden from a row, the row's maximum there is the lowest, so the block's
            # weight becomes 0.
            chunks = [own // a.window * a.window for own in self.positions] if shape.chunked else []
            self.oldest = chunks or [own - a.window + 1 for own in self.positions]
            self.start = f.select(self.oldest[0] > 0, self.oldest[0], f.i64(0)) // BLOCK
        if shape.after:
            self.oldest = [f.load_i32(self.step.ends, first + token) + 1 for token in range(tokens)]
            self.start = self.oldest[0] // BLOCK
        self.stop = self.limits[-1] // BLOCK + 1
        self.partitions = (self.start // PARTITION, (self.stop + (PARTITION - 1)) // PARTITION)
        at = a.scratch.row(thread)
        offsets = scratch(shape)
        self.queries, self.head, self.scores, self.scaled, self.shrink = (
            at + offset for offset in (offsets.queries, offsets.head, offsets.scores, offsets.scaled, offsets.shrink)
        )
        self.entries, self.keys, self.values = at + offsets.entries, at + offsets.keys, at + offsets.values
        self.own, self.final = at + offsets.state, at + offsets.final
        of_row = work.partitions * (shape.pieces * shape.state_bytes(shape.piece))
        self.partials = a.partials + first * of_row

    def state(self, states: Value, number: Value) -> SoftmaxState:
        """Return one of several states that are adjacent in memory."""
        return SoftmaxState(states + number * self.shape.state_bytes(self.rows), self.rows, self.shape.width)

    def partial(self, partition: Value, head: Value) -> SoftmaxState:
        """Return the result of a split task for a partition and a piece."""
        return self.state(self.partials, partition * self.shape.pieces + head)

    def head_row(self, of: Rows, head: Value, row: Value, head_dim: int) -> Value:
        """Return the address of a piece's query row in q or y, whose heads are `head_dim` wide."""
        piece = self.shape.piece
        base = of.address + (self.first + row // piece) * of.stride
        return base + (head * piece + row % piece) * (4 * head_dim)

    def prepare(self, a: AttentionArguments, head: Value, heads: Value) -> None:
        f, shape = self.f, self.shape
        size = query_bytes(shape.keys, shape.head_dim)
        with f.loop(0, heads) as number, f.loop(0, self.rows) as row:
            out = self.queries + (number * self.rows + row) * size
            x, scale = self.head_row(a.q, head + number, row, shape.head_dim), a.scale
            prepare_queries(f, shape.keys, x, scale, out, self.head, shape.head_dim)

    def block(
        self, a: AttentionArguments, number: Value, head: Value, fresh: Value, queries: Value, state: SoftmaxState
    ) -> None:  # fmt: skip
        """Add one more cache block to the state of a piece.

        `fresh` means that the previous piece read other cache rows.
        """
        f, shape = self.f, self.shape
        softcap = f.splat(a.softcap) if shape.softcap else None
        key_bytes, value_bytes = shape.keys.key_bytes(shape.head_dim), shape.values.value_bytes(shape.value_dim)
        if shape.gathered:
            with f.when(fresh):
                self.gather(a, number, head // shape.of_head)
            keys, values = self.keys, self.values
        else:
            at = self.physical(number) * shape.kv_heads + head // shape.of_head
            keys, values = a.k_cache + at * key_bytes, a.v_cache + at * value_bytes

        def seen(score: Value, panel: Value, row: int | Value) -> Value:
            if softcap is not None:
                score = softcap * tanh(f, score / softcap)
            token = row // shape.piece if isinstance(row, int) else 0  # in a loop, all rows belong to one token
            limit, oldest = self.limits[token], self.oldest[token] if self.oldest else None
            if shape.slopes:
                slope = f.broadcast(f.pointer(a.slopes) + (head * shape.piece + row % shape.piece) * 4, F32)
                behind = f.to_float(_positions(f, number * BLOCK + panel * LANES - self.positions[token]))
                score = f.fma(slope, behind if shape.causal else f.zeros(f32x16) - f.abs(behind), score)
            if shape.reach:
                distance = number * BLOCK + panel * LANES - self.positions[token] + (shape.reach + EDGE)
                at = f.minimum(f.select(distance > 0, distance, f.i64(0)), 2 * shape.reach + EDGE)
                own = (head * shape.piece + row % shape.piece) * (2 * shape.reach + 1 + 2 * EDGE)
                score = score + f.load(f.pointer(a.distances) + (own + at) * 4, f32x16)
            return _visible(f, score, number * BLOCK + panel * LANES, limit, oldest)

        # A single row is limited by memory bandwidth. The scores of quantized keys are finished before the values
        # arrive, so prefetch the values of the next head.
        one, ahead = self.tokens == 1 and not shape.gathered, isinstance(shape.keys, Blocks)
        due = Reach(values + (value_bytes if ahead else 0), value_bytes) if one else None
        count = f.minimum(self.limits[-1] + 1 - number * BLOCK, BLOCK)  # positions visible to at least one row
        scores(f, shape.keys, queries, keys, self.scores, self.rows, shape.head_dim, count, seen, due)
        softmax(f, self.scores, state, self.shrink)
        coming = Reach(keys + key_bytes, key_bytes) if one else None  # the next head, to be prefetched
        weigh_values(
            f, shape.values, self.scores, values, state.outputs, self.shrink, self.scaled, self.rows, shape.value_dim,
            count, coming,
        )  # fmt: skip

    def physical(self, number: Value) -> Value:
        """Return the physical block for a block number of the sequence, or of the selected blocks."""
        if self.shape.whole:
            number = _integer(self.f, self.selection + (number * (4 * BLOCK) + 4)) // BLOCK
        return self.f.load_i32(self.table(self.step), number)

    def table(self, step: Step) -> Value:
        return step.tables + self.f.load_i32(step.sequence, self.first) * step.table_stride

    def gather(self, a: AttentionArguments, number: Value, head: Value) -> None:
        """Gather 64 listed cache rows into a cache block. Copies of the last row pad the block."""
        f, shape, last = self.f, self.shape, self.positions[0]
        with f.loop(0, BLOCK) as j:
            self.locate(a, j, f.minimum(number * BLOCK + j, last), head)
        n, value_entries = f.minimum(last + 1 - number * BLOCK, BLOCK), self.entries + 8 * BLOCK
        with f.loop(0, panels_of(n)) as panel:
            gather_keys(f, shape.keys, self.entries, self.keys, shape.head_dim, panel)
        gather_values(f, shape.values, value_entries, self.values, shape.value_dim, n, shape.once)

    def locate(self, a: AttentionArguments, j: Value, listed: Value, head: Value) -> None:
        """Store the addresses of a listed row's key and value as entry j of the gathered block."""
        f, shape, step = self.f, self.shape, self.step

        def store(step: Step, keys: Value, values: Value, position: Value, every: int = 1) -> None:
            rows = rows_of_block(every)
            block = f.load_i32(self.table(step), position // BLOCK) * shape.kv_heads + head
            row = block * rows + position % BLOCK // every % rows
            f.store(self.entries + j * 8, keys + row * cache_row_bytes(shape.keys, shape.head_dim))
            of_values = (shape.keys, shape.head_dim) if shape.once else (shape.values, shape.value_dim)
            f.store(self.entries + (j * 8 + 8 * BLOCK), values + row * cache_row_bytes(*of_values))

        if not shape.every:
            store(step, a.k_cache, a.v_cache, _integer(f, self.selection + (listed * 4 + 4)))
            return
        pool, every = listed - self.near, shape.every
        with f.when(pool < 0):
            store(step, a.k_cache, a.v_cache, self.first_near + listed)
        with f.when(pool >= 0):
            end = pool * every + (every - 1)
            if shape.chosen:
                end = _integer(f, self.selection + (end * 4 + 4))
            store(Step.at(a.pools_step), a.pool_keys, a.pool_values, end, every)

    def partition(self, a: AttentionArguments, number: Value, head: Value, heads: Value, states: Value) -> None:
        """Compute the states of some pieces over all blocks of a partition. The states are adjacent in memory."""
        f, of_head = self.f, self.shape.of_head
        per_piece = self.rows * query_bytes(self.shape.keys, self.shape.head_dim)
        with f.loop(0, heads) as i:
            self.state(states, i).clear(f)
        first, last = number * PARTITION, number * PARTITION + PARTITION
        first = f.select(first > self.start, first, self.start)
        with f.loop(first, f.minimum(last, self.stop)) as block, f.loop(0, heads) as i:
            fresh = i.equals(0) | ((head + i) % of_head).equals(0)
            self.block(a, block, head + i, fresh, self.queries + i * per_piece, self.state(states, i))

    def clear(self, heads: Value) -> None:
        with self.f.loop(0, heads) as i:
            self.state(self.final, i).clear(self.f)

    def merge(self, i: Value, other: SoftmaxState) -> None:
        """Merge a partition's state into the state of piece i of the task."""
        self.state(self.final, i).merge(self.f, other, self.shrink)

    def finish(self, head: Value, final: SoftmaxState) -> None:
        """Write y of all query rows of a piece from its merged state."""
        f, a, shape = self.f, self.a, self.shape
        with f.loop(0, self.rows) as row:
            numerator, total = f.constant(F32, 1.0), f.load(final.sums + row * 4, F32)
            if shape.sinks:
                sink = f.load(f.pointer(a.sinks) + (head * shape.piece + row % shape.piece) * 4, F32)
                before = f.load(final.maxima + row * 4, F32)
                now = f.fmax(before, sink)
                numerator = f.lane(exp_negative(f, f.splat(before - now, 4)), 0)
                total = f.fma(total, numerator, f.lane(exp_negative(f, f.splat(sink - now, 4)), 0))
            inverse = f.splat(numerator / total * getattr(shape.values, "factor", 1.0))
            outputs = final.outputs + row * (4 * shape.width)
            parts = [f.load(outputs + 4 * d, f32x16) * inverse for d in range(0, shape.width, LANES)]
            if shape.values.type.rotated:
                parts = rotate_keys(f, parts, shape.value_dim)
            target = self.head_row(a.y, head, row, shape.value_dim)
            for part, d in zip(parts, range(0, shape.value_dim, LANES), strict=False):
                f.store_lanes(target + 4 * d, part, min(LANES, shape.value_dim - d))


def attention(shape: AttentionShape) -> PlanKernel[AttentionArguments]:
    """Emit y = softmax(scale * q k^T) v for every row, with the `plan.Attention` options given by the shape.

    If the work is split, the kernel writes the states of the partitions, and `merge` computes y from the states.
    """

    def body(f: Function, a: AttentionArguments, thread: Value, threads: Value) -> None:
        work = Work.at(a.work)
        split, heads = work.split.differs(0), work.heads
        parts = f.select(split, work.partitions, f.i64(1))
        of_tile = parts * (f.constant(heads.type, shape.pieces) // heads)
        tiles = work.tiles
        with tasks(f, a.counter, tiles * of_tile, thread, threads) as task:
            # Tiles of one head are consecutive, so that its keys and values stay in the CPU cache. The longest rows are
            # scheduled first.
            part, rest = task % parts, task // parts
            tile, head = tiles - 1 - rest % tiles, rest // tiles * heads
            for rows in _tile(f, a, shape, tile, thread, work, head):
                first, last = (
                    f.select(split, own, all_) for own, all_ in zip((part, part + 1), rows.partitions, strict=True)
                )
                first = f.select(first > rows.partitions[0], first, rows.partitions[0])
                last = f.minimum(last, rows.partitions[1])
                with f.when(first < last):
                    rows.prepare(a, head, heads)
                    with f.when(split.equals(0)):
                        rows.clear(heads)
                    with f.loop(first, last) as number:
                        partial = rows.partial(number, head).outputs
                        rows.partition(a, number, head, heads, f.select(split, partial, rows.own))
                        with f.when(split.equals(0)), f.loop(0, heads) as i:
                            rows.merge(i, rows.state(rows.own, i))
                    with f.when(split.equals(0)), f.loop(0, heads) as i:
                        rows.finish(head + i, rows.state(rows.final, i))

    return kernel(f"attention_{shape.name}", AttentionArguments, body)


def merge(shape: AttentionShape) -> PlanKernel[MergeArguments]:
    """Write y for split rows. A task is one piece of a tile. Unsplit rows need no task."""

    def body(f: Function, a: MergeArguments, thread: Value, threads: Value) -> None:
        work = Work.at(a.work)
        count = work.tiles * work.split * shape.pieces
        with tasks(f, a.counter, count, thread, threads) as task:
            head, first = task % shape.pieces, f.i64(0)
            for rows in _tile(f, a, shape, task // shape.pieces, thread, work, head):
                rows.clear(f.i64(1))
                with f.loop(*rows.partitions) as number:
                    rows.merge(first, rows.partial(number, head))
                rows.finish(head, rows.state(rows.final, first))

    return kernel(f"attention_merge_{shape.name}", MergeArguments, body)


def _tile(
    f: Function, a: MergeArguments, shape: AttentionShape, tile: Value, thread: Value, work: Work, head: Value
) -> Iterator[_Rows]:
    """Yield the rows of a tile: together if the tile is full, otherwise one by one."""
    list_ = work.tile_rows
    first, count = f.load_i32(list_, tile * 2), f.load_i32(list_, tile * 2 + 1)
    if shape.tokens > 1:
        with f.when(count.equals(shape.tokens)):
            yield _Rows(f, a, shape, first, shape.tokens, thread, work, head)
        count = f.select(count.equals(shape.tokens), f.i64(0), count)
    with f.loop(first, first + count) as row:
        yield _Rows(f, a, shape, row, 1, thread, work, head)


def _visible(f: Function, score: Value, first: Value, last: Value, oldest: Value | None) -> Value:
    """Mask the scores of positions first to first + 15. Positions after `last` and before `oldest` get LOWEST."""

    lowest = f.constant(f32x16, LOWEST)
    lanes = _positions(f, first)
    score = f.fmax(f.constant(f32x16, FLOOR), score)  # this operand order propagates NaN
    seen = f.select(lanes <= _splat(f, last), score, lowest)
    return seen if oldest is None else f.select(lanes < _splat(f, oldest), lowest, seen)


def _integer(f: Function, at: Value) -> Value:
    """Load a float32 that holds an integer, as int64."""
    return f.widen(f.to_int32(f.load(at, F32)), I64, signed=True)


def _positions(f: Function, first: Value) -> Value:
    """Return first to first + 15 as int32."""
    return _splat(f, first) + f.lane_numbers()


def _splat(f: Function, number: Value) -> Value:
    return f.splat(Value(f, f.builder.trunc(number.ir, I32)))
