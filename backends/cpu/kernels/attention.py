"""Attention over the paged cache: softmax block by block in order of position, for decode and prefill alike.

A task is a tile of neighbouring rows of one sequence and one key-value head with all its query heads. A cache block
of 64 positions is always taken whole: scores of all 64, positions that a row may not see weigh exactly 0, then one
update of the running maximum, sum and output. So a row's result does not depend on the tile, the batch or the
threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from backends.cpu.jit import Kernel
from backends.cpu.kernels.common import Arguments, Step, exp, f32x16, kernel, tanh, tasks
from backends.cpu.memory import LINE
from backends.cpu.simd import F32, I32, LANES, Function, Value


class AttentionArg(IntEnum):
    STEP = 0
    Q = 1
    Q_STRIDE = 2
    Y = 3
    Y_STRIDE = 4
    K_CACHE = 5
    V_CACHE = 6
    KV_HEADS = 7
    SCALE = 8
    COUNTER = 9
    SCRATCH = 10
    SCRATCH_STRIDE = 11  # bytes of one thread
    TILES = 12  # address of {int64 address of int32 (first row, rows), int64 count}
    WINDOW = 13  # positions that a row sees, itself included
    SOFTCAP = 14  # float32
    SINKS = 15  # float32 (heads,)
    SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for."""

    head_dim: int
    group: int  # query heads that read one key-value head
    block: int  # positions of a cache block
    window: bool = False
    softcap: bool = False
    sinks: bool = False

    @property
    def name(self) -> str:
        extras = "".join(f"_{n}" for n in ("window", "softcap", "sinks") if getattr(self, n))
        return f"attention_{self.head_dim}_{self.group}_{self.block}{extras}"


MAX_QUERY_ROWS = 16
LOWEST = -1.0e30  # below any score, and finite: the first maximum


def tile_tokens(group: int) -> int:
    """Tokens of a tile: a power of two, at most 16 query rows with `group` query heads per key-value head."""
    tokens = 1
    while tokens * 2 * group <= MAX_QUERY_ROWS:
        tokens *= 2
    return tokens


def _padded(head_dim: int) -> int:
    return -(-head_dim // LANES) * LANES


def scratch_bytes(shape: Shape) -> int:
    """Bytes of one thread's scratch: scaled queries, scores, outputs, and per row maximum, sum, correction."""
    rows = max(shape.group, tile_tokens(shape.group) * shape.group)
    return rows * 4 * (2 * _padded(shape.head_dim) + shape.block + 3) + 64


def _divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if n % d == 0)


