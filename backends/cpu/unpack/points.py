"""Points of codebooks in registers: indices and signs in, coordinates out (`codebook` has the formats).

Kernels look up 64 point indices at a time: the four bytes of an int32 lane are four runs of one row. With byte
permutation across a register, the coordinates come from tables in registers, packed to 2 or 4 bits, and one more table
turns a coordinate and its sign bit into a byte. Otherwise the point indices of a block are stored as 16 bits, and each
point is loaded separately from a table among the kernel's constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np

from localllm.backends.cpu.panels import (
    STRIDED,
    SUPER_BLOCK,
    Step,
    i32x16,
    u8x64,
)
from localllm.backends.cpu.simd import I16, I32, I64, LANES, Function, Value, vector
from localllm.quant.formats.grids import grid

CENTRE = 64  # the byte for zero: coordinates are within +-62, so bytes stay below 128
RUNS = 4  # point indices of a row that are looked up together
Index = tuple[Value, Value | None]  # bits 0..7 and the higher bits of 64 point indices, u8 x 64 each


@cache
def _points(name: str) -> tuple[int, ...]:
    """Return one integer per point. Its 4 or 8 bytes are CENTRE + coordinate."""
    points = (grid(name) + CENTRE).astype(np.uint8)  # (points, 4 or 8)
    return tuple(int(n) for n in points.view(f"<u{points.shape[1]}").reshape(-1))


@cache
def _packed(name: str, bits: int) -> tuple[list[list[int]], list[int]]:
    """Return byte tables and the levels. A table holds 8 / `bits` coordinates of every point as level numbers."""
    points = grid(name)
    levels, codes = np.unique(points, return_inverse=True)
    codes = codes.reshape(len(points), -1, 8 // bits)
    tables = (codes << (bits * np.arange(8 // bits))).sum(-1).astype(np.uint8)  # (points, tables)
    return [[int(n) for n in table] for table in tables.T], [int(level) for level in levels]


def _coordinates(f: Function, name: str, indices: Sequence[Callable[[], Index]]) -> Iterator[list[Value]]:
    """Yield CENTRE + coordinates of one run at a time: four per u8 x 64."""
    size = grid(name).shape[1]
    element, numbers = (I64 if size == 8 else I32), f.buffer(128 * len(indices))
    table = f.table(name, _points(name), element)
    for four, index in enumerate(indices):
        low, high = index()
        wide = f.widen(low, I16)
        f.store(numbers + 128 * four, wide if high is None else wide | (f.widen(high, I16) << 8))
    for number in range(RUNS * len(indices)):
        # otherwise the compiler extracts the indices from vectors, and loads more points than registers can hold
        f.keep_order()
        four, run = divmod(number, RUNS)
        at = [numbers + (128 * four + 2 * (RUNS * row + run)) for row in range(LANES)]
        points = f.fetch(table, element, [f.load(place, I16) for place in at])
        if size == 4:
            yield [f.bits(points, u8x64)]
        else:
            halves = f.bits(points, vector(I32, 2 * LANES))
            yield [f.bits(f.shuffle(halves, halves, range(part, 2 * LANES, 2)), u8x64) for part in range(2)]


def _permuted(f: Function, name: str, index: Index, signs: Value, first: int) -> Iterator[Value]:
    """Yield CENTRE + coordinates with their signs, four per lane (u8 x 64).

    Points of eight coordinates come one by one, in two halves. Points of four come together: first coordinate 0 of RUNS
    points, then coordinate 1 and so on. Bit `first` of the lanes of `signs` is the sign of the first coordinate.
    """
    four = grid(name).shape[1] == 4
    tables, levels = _packed(name, 4 if four else 2)
    codes = [f.lookup_long(table, *index) for table in tables]
    sign = 3 if four else 2  # the bit of a level number that holds the sign
    below = (1 << sign) - 1
    padded = np.resize(levels, 1 << sign)
    entries = [int(CENTRE + level) for level in padded] + [int(CENTRE - level) for level in padded]
    nibbles = f.bits(f.shift_bytes(signs, [first + 4 * n for n in range(4)]), i32x16)  # of the points, if `four`
    for step in range(4 if four else 8):
        if four:
            fields = f.bits(f.bits(codes[step // 2], i32x16) >> (4 * (step % 2)), u8x64)
            bits = f.bits(nibbles << (sign - step), u8x64)
        else:
            fields = f.shift_bytes(codes[step % 2], [step // 2 * 8 + 2 * n for n in range(4)])
            half = signs if step < 4 else f.bits(f.bits(signs, i32x16) >> 16, u8x64)  # saves registers for constants
            bits = f.shift_bytes(half, [4 * step % 16 + n - sign for n in range(4)])
        yield f.lookup_long([entries[n % len(entries)] for n in range(64)], f.merge_bits(below, fields, bits), None)


def _transposed(f: Function, values: Sequence[Value]) -> list[Value]:
    """Transpose the 4 x 4 bytes that four vectors have in each lane (u8 x 64)."""

    def pair(a: Value, b: Value, order: Sequence[int]) -> Value:
        return f.shuffle(a, b, [n // 4 * 4 + order[n % 4] % 4 + order[n % 4] // 4 * 64 for n in range(64)])

    halves = [[pair(values[n], values[n + 1], [at, at + 4, at + 1, at + 5]) for at in (0, 2)] for n in (0, 2)]
    return [
        pair(halves[0][n // 2], halves[1][n // 2], [at, at + 1, at + 4, at + 5]) for n, at in enumerate((0, 2, 0, 2))
    ]


def fields_of(f: Function, lanes: Value, starts: Sequence[int], mask: int) -> Value:
    """Set byte i of every int32 lane to the bits of `mask` from bit starts[i] on: u8 x 64."""
    if f.isa.byte_permute:
        return f.shift_bytes(f.bits(lanes, u8x64), starts) & mask
    if mask == 3 and starts[0] // 8 == starts[3] // 8:  # two compares of bytes take less time than shifts
        bytes_ = _byte_of_lane(f, f.bits(lanes, u8x64), starts[0] // 8)
        low, high = (_where_set(f, bytes_, [bit << start % 8 for start in starts], bit) for bit in (1, 2))
        return low | high
    parts = [
        (lanes >> (start - 8 * n) if start >= 8 * n else lanes << (8 * n - start)) & (mask << (8 * n))
        for n, start in enumerate(starts)
    ]
    return f.bits((parts[0] | parts[1]) | (parts[2] | parts[3]), u8x64)


def _byte_of_lane(f: Function, lanes: Value, number: int) -> Value:
    """Copy byte `number` of each lane to all four bytes of the lane (u8 x 64)."""
    return f.shuffle(lanes, lanes, [n // 4 * 4 + number for n in range(64)])


def _where_set(f: Function, bytes_: Value, bits: Sequence[int], value: int) -> Value:
    """Return `value` in the bytes i of the lanes that have the bit bits[i], and 0 in the others (u8 x 64)."""
    mask = f.bits(f.constant(i32x16, sum(bit << 8 * n for n, bit in enumerate(bits))), u8x64)
    return f.select((bytes_ & mask).equals(mask), f.constant(u8x64, value), f.zeros(u8x64))


def _signed(f: Function, points: Value, signs: Value, first: int) -> Value:
    """Turn CENTRE + q into CENTRE - q in byte i of a lane if bit first + i of the sign byte is set."""
    mask = f.bits(f.constant(i32x16, sum(1 << (8 * i + first + i) for i in range(4))), u8x64)
    return f.select((signs & mask).equals(mask), f.constant(u8x64, 2 * CENTRE) - points, points)


EVEN_SIGNS = [code | code.bit_count() % 2 << 7 for code in range(128)]


def signs_of_codes(f: Function, codes: Value) -> Value:
    """Extend four 7-bit codes per lane to sign bytes with an even number of bits set."""
    if f.isa.byte_permute:
        return f.lookup_long(EVEN_SIGNS, codes, None)
    bytes_ = f.bits(codes, i32x16)
    # only the lowest bit of each byte matters: bits shifted in from the next byte end up above it
    parity = bytes_ ^ (bytes_ >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 0x01010101
    return f.bits(bytes_ | (parity << 7), u8x64)


def signed_steps(
    f: Function, name: str, group: int, index: Callable[[int], Index], signs: Callable[[int], Value],
    strided: bool = False,
) -> Iterator[Step]:  # fmt: skip
    """Yield the steps of a block.

    `index(i)` returns the indices of RUNS points of every row, and `signs(i)` a sign bit for 32 values of every row.
    """
    values = RUNS * grid(name).shape[1]  # of a row that are looked up together
    fours, sign = range(SUPER_BLOCK // values), cache(signs)
    if f.isa.byte_permute:
        for four in fours:
            first = four * values
            found = list(_permuted(f, name, index(four), sign(first // 32), first % 32))
            if values == STRIDED and not strided:
                found = _transposed(f, found)
            for k, points in zip(range(first, first + values, 4), found, strict=True):
                yield k // group, k % group // 4, points
        return
    for n, parts in enumerate(_coordinates(f, name, [partial(index, four) for four in fours])):
        for part, points in enumerate(parts):
            k = 4 * (n * len(parts) + part)
            bytes_ = _byte_of_lane(f, sign(k // 32), k % 32 // 8)
            yield k // group, k % group // 4, _signed(f, points, bytes_, k % 8)
