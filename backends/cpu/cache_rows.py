"""A cache block layout for reading single rows, and the kernel code that writes such blocks and gathers rows from them.

Panels of 16 positions, as `backends.cpu.cache` stores keys, would have to be read completely for a single position.
Layers whose attention reads single rows (`backends.cpu.cache_layout`) store one row per position and head instead. One
head of one block (64 positions, or 64 / every pools) holds:

  floats   rows (positions, D padded to whole vectors)
  blocks   rows (64 positions, E / 32) of {words (4 or 8, 4 bytes), fifth bits (4 bytes), scale, minimum}

with words and bits as in a panel of keys, or as in the values. `gather_keys` and `gather_values` assemble a block in
panel layout, bit for bit, from 64 rows of one or more layers. So attention kernels need only one layout.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.backends.cpu.cache import FOUR, PANELS, Blocks, CacheRow, Floats, value_groups
from localllm.backends.cpu.simd import I8, I16, I32, I64, LANES, Function, Value, vector
from localllm.plan import BLOCK, rows_of_block

U8 = NDArray[np.uint8]
_INTEGERS = {1: I8, 2: I16, 4: I32}  # integer types by size in bytes


def cache_row_bytes(row: CacheRow, head_dim: int) -> int:
    """Return the bytes of one head at one position."""
    return row.width(head_dim) * row.bytes if isinstance(row, Floats) else value_groups(head_dim) * row.group_bytes


def head_bytes(
    keys: CacheRow, values: CacheRow, head_dim: int, value_dim: int, rows: bool, every: int = 1
) -> tuple[int, int]:
    """Return the bytes of one head's keys and values in a block, in panels or in rows per position or pool."""
    count = rows_of_block(every)
    if rows:
        return count * cache_row_bytes(keys, head_dim), count * cache_row_bytes(values, value_dim)
    assert count % LANES == 0, f"no panels of {count} rows"
    return keys.key_bytes(head_dim) * count // BLOCK, values.value_bytes(value_dim) * count // BLOCK


def write_key_row(f: Function, row: CacheRow, x: Value, rows: Value, head_dim: int, position: Value) -> None:
    """Write the float32 head at x to the row of a position."""
    if isinstance(row, Floats):
        row.write_value(f, x, rows, head_dim, position)
        return
    for number, (integers, scale, minimum) in enumerate(row.quantized(f, x, head_dim)):
        at = rows + (position * cache_row_bytes(row, head_dim) + number * row.group_bytes)
        for half, words in enumerate(row.key_words(f, integers)):
            f.store(at + 16 * half, words)
        if row.fifth:
            f.store(at + 4 * row.words, row.fifth_of_key(f, integers))
        _write_scales(f, row, at, scale, minimum)


def write_value_row(f: Function, row: CacheRow, x: Value, rows: Value, head_dim: int, position: Value) -> None:
    if isinstance(row, Floats):
        row.write_value(f, x, rows, head_dim, position)
        return
    for number, (integers, scale, minimum) in enumerate(row.quantized(f, x, head_dim)):
        at = rows + (position * cache_row_bytes(row, head_dim) + number * row.group_bytes)
        f.store(at, row.value_bytes_of(f, integers))
        if row.fifth:
            f.store(at + 4 * row.words, row.fifth_of_value(f, integers))
        _write_scales(f, row, at, scale, minimum)


def _write_scales(f: Function, row: Blocks, at: Value, scale: Value, minimum: Value | None) -> None:
    scales = at + 4 * (row.words + row.fifth)
    f.store(scales, f.half_of(scale))
    if minimum is not None:
        f.store(scales + 2, f.half_of(minimum))


def finite_rows(row: CacheRow, content: U8) -> bool:
    """Return whether block contents uint8 (n, bytes) are free of infinity and NaN."""
    if isinstance(row, Floats):
        return row.finite_values(content)
    scales = content.reshape(-1, row.group_bytes)[:, 4 * (row.words + row.fifth) :]
    return bool(np.isfinite(np.ascontiguousarray(scales).view(np.float16)).all())