def attention(shape: Shape) -> Kernel:
    """y = softmax(scale * q k^T) v for every row, with the extras of `backends.plan.Attention` that the shape names."""
    tokens = tile_tokens(shape.group)

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        step = a.pointer(AttentionArg.STEP)
        kv_heads = a.i64(AttentionArg.KV_HEADS)
        header = a.pointer(AttentionArg.TILES)
        tiles = f.load_int(header, 1)
        scratch = a.pointer(AttentionArg.SCRATCH) + thread * a.i64(AttentionArg.SCRATCH_STRIDE)
        with tasks(f, a.pointer(AttentionArg.COUNTER), tiles * kv_heads) as task:
            # The last tiles see the most positions: they go first.
            tile = (tiles - 1 - task // kv_heads) * 2
            head = task % kv_heads
            list_ = f.pointer(f.load_int(header))
            first, count = f.load_i32(list_, tile), f.load_i32(list_, tile + 1)
            if tokens > 1:
                with f.when(count.equals(tokens)):
                    _rows(f, a, step, scratch, first, head, tokens, shape)
                with f.when(count.differs(tokens)), f.loop(first, first + count) as row:
                    _rows(f, a, step, scratch, row, head, 1, shape)
            else:
                with f.loop(first, first + count) as row:
                    _rows(f, a, step, scratch, row, head, 1, shape)

    return kernel(shape.name, body)


def _rows(
    f: Function, a: Arguments, step: Value, scratch: Value, first: Value, head: Value, tokens: int, shape: Shape
) -> None:
    """All query heads of `head` for `tokens` rows from `first`."""
    head_dim, group, block = shape.head_dim, shape.group, shape.block
    rows, width = tokens * group, _padded(head_dim)
    queries, scores = scratch, scratch + rows * width * 4
    outputs = scores + rows * block * 4
    maxima = outputs + rows * width * 4
    sums, corrections = maxima + rows * 4, maxima + rows * 8
    kv_heads = a.i64(AttentionArg.KV_HEADS)
    scale = f.splat(a.f32(AttentionArg.SCALE))
    lowest = f.constant(F32, LOWEST)

    def head_row(slot: int, row: int) -> Value:
        """Address of query head row % group of token row // group in q or y."""
        base = a.pointer(slot) + (first + row // group) * a.i64(slot + 1)
        return base + (head * group + row % group) * (4 * head_dim)

    for row in range(rows):
        source = head_row(AttentionArg.Q, row)
        with f.loop(0, width, LANES) as d:  # beyond head_dim: other heads' numbers or padding, never read
            f.store(queries + (d + row * width) * 4, f.load(source + d * 4, f32x16) * scale)
            f.store(outputs + (d + row * width) * 4, f.zeros(f32x16))
        f.store(maxima + row * 4, lowest)
        f.store(sums + row * 4, f.zeros(F32))

    positions = f.pointer(f.load_int(step, Step.POSITIONS))
    limits = [f.load_i32(positions, first + token) for token in range(tokens)]
    sequence = f.load_i32(f.pointer(f.load_int(step, Step.SEQUENCE)), first)
    table = f.pointer(f.load_int(step, Step.TABLES)) + sequence * f.load_int(step, Step.TABLE_STRIDE)
    window = a.i64(AttentionArg.WINDOW) if shape.window else None
    start = f.i64(0)
    if (
        window is not None
    ):  # a block that only other rows of the tile see weighs 0 in the end: its maximum is the lowest
        oldest = limits[0] - window + 1
        start = f.select(oldest > 0, oldest, f.i64(0)) // block
    softcap = f.splat(a.f32(AttentionArg.SOFTCAP)) if shape.softcap else None
    with f.loop(start, limits[-1] // block + 1) as number:
        at = f.load_i32(table, number) * kv_heads + head
        keys = a.pointer(AttentionArg.K_CACHE) + at * (block * head_dim * 2)
        values = a.pointer(AttentionArg.V_CACHE) + at * (block * width * 2)
        _scores(f, queries, keys, scores, limits, number * block, rows, shape, window, softcap,
                values if tokens == 1 else None)  # fmt: skip
        with f.loop(0, rows) as one:
            _softmax(f, scores + one * (4 * block), maxima + one * 4, sums + one * 4, corrections + one * 4, block)
        following = f.load_i32(table, f.minimum(number + 1, limits[-1] // block)) * kv_heads + head
        coming = a.pointer(AttentionArg.K_CACHE) + following * (block * head_dim * 2)
        ahead = head_dim * 2 // LINE * LINE if tokens == 1 else 0  # one token: memory is what it waits for
        _weighted_sum(f, scores, values, outputs, corrections, rows, width, block, coming, ahead)

    for row in range(rows):
        target = head_row(AttentionArg.Y, row)
        numerator, total = f.constant(F32, 1.0), f.load(sums + row * 4, F32)
        if shape.sinks:
            sink = f.load(a.pointer(AttentionArg.SINKS) + (head * group + row % group) * 4, F32)
            before = f.load(maxima + row * 4, F32)
            now = f.fmax(before, sink)
            numerator = f.lane(exp(f, f.splat(before - now, 4)), 0)
            total = f.fma(total, numerator, f.lane(exp(f, f.splat(sink - now, 4)), 0))
        inverse = f.splat(numerator / total)
        for at_dim in range(0, head_dim, LANES):
            value = f.load(outputs + (row * width + at_dim) * 4, f32x16) * inverse
            f.store_lanes(target + 4 * at_dim, value, min(LANES, head_dim - at_dim))


def _scores(
    f: Function, queries: Value, keys: Value, scores: Value, limits: list[Value], start: Value,
    rows: int, shape: Shape, window: Value | None, softcap: Value | None, prefetch: Value | None,
) -> None:  # fmt: skip
    """scores[row][j] = q[row] . k[j], one chain over head_dim; -1e30 where position start + j is not to be seen."""
    head_dim, group, block = shape.head_dim, shape.group, shape.block
    width = _padded(head_dim)
    together = _divisor(rows, f.isa.query_rows)
    unroll = _divisor(head_dim, 4)
    side = max(n for n in (1, 2, 4) if n == 1 or n * together <= f.isa.query_rows)  # chains enough to hide latency
    steps = block // LANES // side * (head_dim // unroll)
    ahead = -(-block * width * 2 // LINE // steps) * LINE  # bytes of the values to ask for in every step
    with f.loop(0, block // LANES, side) as panel:
        for base in range(0, rows, together):
            sums = [[f.var(f.zeros(f32x16)) for _ in range(side)] for _ in range(together)]
            with f.loop(0, head_dim, unroll) as d:
                if prefetch is not None and base == 0:
                    step = panel // side * (head_dim // unroll) + d // unroll
                    for line in range(0, ahead, LINE):
                        f.prefetch(prefetch + (step * ahead + line))
                for u in range(unroll):
                    at = keys + (panel * (head_dim * LANES * 2) + (d + u) * (LANES * 2))
                    here = [f.load_half(at + n * (head_dim * LANES * 2)) for n in range(side)]
                    for i, of_row in enumerate(sums):
                        q = f.broadcast(queries + (d + ((base + i) * width + u)) * 4, F32)
                        for key, total in zip(here, of_row, strict=True):
                            total.set(f.fma(key, q, total.get()))
            for i, of_row in enumerate(sums):
                last = limits[(base + i) // group]
                for n, total in enumerate(of_row):
                    first = start + (panel + n) * LANES
                    score = total.get()
                    if softcap is not None:
                        score = softcap * tanh(f, score / softcap)
                    seen = _visible(f, score, first, last, window)
                    f.store(scores + ((panel + n) * LANES + (base + i) * block) * 4, seen)


def _visible(f: Function, score: Value, first: Value, last: Value, window: Value | None) -> Value:
    """Scores of positions first .. first + 15 with the lowest number where a row that ends at `last` must not look."""

    def splat(number: Value) -> Value:
        return f.splat(Value(f, f.builder.trunc(number.ir, I32)))

    lowest = f.constant(f32x16, LOWEST)
    lanes = splat(first) + f.lane_numbers()
    seen = f.select(lanes <= splat(last), score, lowest)
    return seen if window is None else f.select(lanes <= splat(last - window), lowest, seen)


def _softmax(f: Function, scores: Value, maximum: Value, total: Value, correction: Value, block: int) -> None:
    """Scores to weights exp(score - maximum); the running maximum and sum, and by how much older sums shrink."""
    parts = [f.load(scores + 4 * j, f32x16) for j in range(0, block, LANES)]
    largest = parts[0]
    for part in parts[1:]:
        largest = f.fmax(largest, part)
    before = f.load(maximum, F32)
    now = f.fmax(before, f.reduce(largest, f.fmax))
    shift = f.splat(now)
    weights = f.zeros(f32x16)
    for j, part in enumerate(parts):
        weight = exp(f, part - shift)
        f.store(scores + 4 * LANES * j, weight)
        weights = weights + weight
    shrink = f.lane(exp(f, f.splat(before - now, 4)), 0)
    f.store(maximum, now)
    f.store(correction, shrink)
    f.store(total, f.fma(f.load(total, F32), shrink, f.reduce(weights, lambda p, q: p + q)))


def _weighted_sum(
    f: Function, weights: Value, values: Value, outputs: Value, corrections: Value, rows: int, width: int, block: int,
    coming: Value, ahead: int,
) -> None:  # fmt: skip
    """output[row] = output[row] * correction[row] + sum over j, in order, of weight[row][j] * v[j]."""
    together = _divisor(rows, 4)
    strips = _divisor(width // LANES, 4 if f.isa.dot == "vnni512" else 2)
    with f.loop(0, rows, together) as base, f.loop(0, width, strips * LANES) as d:
        sums = []
        for row in range(together):
            shrink = f.broadcast(corrections + (base + row) * 4, F32)
            at = outputs + ((base + row) * width + d) * 4
            sums.append([f.var(f.load(at + 4 * LANES * s, f32x16) * shrink) for s in range(strips)])
        with f.loop(0, block) as j:
            for line in range(0, ahead, LINE):  # the keys of the next block
                f.prefetch(coming + (j * ahead + line))
            here = [f.load_half(values + (j * width + d + LANES * s) * 2) for s in range(strips)]
            for row in range(together):
                weight = f.broadcast(weights + ((base + row) * block + j) * 4, F32)
                for s in range(strips):
                    sums[row][s].set(f.fma(here[s], weight, sums[row][s].get()))
        for row in range(together):
            at = outputs + ((base + row) * width + d) * 4
            for s in range(strips):
                f.store(at + 4 * LANES * s, sums[row][s].get())
