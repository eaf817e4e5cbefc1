"""The two products of attention, over one cache block and one KV head: query-key scores and weighted values.

One version is for cache types that store floats. The other uses int8 products, for types that store integers in
blocks. Every result is one chain of operations in a fixed order, no matter how many query rows share a read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add

from localllm.backends.cpu import dot
from localllm.backends.cpu.cache import (
    FOUR,
    GROUP,
    PANELS,
    Blocks,
    CacheRow,
    Floats,
    fifth_bits,
    head,
    rotate_keys,
    value_groups,
)
from localllm.backends.cpu.kernels.common import X_BLOCK, X_OFFSET, X_SCALE, X_SUM, f32x16, quantize_block
from localllm.backends.cpu.memory import LINE, aligned
from localllm.backends.cpu.panels import u8x64
from localllm.backends.cpu.simd import F32, I8, I32, LANES, Function, Value, vector
from localllm.plan import BLOCK

LOWEST = -3.0e38  # the score of a hidden position, and the initial maximum; finite
# The lowest score of a visible position. Visible positions keep a weight even if all scores are this low.
FLOOR = -1.0e38
Seen = Callable[[Value, Value, int | Value], Value]  # maps (panel's scores, panel number, query row) to masked scores
SCALED = 4  # query rows whose weights are multiplied together by the scales of the values
PART_BITS = 7  # bits of each half of a quantized weight; with 7, no instruction set saturates
WHOLE = float(2 ** (2 * PART_BITS) - 1)
UNROLLED = 16  # up to this many groups of query rows are unrolled; more use a loop, to bound the code size


@dataclass(frozen=True, slots=True)
class Reach:
    """Memory to prefetch during the computation: `bytes` from `start`, spread over the steps.

    Prefetches go to L2, because L1 allows too few outstanding requests. On Zen 4 at 16384 positions, prefetching makes
    attention 1.15 to 1.2 times as fast with an F16 cache, and 1.2 to 1.25 times with q8_0.
    """

    start: Value
    bytes: int


def _lines(reach: Reach | None, step: Value, steps: int) -> list[Value]:
    """Return the addresses of the cache lines to prefetch in step `step` of `steps`."""
    if reach is None:
        return []
    share = -(-reach.bytes // LINE // steps)
    return [reach.start + (step * (share * LINE) + line * LINE) for line in range(share)]


def _ask(f: Function, lines: list[Value], part: int = 0, parts: int = 1) -> None:
    """Prefetch one part of the lines. A few prefetches at a time complete sooner than many at once."""
    for line in lines[part * len(lines) // parts : (part + 1) * len(lines) // parts]:
        f.prefetch(line, locality=2)


def divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if n % d == 0)


def each(f: Function, count: int, step: int) -> Iterator[int | Value]:
    """Yield 0, step, 2 step, ... below `count`.

    A short sequence is unrolled as Python integers; a long sequence is a loop.
    """
    if count <= UNROLLED * step:
        yield from range(0, count, step)
        return
    yield 0
    with f.loop(step, count, step) as number:
        yield number


# -- queries ---------------------------------------------------------------------------------------------------------


def query_bytes(keys: CacheRow, head_dim: int) -> int:
    """Return the bytes of a query head in the form that `scores` reads."""
    if isinstance(keys, Floats):
        return 4 * keys.width(head_dim)
    return aligned(value_groups(head_dim) * X_BLOCK)


def prepare_queries(
    f: Function, keys: CacheRow, x: Value, scale: Value, out: Value, scratch: Value, head_dim: int
) -> None:
    """Multiply the float32 query head at x by `scale` and convert it for `scores`; `scratch` holds a padded head."""
    if isinstance(keys, Floats):
        wide = f.splat(scale * keys.factor)
        with f.loop(0, keys.width(head_dim), LANES) as d:  # beyond head_dim: values of other heads, never read
            f.store(out + d * 4, f.load(x + d * 4, f32x16) * wide)
        return
    parts = head(f, x, head_dim)
    if keys.type.rotated:
        parts = rotate_keys(f, parts, head_dim)
    for number, part in enumerate(parts):
        f.store(scratch + 4 * LANES * number, part)
    with f.loop(0, value_groups(head_dim)) as group:
        block = out + group * X_BLOCK
        quantize_block(f, scratch + group * (4 * GROUP), block)
        for slot in (X_SCALE, X_SUM):
            f.store(block + slot, f.load(block + slot, F32) * scale)


# -- scores ----------------------------------------------------------------------------------------------------------


def scores(
    f: Function, row: CacheRow, queries: Value, keys: Value, out: Value, rows: int, head_dim: int, count: Value,
    seen: Seen, reach: Reach | None, panels: int = PANELS,
) -> None:  # fmt: skip
    """Emit out[r][j] = seen(queries[r] . keys[j]) for 64 positions j. Panels from `count` on get LOWEST.

    `panels` is the number of panels in the block at `keys`.
    """
    together = divisor(rows, f.isa.query_rows)
    most = max(1, f.isa.query_rows // together)
    side = max(n for n in (1, 2, 4) if n <= min(panels, most))  # enough chains to hide the latency
    way = _float_scores if isinstance(row, Floats) else _block_scores
    computed = (count + (LANES * side - 1)) // (LANES * side) * side
    with f.loop(0, computed, side) as panel:
        for base in each(f, rows, together):
            asked = reach if isinstance(base, int) and base == 0 else None
            at = queries + base * query_bytes(row, head_dim)
            totals = way(f, row, at, keys, panel, side, together, head_dim, asked)  # type: ignore[arg-type]
            for i, of_row in enumerate(totals):
                for n, total in enumerate(of_row):
                    score = seen(total, panel + n, base + i)
                    f.store(out + ((panel + n) * LANES + (base + i) * BLOCK) * 4, score)
    with f.loop(computed, PANELS) as panel, f.loop(0, rows) as r:
        f.store(out + (panel * LANES + r * BLOCK) * 4, f.constant(f32x16, LOWEST))


def _float_scores(
    f: Function, row: Floats, queries: Value, keys: Value, panel: Value, side: int, together: int, head_dim: int,
    reach: Reach | None,
) -> list[list[Value]]:  # fmt: skip
    """Emit one accumulation chain over head_dim for every query row and position."""
    size, unroll, stride = LANES * row.bytes, divisor(head_dim, 4), query_bytes(row, head_dim)
    steps = head_dim // unroll
    totals = [[f.var(f.zeros(f32x16)) for _ in range(side)] for _ in range(together)]
    with f.loop(0, head_dim, unroll) as d:
        _ask(f, _lines(reach, panel // side * steps + d // unroll, PANELS // side * steps))
        for u in range(unroll):
            at = keys + (panel * (head_dim * size) + (d + u) * size)
            here = [row.load(f, at + n * (head_dim * size)) for n in range(side)]
            for i, of_row in enumerate(totals):
                q = f.broadcast(queries + (d * 4 + (i * stride + 4 * u)), F32)
                for key, total in zip(here, of_row, strict=True):
                    total.set(f.fma(key, q, total.get()))
    return [[total.get() for total in of_row] for of_row in totals]


def _block_scores(
    f: Function, row: Blocks, queries: Value, keys: Value, panel: Value, side: int, together: int, head_dim: int,
    reach: Reach | None,
) -> list[list[Value]]:  # fmt: skip
    """Emit exact integer sums per group, then one float chain over the groups.

    The chain adds sum * query scale * key scale, and minimum * (sum of the query).
    """
    size, stride, count = LANES * row.group_bytes, query_bytes(row, head_dim), value_groups(head_dim)
    totals = [[f.var(f.zeros(f32x16)) for _ in range(side)] for _ in range(together)]
    with f.loop(0, count) as group:
        lines = _lines(reach, panel // side * count + group, PANELS // side * count)
        at = [keys + ((panel + n) * (count * size) + group * size) for n in range(side)]
        x = [queries + (group * X_BLOCK + i * stride) for i in range(together)]
        sums = [[_start(f, row, q)] * side for q in x]
        for word in range(row.words):
            _ask(f, lines, word, row.words)
            for n in range(side):
                for bytes_, values in _word(f, row, at[n], word):
                    for i in range(together):
                        product = dot.biased if row.integer_bits == 8 else dot.small
                        sums[i][n] = product(f, sums[i][n], bytes_, dot.broadcast4(f, x[i] + 4 * values))
        for n in range(side):
            scales = at[n] + 64 * (row.words + row.fifth)
            scale = f.load_half(scales)
            minimum = f.load_half(scales + 2 * LANES) if row.minimum else None
            for i in range(together):
                total = f.to_float(sums[i][n]) * f.broadcast(x[i] + X_SCALE, F32)
                total = f.fma(total, scale, totals[i][n].get())
                if minimum is not None:
                    total = f.fma(minimum, f.broadcast(x[i] + X_SUM, F32), total)
                totals[i][n].set(total)
    return [[total.get() for total in of_row] for of_row in totals]


def _start(f: Function, row: Blocks, query: Value) -> Value:
    """Return the initial value of an integer sum: -offset * (sum of the query's integers)."""
    if row.integer_bits == 8:
        if not f.isa.biased_needs_offset:
            return f.zeros(vector(I32))
        return f.broadcast(query + X_OFFSET, I32)
    if not row.offset:
        return f.zeros(vector(I32))
    return f.broadcast(query + X_OFFSET, I32).sra({16: 3, 8: 4}[row.offset])  # X_OFFSET holds -128 times the sum


def _word(f: Function, row: Blocks, group: Value, word: int) -> list[tuple[Value, int]]:
    """Return pairs: the bytes of 16 positions x 4 values, and the index of these four values in the query's group."""
    bytes_ = f.load(group + 64 * word, u8x64)
    if row.integer_bits == 8:
        return [(bytes_, word)]
    halves = [bytes_ & 0x0F, (bytes_ >> 4) & 0x0F]
    if row.fifth:
        bits = f.load(group + 64 * row.words, vector(I32))
        for number, half in enumerate(halves):
            which = word + 4 * number
            moved = bits << (4 - which) if which < 4 else bits >> (which - 4)
            halves[number] = half | f.bits(moved & 0x10101010, u8x64)
    return [(halves[0], word), (halves[1], word + 4)]


# -- values ----------------------------------------------------------------------------------------------------------


def weigh_values(
    f: Function, row: CacheRow, weights: Value, values: Value, outputs: Value, shrink: Value, scratch: Value, rows: int,
    head_dim: int, count: Value, reach: Reach | None,
) -> None:  # fmt: skip
    """Emit outputs[r] = outputs[r] * shrink[r] + sum over positions j of weights[r][j] * values[j].

    `weights` has 64 positions; weights from `count` on are 0. `scratch` holds SCALED rows of 64 weights.
    """
    if isinstance(row, Floats):
        _weigh_floats(f, row, weights, values, outputs, shrink, rows, head_dim, count, reach)
    else:
        _weigh_blocks(f, row, weights, values, outputs, shrink, scratch, rows, head_dim, count, reach)


def _weigh_floats(
    f: Function, row: Floats, weights: Value, values: Value, outputs: Value, shrink: Value, rows: int, head_dim: int,
    count: Value, reach: Reach | None,
) -> None:  # fmt: skip
    width = row.width(head_dim)
    together = divisor(rows, f.isa.query_rows)
    # One strip per iteration keeps the weights as memory operands, which is fastest (14 % on Zen 4), and avoids spills
    # on AVX2. A few rows are limited by memory bandwidth, so sequential reads are best.
    strips = divisor(width // LANES, 4) if rows <= 4 and f.isa.registers == 32 else 1
    parts = width // LANES // strips
    with f.loop(0, rows, together) as base, f.loop(0, width, strips * LANES) as d:
        sums = []
        for r in range(together):
            factor = f.broadcast(shrink + (base + r) * 4, F32)
            at = outputs + ((base + r) * width + d) * 4
            sums.append([f.var(f.load(at + 4 * LANES * s, f32x16) * factor) for s in range(strips)])
        with f.loop(0, count) as j:
            _ask(f, _lines(reach, d // (strips * LANES) * BLOCK + j, parts * BLOCK))
            here = [row.load(f, values + (j * width + d + LANES * s) * row.bytes) for s in range(strips)]
            for r in range(together):
                weight = f.broadcast(weights + ((base + r) * BLOCK + j) * 4, F32)
                for s in range(strips):
                    sums[r][s].set(f.fma(here[s], weight, sums[r][s].get()))
        for r in range(together):
            at = outputs + ((base + r) * width + d) * 4
            for s in range(strips):
                f.store(at + 4 * LANES * s, sums[r][s].get())


def _weigh_blocks(
    f: Function, row: Blocks, weights: Value, values: Value, outputs: Value, shrink: Value, scratch: Value, rows: int,
    head_dim: int, positions: Value, reach: Reach | None,
) -> None:  # fmt: skip
    """Quantize the products of weights and group scales to 14-bit integers, so that sums over positions are exact.

    The largest of the 64 products becomes all ones, so each product is rounded by at most 2^-15 of the largest.
    Minimums are summed separately and added last.
    """
    width, count = row.width(head_dim), value_groups(head_dim)
    together = divisor(rows, SCALED if f.isa.registers == 32 else 1)
    with f.loop(0, rows, together) as base, f.loop(0, count) as group:
        at = values + group * (BLOCK * row.group_bytes)
        scales = [f.load_half(at + 2 * LANES * panel) for panel in range(PANELS)]
        # If the format has a minimum, its integers are taken relative to the middle. Otherwise rounding would shift all
        # values of a head in the same direction, and the inverse rotation would turn these small errors into one large
        # error.
        middle = 1 << (row.integer_bits - 1) if row.minimum else 0
        minimums = [f.load_half(at + 2 * (BLOCK + LANES * panel)) for panel in range(PANELS) if row.minimum]
        minimums = [f.fma(s, f.constant(f32x16, middle), m) for s, m in zip(scales, minimums, strict=False)]
        products, lows = [], []
        for r in range(together):
            own = [f.load(weights + ((base + r) * BLOCK + LANES * panel) * 4, f32x16) for panel in range(PANELS)]
            products.append([weight * scale for weight, scale in zip(own, scales, strict=True)])
            low = f.zeros(f32x16)
            for weight, minimum in zip(own, minimums, strict=False):
                low = f.fma(weight, minimum, low)
            lows.append(f.splat(f.reduce(low, add)) if row.minimum else low)
        steps, offsets = _parts(f, products, scratch, row.offset or middle)
        sums = [[[f.var(f.zeros(vector(I32))) for _ in range(2)] for _ in range(2)] for _ in range(together)]
        with f.loop(0, positions, LANES) as first:
            lines = _lines(reach, group * PANELS + first // LANES, count * PANELS)
            for j in range(0, LANES, FOUR):
                _ask(f, lines, j // FOUR, LANES // FOUR)
                here = _integers(f, row, at, first + j)
                for r in range(together):
                    for part in range(2):
                        weight = dot.broadcast4(f, scratch + (first + (j + (2 * r + part) * BLOCK)))
                        for s in range(2):
                            # The first operand must be unsigned: the weights if the values are signed, otherwise the
                            # values.
                            pair = (weight, here[s]) if row.integer_bits == 8 else (here[s], weight)
                            sums[r][part][s].set(dot.small(f, sums[r][part][s].get(), *pair))
        for r in range(together):
            out = outputs + ((base + r) * width + group * GROUP) * 4
            factor = f.broadcast(shrink + (base + r) * 4, F32)
            for s in range(2):
                high, low = (sums[r][part][s].get() for part in range(2))
                before = f.load(out + 4 * LANES * s, f32x16) * factor
                total = f.fma(f.to_float((high << PART_BITS) + low - offsets[r]), steps[r], before)
                f.store(out + 4 * LANES * s, total + lows[r] if row.minimum else total)


def _parts(f: Function, rows: list[list[Value]], out: Value, offset: int) -> tuple[list[Value], list[Value]]:
    """Quantize rows of 64 floats to 14-bit integers, signed if there is an `offset` (q4_0, q5_0: signed scales).

    The high halves of row r go to out[128 r:][:64], followed by the low halves, as bytes that every instruction set
    multiplies exactly. Return the quantization step of each row, and `offset` times the sum of its integers, both in
    every lane.
    """
    sizes = [[f.abs(x) for x in numbers] if offset else numbers for numbers in rows]
    largest = [f.reduce(reduce(f.fmax, numbers), f.fmax) for numbers in sizes]
    inverses = [f.constant(F32, WHOLE) / most for most in largest]
    offsets = []
    for r, numbers in enumerate(rows):
        wide = f.splat(f.select(inverses[r] < 3.0e38, inverses[r], f.constant(F32, 0.0)))
        integers = [f.to_int32(f.round_even(part * wide)) for part in numbers]
        for panel, part in enumerate(integers):
            at = out + (2 * BLOCK * r + LANES * panel)
            f.store(at, f.truncate(part.sra(PART_BITS), I8))
            f.store(at + BLOCK, f.truncate(part & (2**PART_BITS - 1), I8))
        offsets.append(f.splat(f.reduce(reduce(add, integers), add) * offset) if offset else f.zeros(vector(I32)))
    return [f.splat(most / f.constant(F32, WHOLE)) for most in largest], offsets


def _integers(f: Function, row: Blocks, group: Value, position: Value) -> list[Value]:
    """Load the integers of 32 values at four positions of a group into two vectors of bytes (16 values, 4)."""
    at = group + (position * (4 * row.words) + row.value_integers)
    bytes_ = f.load(at, u8x64)
    if row.integer_bits == 8:
        return [bytes_, f.load(at + 64, u8x64)]
    halves = [bytes_ & 0x0F, (bytes_ >> 4) & 0x0F]
    if row.fifth:
        bits = f.load(group + (position * 4 + 2 * BLOCK * (1 + row.minimum)), vector(I8))
        halves = [half | fifth_bits(f, bits, LANES * n) for n, half in enumerate(halves)]
    return halves