def gather_keys(f: Function, row: CacheRow, entries: Value, out: Value, head_dim: int, panel: Value) -> None:
    """Write a panel of keys to the block at `out`. `entries` points to the int64 addresses of the source rows."""
    first = entries + panel * (8 * LANES)
    at = [f.pointer(f.load(first + 8 * lane, I64, 8)) for lane in range(LANES)]
    if isinstance(row, Blocks):
        of_panel = out + panel * (value_groups(head_dim) * LANES * row.group_bytes)
        with f.loop(0, value_groups(head_dim)) as group:
            to = of_panel + group * (LANES * row.group_bytes)
            for lane, source in enumerate(at):
                of_group = source + group * row.group_bytes
                for word in range(row.words + row.fifth):
                    f.store(to + (4 * lane + 64 * word), f.load(of_group + 4 * word, I32))
                scales = 4 * (row.words + row.fifth)
                for half in range(1 + row.minimum):
                    place = 64 * (row.words + row.fifth) + 2 * lane + 2 * LANES * half
                    f.store(to + place, f.load(of_group + (scales + 2 * half), I16))
        return
    kind, full = vector(_INTEGERS[row.bytes]), head_dim // LANES * LANES
    of_panel = out + panel * (head_dim * LANES * row.bytes)

    def copy(d: Value, count: int) -> None:
        columns = _transposed(f, [f.load(source + d * row.bytes, kind) for source in at])
        for n in range(count):
            f.store(of_panel + (d + n) * (LANES * row.bytes), columns[n])

    with f.loop(0, full, LANES) as d:
        copy(d, LANES)
    if full < head_dim:
        copy(f.i64(full), head_dim - full)


def gather_values(
    f: Function, row: CacheRow, entries: Value, out: Value, head_dim: int, n: Value, of_keys: bool = False
) -> None:
    """Write the values of the first `n` entries to the block at `out`; integer types write all 64.

    With `of_keys` the source rows hold keys, whose first dimensions are the values.
    """
    if isinstance(row, Floats):
        kind = vector(_INTEGERS[row.bytes])
        with f.loop(0, n) as j:
            source, to = f.pointer(f.load(entries + j * 8, I64, 8)), out + j * cache_row_bytes(row, head_dim)
            with f.loop(0, cache_row_bytes(row, head_dim), LANES * row.bytes) as d:
                f.store(to + d, f.load(source + d, kind))
        return
    with f.loop(0, BLOCK) as j, f.loop(0, value_groups(head_dim)) as group:
        source = f.pointer(f.load(entries + j * 8, I64, 8)) + group * row.group_bytes
        at = out + group * (BLOCK * row.group_bytes)
        scales = source + 4 * (row.words + row.fifth)
        for half in range(1 + row.minimum):
            f.store(at + (j * 2 + 2 * BLOCK * half), f.load(scales + 2 * half, I16))
        if row.fifth:
            f.store(at + (j * 4 + 2 * BLOCK * (1 + row.minimum)), f.load(source + 4 * row.words, I32))
        integers = f.load(source, vector(I8, 4 * row.words))
        if of_keys and row.integer_bits == 8:
            integers = integers ^ -128  # keys are stored as q + 128
        to = at + (j // FOUR * (FOUR * 4 * row.words) + j % FOUR + row.value_integers)
        for number in range(4 * row.words):
            f.store(to + FOUR * number, f.lane(integers, number))


def _transposed(f: Function, rows: list[Value]) -> list[Value]:
    """Transpose 16 vectors of 16 lanes by exchanging off-diagonal squares of 1, 2, 4 and 8 lanes."""
    span = 1
    while span < LANES:
        first = [lane if not lane & span else lane - span + LANES for lane in range(LANES)]
        second = [lane + span if not lane & span else lane + LANES for lane in range(LANES)]
        moved = list(rows)
        for number in range(LANES):
            if not number & span:
                a, b = rows[number], rows[number + span]
                moved[number], moved[number + span] = f.shuffle(a, b, first), f.shuffle(a, b, second)
        rows, span = moved, 2 * span
    return rows


def panels_of(n: Value) -> Value:
    """Return the number of panels that hold n positions."""
    return (n + (LANES - 1)) // LANES


assert PANELS * LANES == BLOCK
