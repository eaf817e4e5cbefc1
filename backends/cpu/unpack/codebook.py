"""Formats whose values are points of a codebook: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.

Kernels look up 64 point indices at a time, four runs of the 16 rows. With byte permutation across a register, the
coordinates come from tables in registers, packed to 2 or 4 bits. Otherwise the point indices of a block are stored as
16 bits, and each point is loaded separately from a table among the kernel's constants. (Two alternatives were slower
for IQ1_M on Zen 4: extracting the indices from vectors by a fifth, copying points to memory one by one and loading them
64 later by a third.) `quant.formats` defines the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np

from localllm.backends.cpu.panels import (
    SUPER_BLOCK,
    Block,
    IntegerPanel,
    Scales,
    Step,
    SuperScales,
    byte,
    half,
    i32x16,
    short,
    u8x64,
    word32,
)
from localllm.backends.cpu.simd import I8, I16, I32, I64, LANES, Function, Value, vector
from localllm.quant.formats.grids import grid

u8x16, u16x16 = vector(I8), vector(I16)
CENTRE = 64  # the byte for zero: coordinates are within +-62, so bytes stay below 128
EIGHTH = 16  # the byte for zero in eighths: they are within +-9, so AVX2 can add more before it widens
PERMUTED = 1024  # maximum points; with more, loads beat register lookups (IQ1_S on Zen 4: 38 versus 30 G weights/s)
Index = tuple[Value, Value | None]  # bits 0..7 and the higher bits of 64 point indices, u8 x 64 each


@cache
def _points(name: str, factor: int) -> tuple[int, ...]:
    """Return one integer per point. Its 4 or 8 bytes are CENTRE + coordinate, or EIGHTH + 1 + factor * coordinate."""
    points = (grid(name) * factor + (EIGHTH + 1 if factor > 1 else CENTRE)).astype(np.uint8)  # (points, 4 or 8)
    return tuple(int(n) for n in points.view(f"<u{points.shape[1]}").reshape(-1))


@cache
def _packed(name: str, bits: int) -> tuple[list[list[int]], list[int]]:
    """Return byte tables and the levels. A table holds 8 / `bits` coordinates of every point as level numbers."""
    points = grid(name)
    levels, codes = np.unique(points, return_inverse=True)
    codes = codes.reshape(len(points), -1, 8 // bits)
    tables = (codes << (bits * np.arange(8 // bits))).sum(-1).astype(np.uint8)  # (points, tables)
    padded = np.resize(levels, 1 << bits) if bits == 2 else np.resize(levels, 16)
    return [[int(n) for n in table] for table in tables.T], [int(level) for level in padded]


def _coordinates(f: Function, name: str, factor: int, indices: Sequence[Callable[[], Index]]) -> Iterator[list[Value]]:
    """Yield CENTRE + coordinates, or EIGHTH + 1 + factor * coordinates, four coordinates at a time (u8 x 64).

    The bytes are ordered by run: 16 rows per run, four runs per index.
    """
    if f.isa.byte_permute and len(grid(name)) <= PERMUTED:
        for index in indices:
            yield from _permuted(f, name, index())
        return
    size = grid(name).shape[1]
    element, numbers = (I64 if size == 8 else I32), f.buffer(128 * len(indices))
    table = f.table(name, _points(name, factor), element)
    for four, index in enumerate(indices):
        low, high = index()
        wide = f.widen(low, I16)
        f.store(numbers + 128 * four, wide if high is None else wide | (f.widen(high, I16) << 8))
    for run in range(4 * len(indices)):
        # otherwise the compiler extracts the indices from vectors, and loads more points than registers can hold
        f.keep_order()
        points = f.fetch(table, element, [f.load(numbers + 2 * (LANES * run + row), I16) for row in range(LANES)])
        if size == 4:
            yield [f.bits(points, u8x64)]
        else:
            halves = f.bits(points, vector(I32, 2 * LANES))
            yield [f.bits(f.shuffle(halves, halves, range(part, 2 * LANES, 2)), u8x64) for part in range(2)]


def _permuted(f: Function, name: str, index: Index) -> Iterator[list[Value]]:
    four = grid(name).shape[1] == 4
    tables, levels = _packed(name, 4 if four else 2)
    codes = [f.lookup_long(table, *index) for table in tables]
    shifts = [0, 12, 16, 28] if four else [0, 10, 20, 30]  # shifts that move each of four bytes to its coordinate
    values = [level + CENTRE for level in levels]
    for run in range(4):
        found = []
        for part in range(1 if four else 2):
            pair = (codes[0], codes[1]) if four else (codes[part], codes[part])
            # Every lane gets its row's byte four times, or each of its two bytes twice.
            order = [16 * run + n // 4 + (64 if four and n % 4 > 1 else 0) for n in range(64)]
            fields = f.shift_bytes(f.shuffle(*pair, order), shifts) & (15 if four else 3)
            found.append(f.lookup([values[n % len(values)] for n in range(16)], fields))
        yield found


def _four_runs(f: Function, block: Block, offset: int) -> Value:
    """Load four neighbouring bytes of every row, run by run: u8 x 64."""
    return f.load(block.at(offset, 1), u8x64)


def _bytes(f: Function, block: Block, offset: int) -> Value:
    return f.load(block.at(offset, 1), u8x16)


def _four_times(f: Function, bytes_: Value, run: int = 0) -> Value:
    """Copy each row's byte of a run to the four bytes of its lane: u8 x 64."""
    return f.shuffle(bytes_, bytes_, [16 * run + n // 4 for n in range(64)])


def _byte_of_lane(f: Function, lanes: Value, number: int) -> Value:
    """Copy byte `number` of each lane to all four bytes of the lane (u8 x 64)."""
    return f.shuffle(lanes, lanes, [n // 4 * 4 + number for n in range(64)])


def _signed(f: Function, points: Value, signs: Value, first: int) -> Value:
    """Turn CENTRE + q into CENTRE - q in byte i of a lane if bit first + i of the sign byte is set."""
    mask = f.bits(f.constant(i32x16, sum(1 << (8 * i + first + i) for i in range(4))), u8x64)
    return f.select((signs & mask).differs(0), f.constant(u8x64, 2 * CENTRE) - points, points)


def _signs_of_codes(f: Function, codes: Value) -> Value:
    """Expand four 7-bit codes (low 28 bits of int32 lanes) to four sign bytes with an even number of bits set."""
    bytes_ = codes & 0x7F
    for n in range(1, 4):
        bytes_ = bytes_ | ((codes << n) & (0x7F << (8 * n)))
    # only the lowest bit of each byte matters: bits shifted in from the next byte end up above it
    parity = bytes_ ^ (bytes_ >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 0x01010101
    return f.bits(bytes_ | (parity << 7), u8x64)


def _nibble(f: Function, block: Block, at: int, number: int) -> Value:
    return (byte(f, block, at + number // 2) >> (4 * (number % 2))) & 15


def _signed_run(f: Function, group: int, n: int, points: list[Value], signs: Value) -> Iterator[Step]:
    """Yield the steps of run n of 8 values. Every byte of `signs` holds the sign bits of these values."""
    for part in range(2):
        yield 8 * n // group, (8 * n + 4 * part) % group // 4, _signed(f, points[part], signs, 4 * part)


def _iq2_xxs_steps(f: Function, block: Block) -> Iterator[Step]:
    indices = [lambda group=group: (_four_runs(f, block, 2 + 8 * group), None) for group in range(8)]
    for n, points in enumerate(_coordinates(f, "IQ2XXS", 1, indices)):
        if n % 4 == 0:
            signs = _signs_of_codes(f, word32(f, block, 2 + 2 * n + 4))
        yield from _signed_run(f, 32, n, points, _byte_of_lane(f, signs, n % 4))


def _iq2_xs_steps(f: Function, block: Block) -> Iterator[Step]:
    def words(four: int) -> Value:
        return f.load(block.at(2 + 8 * four, 2), vector(I16, 64))

    def index(four: int) -> Index:
        return f.truncate(words(four), I8), f.truncate((words(four) >> 8) & 1, I8)

    for n, points in enumerate(_coordinates(f, "IQ2XS", 1, [partial(index, four) for four in range(8)])):
        if n % 4 == 0:
            code = f.truncate(words(n // 4) >> 9, I8)
            parity = code ^ (code >> 4)
            parity = parity ^ (parity >> 2)
            signs = code | ((parity ^ (parity >> 1)) << 7)
        yield from _signed_run(f, 16, n, points, _four_times(f, signs, n % 4))


def _iq2_s_steps(f: Function, block: Block) -> Iterator[Step]:
    def index(four: int) -> Index:
        bits = _bytes(f, block, 66 + four)
        return _four_runs(f, block, 2 + 4 * four), f.join([(bits >> (2 * n)) & 3 for n in range(4)])

    for n, points in enumerate(_coordinates(f, "IQ2S", 1, [partial(index, four) for four in range(8)])):
        if n % 4 == 0:
            signs = _four_runs(f, block, 34 + n)
        yield from _signed_run(f, 16, n, points, _four_times(f, signs, n % 4))


def _iq3_xxs_steps(f: Function, block: Block) -> Iterator[Step]:
    indices = [lambda four=four: (_four_runs(f, block, 2 + 4 * four), None) for four in range(16)]
    for n, [points] in enumerate(_coordinates(f, "IQ3XXS", 1, indices)):
        if n % 8 == 0:
            signs = _signs_of_codes(f, word32(f, block, 66 + n // 2))
        yield n // 8, n % 8, _signed(f, points, _byte_of_lane(f, signs, n % 8 // 2), 4 * (n % 2))


def _iq3_s_steps(f: Function, block: Block) -> Iterator[Step]:
    def index(four: int) -> Index:
        ninth = _bytes(f, block, 66 + four // 2)
        high = [(ninth >> (4 * (four % 2) + run)) & 1 for run in range(4)]
        return _four_runs(f, block, 2 + 4 * four), f.join(high)

    for n, [points] in enumerate(_coordinates(f, "IQ3S", 1, [partial(index, four) for four in range(16)])):
        if n % 8 == 0:
            signs = _four_runs(f, block, 74 + n // 2)
        yield n // 8, n % 8, _signed(f, points, _four_times(f, signs, n % 8 // 2), 4 * (n % 2))


def _moved(f: Function, points: Value, down: Value) -> Value:
    """Return eighths: 8 * coordinate - 1 in the lanes of `down`, and 8 * coordinate + 1 in the others."""
    lanes = f.bits(points, i32x16)  # one masked subtraction: no byte is below 2, so nothing borrows
    return f.bits(f.select(down, lanes - 0x02020202, lanes), u8x64)


def _iq1_s_steps(f: Function, block: Block) -> Iterator[Step]:
    def word(group: int) -> Value:
        return f.load(block.at(34 + 2 * group, 2), u16x16)

    def index(group: int) -> Index:
        high = [f.truncate((word(group) >> (3 * n)) & 7, I8) for n in range(4)]
        return _four_runs(f, block, 2 + 4 * group), f.join(high)

    for n, points in enumerate(_coordinates(f, "IQ1S", 8, [partial(index, group) for group in range(8)])):
        down = word(n // 4) < 0
        for part in range(2):
            yield n // 4, 2 * (n % 4) + part, _moved(f, points[part], down)


def _iq1_m_steps(f: Function, block: Block) -> Iterator[Step]:
    def pair(n: int) -> Value:
        return _bytes(f, block, 32 + n // 2)

    def index(four: int) -> Index:
        high = [(pair(n) >> (4 * (n % 2))) & 7 for n in range(4 * four, 4 * four + 4)]
        return _four_runs(f, block, 4 * four), f.join(high)

    for n, points in enumerate(_coordinates(f, "IQ1S", 8, [partial(index, four) for four in range(8)])):
        down = (pair(n) & (8 << (4 * (n % 2)))).differs(0)
        for part in range(2):
            yield n // 2, 2 * (n % 2) + part, _moved(f, points[part], down)


# Group scales are odd: value = d * factor * (2 s + 1) * q, with a factor that depends on the format.


def _iq1_m_d(f: Function, block: Block) -> Value:
    """Assemble a half-precision value from the upper four bits of four words, lowest bits first."""
    bits = short(f, block, 48) >> 12
    for number in range(1, 4):
        bits = bits | ((short(f, block, 48 + 2 * number) >> 12) << (4 * number))
    return f.half_bits(f.truncate(bits, I16))


def _scales(
    factor: float, s: Callable[[Function, Block, int], Value],
    d: Callable[[Function, Block], Value] = lambda f, block: half(f, block, 0),
) -> SuperScales:  # fmt: skip
    def whole(f: Function, block: Block) -> Scales:
        return d(f, block) * factor, None

    def of_group(f: Function, block: Block, group: int) -> Scales:
        return (s(f, block, group) << 1) | 1, None

    return SuperScales(whole, of_group)


def _panel(
    name: str, fields: tuple[tuple[int, int], ...], group: int, steps: Callable[[Function, Block], Iterator[Step]],
    scales: SuperScales, zero: int = CENTRE,
) -> IntegerPanel:  # fmt: skip
    # Sum in integers if float operations would dominate otherwise (Zen 4, decode: IQ2_S becomes 1.4 times as fast).
    in_integers = scales if group == 16 or zero == EIGHTH else None
    largest = 127 if zero == CENTRE else EIGHTH + 9
    return IntegerPanel(
        name, fields, SUPER_BLOCK, group, zero, False, steps, scales.product, largest, in_integers, direct_rows=3
    )


IQ2_XXS = _panel(
    "IQ2_XXS", ((2, 1), *((1, 4), (4, 1)) * 8), 32, _iq2_xxs_steps,
    _scales(0.125, lambda f, block, group: word32(f, block, 2 + 8 * group + 4) >> 28),
)  # fmt: skip
IQ2_XS = _panel(
    "IQ2_XS", ((2, 1), (2, 32), (1, 8)), 16, _iq2_xs_steps,
    _scales(0.125, lambda f, block, group: _nibble(f, block, 66, group)),
)  # fmt: skip
IQ2_S = _panel(
    "IQ2_S", ((2, 1), (1, 80)), 16, _iq2_s_steps, _scales(0.125, lambda f, block, group: _nibble(f, block, 74, group))
)
IQ3_XXS = _panel(
    "IQ3_XXS", ((2, 1), (1, 64), (4, 8)), 32, _iq3_xxs_steps,
    _scales(0.25, lambda f, block, group: word32(f, block, 66 + 4 * group) >> 28),
)  # fmt: skip
IQ3_S = _panel(
    "IQ3_S", ((2, 1), (1, 108)), 32, _iq3_s_steps, _scales(1.0, lambda f, block, group: _nibble(f, block, 106, group))
)
IQ1_S = _panel(
    "IQ1_S", ((2, 1), (1, 32), (2, 8)), 32, _iq1_s_steps,
    _scales(0.125, lambda f, block, group: (short(f, block, 34 + 2 * group) >> 12) & 7), EIGHTH,
)  # fmt: skip
IQ1_M = _panel(
    "IQ1_M", ((1, 48), (2, 4)), 16, _iq1_m_steps,
    _scales(0.125, lambda f, block, group: (short(f, block, 48 + 2 * (group // 4)) >> (3 * (group % 4))) & 7, _iq1_m_d),
    EIGHTH,
)  # fmt: skip
