"""Formats whose values are points of a codebook: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.

Point numbers are taken 64 at a time: four runs of the 16 rows. Where bytes can be permuted across a register, the
coordinates come out of tables held in registers, packed to 2 or 4 bits; elsewhere each point is loaded by itself from
a table in the kernel's own constants. Layouts are stated in quant.formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from backends.cpu.panels import Block, IntegerPanel, Scales, Step, byte, half, i32x16, short, u8x64, word32
from backends.cpu.simd import I8, I16, I32, I64, LANES, Function, Value, vector
from quant.formats.grids import grid

u8x16, u16x16 = vector(I8), vector(I16)
CENTRE = 64  # what stands for zero: coordinates lie within +-62, so that bytes stay below 128
PERMUTED = 1024  # points; more are loaded faster than looked up in registers (IQ1_S on Zen 4: 38 to 30 G weights/s)
Index = tuple[Value, Value | None]  # bits 0..7 and the bits above of 64 point numbers, u8 x 64 each


@cache
def _points(name: str, factor: int) -> tuple[int, ...]:
    """A number per point: its 4 or 8 coordinates times `factor` plus CENTRE, a byte each; one more with a factor."""
    points = (grid(name) * factor + CENTRE + (factor > 1)).astype(np.uint8)  # (points, 4 or 8)
    return tuple(int(n) for n in points.view(f"<u{points.shape[1]}").reshape(-1))


@cache
def _packed(name: str, bits: int) -> tuple[list[list[int]], list[int]]:
    """Tables of bytes that each hold 8 / `bits` coordinates of every point as numbers of levels, and the levels."""
    points = grid(name)
    levels, codes = np.unique(points, return_inverse=True)
    codes = codes.reshape(len(points), -1, 8 // bits)
    tables = (codes << (bits * np.arange(8 // bits))).sum(-1).astype(np.uint8)  # (points, tables)
    padded = np.resize(levels, 1 << bits) if bits == 2 else np.resize(levels, 16)
    return [[int(n) for n in table] for table in tables.T], [int(level) for level in padded]


def _coordinates(f: Function, name: str, factor: int, index: Index) -> Iterator[list[Value]]:
    """Per run of 16 rows: CENTRE + factor * coordinates, four at a time, u8 x 64 each."""
    if f.isa.byte_permute and len(grid(name)) <= PERMUTED:
        yield from _permuted(f, name, factor, index)
        return
    table, width = _points(name, factor), 8 * grid(name).shape[1]
    element = I64 if width == 64 else I32
    for run in range(4):
        low, high = (None if part is None else _run(f, part, run) for part in index)
        assert low is not None
        wide = f.widen(low, I16)
        points = f.fetch(
            f.table(name, table, element),
            element,
            f.scalars(wide if high is None else wide | (f.widen(high, I16) << 8)),
        )
        if width == 32:
            yield [f.bits(points, u8x64)]
        else:
            halves = f.bits(points, vector(I32, 2 * LANES))
            yield [f.bits(f.shuffle(halves, halves, range(part, 2 * LANES, 2)), u8x64) for part in range(2)]


def _permuted(f: Function, name: str, factor: int, index: Index) -> Iterator[list[Value]]:
    four = grid(name).shape[1] == 4
    tables, levels = _packed(name, 4 if four else 2)
    codes = [f.lookup_long(table, *index) for table in tables]
    shifts = [0, 12, 16, 28] if four else [0, 10, 20, 30]  # from four bytes to their own coordinate
    values = [level * factor + CENTRE for level in levels]
    for run in range(4):
        found = []
        for part in range(1 if four else 2):
            pair = (codes[0], codes[1]) if four else (codes[part], codes[part])
            # Every lane gets its row's byte four times, or where it takes two bytes, each of them twice.
            order = [16 * run + n // 4 + (64 if four and n % 4 > 1 else 0) for n in range(64)]
            fields = f.shift_bytes(f.shuffle(*pair, order), shifts) & (15 if four else 3)
            found.append(f.lookup([values[n % len(values)] for n in range(16)], fields))
        yield found


def _run(f: Function, values: Value, run: int) -> Value:
    """The 16 bytes of one run out of four."""
    return f.shuffle(values, values, range(16 * run, 16 * run + 16))


def _four_runs(f: Function, block: Block, offset: int) -> Value:
    """Four neighbouring bytes of every row, one run after the other: u8 x 64."""
    return f.load(block.at(offset, 1), u8x64)


def _bytes(f: Function, block: Block, offset: int) -> Value:
    return f.load(block.at(offset, 1), u8x16)


def _four_times(f: Function, bytes_: Value, run: int = 0) -> Value:
    """Every row's byte of a run in the four bytes of its lane: u8 x 64."""
    return f.shuffle(bytes_, bytes_, [16 * run + n // 4 for n in range(64)])


def _byte_of_lane(f: Function, lanes: Value, number: int) -> Value:
    """Byte `number` of every row's four (u8 x 64), four times."""
    return f.shuffle(lanes, lanes, [n // 4 * 4 + number for n in range(64)])


def _signed(f: Function, points: Value, signs: Value, first: int) -> Value:
    """CENTRE + q as CENTRE - q where bit first + i of the sign byte is set, for byte i of a lane."""
    mask = f.bits(f.constant(i32x16, sum(1 << (8 * i + first + i) for i in range(4))), u8x64)
    return f.select((signs & mask).differs(0), f.constant(u8x64, 2 * CENTRE) - points, points)


def _signs_of_codes(f: Function, codes: Value) -> Value:
    """Four codes of 7 bits (the low 28 of int32 lanes) to four sign bytes: the eighth bit makes their number even."""
    bytes_ = codes & 0x7F
    for n in range(1, 4):
        bytes_ = bytes_ | ((codes << n) & (0x7F << (8 * n)))
    parity = bytes_ ^ (bytes_ >> 4)  # of a byte's lowest bit alone: what comes in from its neighbour is above
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 0x01010101
    return f.bits(bytes_ | (parity << 7), u8x64)


def _nibble(f: Function, block: Block, at: int, number: int) -> Value:
    return (byte(f, block, at + number // 2) >> (4 * (number % 2))) & 15


def _half_step_scale(f: Function, block: Block, s: Value, factor: float) -> Scales:
    """d * ((s + 1/2) * factor)."""
    return half(f, block, 0) * ((f.to_float(s) + 0.5) * factor), None


def _signed_run(f: Function, group: int, n: int, points: list[Value], signs: Value) -> Iterator[Step]:
    """Steps of run n of 8 values, whose sign bits stand in every byte of `signs`."""
    for part in range(2):
        yield 8 * n // group, (8 * n + 4 * part) % group // 4, _signed(f, points[part], signs, 4 * part)


def _iq2_xxs_steps(f: Function, block: Block) -> Iterator[Step]:
    for group in range(8):
        signs = _signs_of_codes(f, word32(f, block, 2 + 8 * group + 4))
        index = _four_runs(f, block, 2 + 8 * group), None
        for n, points in enumerate(_coordinates(f, "IQ2XXS", 1, index)):
            yield from _signed_run(f, 32, 4 * group + n, points, _byte_of_lane(f, signs, n))


def _iq2_xs_steps(f: Function, block: Block) -> Iterator[Step]:
    for four in range(8):
        words = f.load(block.at(2 + 8 * four, 2), vector(I16, 64))
        code = f.truncate(words >> 9, I8)
        parity = code ^ (code >> 4)
        parity = parity ^ (parity >> 2)
        signs = code | ((parity ^ (parity >> 1)) << 7)
        index = f.truncate(words, I8), f.truncate((words >> 8) & 1, I8)
        for n, points in enumerate(_coordinates(f, "IQ2XS", 1, index)):
            yield from _signed_run(f, 16, 4 * four + n, points, _four_times(f, signs, n))


def _iq2_s_steps(f: Function, block: Block) -> Iterator[Step]:
    for four in range(8):
        bits = _bytes(f, block, 66 + four)
        high = f.join([(bits >> (2 * n)) & 3 for n in range(4)])
        signs = _four_runs(f, block, 34 + 4 * four)
        for n, points in enumerate(_coordinates(f, "IQ2S", 1, (_four_runs(f, block, 2 + 4 * four), high))):
            yield from _signed_run(f, 16, 4 * four + n, points, _four_times(f, signs, n))


def _iq3_xxs_steps(f: Function, block: Block) -> Iterator[Step]:
    for group in range(8):
        signs = _signs_of_codes(f, word32(f, block, 66 + 4 * group))
        for four in range(2):
            index = _four_runs(f, block, 2 + 8 * group + 4 * four), None
            for run, [points] in enumerate(_coordinates(f, "IQ3XXS", 1, index)):
                n = 4 * four + run
                yield group, n, _signed(f, points, _byte_of_lane(f, signs, n // 2), 4 * (n % 2))


def _iq3_s_steps(f: Function, block: Block) -> Iterator[Step]:
    for group in range(8):
        ninth = _bytes(f, block, 66 + group)
        signs = _four_runs(f, block, 74 + 4 * group)
        for four in range(2):
            high = f.join([(ninth >> (4 * four + run)) & 1 for run in range(4)])
            index = _four_runs(f, block, 2 + 8 * group + 4 * four), high
            for run, [points] in enumerate(_coordinates(f, "IQ3S", 1, index)):
                n = 4 * four + run
                yield group, n, _signed(f, points, _four_times(f, signs, n // 2), 4 * (n % 2))


def _iq3_s_scale(f: Function, block: Block, group: int) -> Scales:
    s = f.to_float(_nibble(f, block, 106, group))
    return half(f, block, 0) * (s * 2.0 + 1.0), None


def _moved(f: Function, points: Value, down: Value) -> Value:
    """Eighths: 8 * coordinate - 1, or + 1 out of the lanes of `down`."""
    lanes = f.bits(points, i32x16)  # one masked subtraction: no byte is below 2, none borrows
    return f.bits(f.select(down, lanes - 0x02020202, lanes), u8x64)


def _iq1_s_steps(f: Function, block: Block) -> Iterator[Step]:
    for group in range(8):
        word = f.load(block.at(34 + 2 * group, 2), u16x16)
        down = f.widen(word, I32) >= 0x8000
        high = f.join([f.truncate((word >> (3 * n)) & 7, I8) for n in range(4)])
        for n, points in enumerate(_coordinates(f, "IQ1S", 8, (_four_runs(f, block, 2 + 4 * group), high))):
            for part in range(2):
                yield group, 2 * n + part, _moved(f, points[part], down)


def _odd_scale(f: Function, d: Value, s: Value) -> Scales:
    """d * (2 s + 1) / 8: the integers are eighths."""
    return d * (f.to_float(s) * 2.0 + 1.0) * 0.125, None


def _iq1_s_scale(f: Function, block: Block, group: int) -> Scales:
    return _odd_scale(f, half(f, block, 0), (short(f, block, 34 + 2 * group) >> 12) & 7)


def _iq1_m_steps(f: Function, block: Block) -> Iterator[Step]:
    for four in range(8):
        pairs = [_bytes(f, block, 32 + 2 * four + i) for i in range(2)]
        nibbles = [pairs[n // 2] >> (4 * (n % 2)) for n in range(4)]
        index = _four_runs(f, block, 4 * four), f.join([nibble & 7 for nibble in nibbles])
        for run, points in enumerate(_coordinates(f, "IQ1S", 8, index)):
            down = (f.widen(nibbles[run], I32) & 8).differs(0)
            n = 4 * four + run
            for part in range(2):
                yield n // 2, (8 * n + 4 * part) % 16 // 4, _moved(f, points[part], down)


def _iq1_m_scale(f: Function, block: Block, group: int) -> Scales:
    bits = short(f, block, 48) >> 12
    for number in range(1, 4):
        bits = bits | ((short(f, block, 48 + 2 * number) >> 12) << (4 * number))
    d = f.half_bits(f.truncate(bits, I16))
    return _odd_scale(f, d, (short(f, block, 48 + 2 * (group // 4)) >> (3 * (group % 4))) & 7)


def _panel(
    name: str, fields: tuple[tuple[int, int], ...], group: int,
    steps: Callable[[Function, Block], Iterator[Step]], scales: Callable[[Function, Block, int], Scales],
) -> IntegerPanel:  # fmt: skip
    return IntegerPanel(name, fields, 256, group, CENTRE, False, steps, scales, direct_rows=3)


IQ2_XXS = _panel(
    "IQ2_XXS", ((2, 1), *((1, 4), (4, 1)) * 8), 32, _iq2_xxs_steps,
    lambda f, block, group: _half_step_scale(f, block, word32(f, block, 2 + 8 * group + 4) >> 28, 0.25),
)  # fmt: skip
IQ2_XS = _panel(
    "IQ2_XS", ((2, 1), (2, 32), (1, 8)), 16, _iq2_xs_steps,
    lambda f, block, group: _half_step_scale(f, block, _nibble(f, block, 66, group), 0.25),
)  # fmt: skip
IQ2_S = _panel(
    "IQ2_S", ((2, 1), (1, 80)), 16, _iq2_s_steps,
    lambda f, block, group: _half_step_scale(f, block, _nibble(f, block, 74, group), 0.25),
)  # fmt: skip
IQ3_XXS = _panel(
    "IQ3_XXS", ((2, 1), (1, 64), (4, 8)), 32, _iq3_xxs_steps,
    lambda f, block, group: _half_step_scale(f, block, word32(f, block, 66 + 4 * group) >> 28, 0.5),
)  # fmt: skip
IQ3_S = _panel("IQ3_S", ((2, 1), (1, 108)), 32, _iq3_s_steps, _iq3_s_scale)
IQ1_S = _panel("IQ1_S", ((2, 1), (1, 32), (2, 8)), 32, _iq1_s_steps, _iq1_s_scale)
IQ1_M = _panel("IQ1_M", ((1, 48), (2, 4)), 16, _iq1_m_steps, _iq1_m_scale)
