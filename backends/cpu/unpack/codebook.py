"""Formats whose values are points of a codebook: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.

The points of 16 rows are loaded one by one from a table in the kernel's own constants, as signed or shifted bytes.
Layouts are stated in quant.formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from backends.cpu.panels import Block, IntegerPanel, Scales, Step, byte, half, i32x16, short, u8x64, word32
from backends.cpu.simd import I8, I16, I32, I64, LANES, Function, Value, vector
from quant.formats.grids import grid

u8x16, u16x16 = vector(I8), vector(I16)


@cache
def _points(name: str, factor: int) -> tuple[int, ...]:
    """A number per point: its 4 or 8 coordinates times `factor` plus 128, a byte each."""
    points = (grid(name) * factor + 128).astype(np.uint8)  # (points, 4 or 8)
    return tuple(int(n) for n in points.view(f"<u{points.shape[1]}").reshape(-1))


def _fours(f: Function, name: str, indices: list[Value]) -> Value:
    """Points of 4 coordinates that 16 rows name: u8 x 64."""
    return f.bits(f.fetch(f.table(name, _points(name, 1)), I32, indices), u8x64)


def _eights(f: Function, name: str, factor: int, indices: list[Value]) -> list[Value]:
    """Points of 8 coordinates that 16 rows name: the first four and the last four, u8 x 64 each."""
    points = f.bits(f.fetch(f.table(name, _points(name, factor), I64), I64, indices), vector(I32, 2 * LANES))
    return [f.bits(f.shuffle(points, points, range(part, 2 * LANES, 2)), u8x64) for part in range(2)]


def _byte_indices(f: Function, block: Block, offset: int) -> list[Value]:
    """A byte of every row as an int64 scalar."""
    at = block.at(offset, 1)
    return [f.widen(f.load(at + lane, I8), I64) for lane in range(LANES)]


def _u16(f: Function, block: Block, offset: int) -> Value:
    """An unsigned byte of every row as int16 x 16."""
    return f.widen(f.load(block.at(offset, 1), u8x16), I16)


def _four_times(f: Function, bytes_: Value) -> Value:
    """Every row's byte (u8 x 16) in the four bytes of its lane: u8 x 64."""
    return f.shuffle(bytes_, bytes_, [n // 4 for n in range(64)])


def _byte_of_lane(f: Function, lanes: Value, number: int) -> Value:
    """Byte `number` of every row's four (u8 x 64), four times."""
    return f.shuffle(lanes, lanes, [n // 4 * 4 + number for n in range(64)])


def _signed(f: Function, points: Value, signs: Value, first: int) -> Value:
    """128 + q as 128 - q where bit first + i of the sign byte is set, for byte i of a lane."""
    mask = f.bits(f.constant(i32x16, sum(1 << (8 * i + first + i) for i in range(4))), u8x64)
    return f.select((signs & mask).differs(0), f.zeros(u8x64) - points, points)


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


def _signed_eights(f: Function, group: int, n: int, points: list[Value], signs: Value) -> Iterator[Step]:
    """Steps of run n of 8 values, whose sign bits stand in every byte of `signs`."""
    for part in range(2):
        yield 8 * n // group, (8 * n + 4 * part) % group // 4, _signed(f, points[part], signs, 4 * part)


def _iq2_xxs_steps(f: Function, block: Block) -> Iterator[Step]:
    for group in range(8):
        signs = _signs_of_codes(f, word32(f, block, 2 + 8 * group + 4))
        for n in range(4):
            points = _eights(f, "IQ2XXS", 1, _byte_indices(f, block, 2 + 8 * group + n))
            yield from _signed_eights(f, 32, 4 * group + n, points, _byte_of_lane(f, signs, n))


def _iq2_xs_steps(f: Function, block: Block) -> Iterator[Step]:
    for n in range(32):
        word = f.load(block.at(2 + 2 * n, 2), u16x16)
        code = word >> 9
        parity = code ^ (code >> 4)
        parity = parity ^ (parity >> 2)
        parity = (parity ^ (parity >> 1)) & 1
        signs = _four_times(f, f.truncate(code | (parity << 7), I8))
        yield from _signed_eights(f, 16, n, _eights(f, "IQ2XS", 1, f.scalars(word & 511)), signs)


def _iq2_s_steps(f: Function, block: Block) -> Iterator[Step]:
    for n in range(32):
        high = (_u16(f, block, 66 + n // 4) << (8 - 2 * (n % 4))) & 0x300
        signs = _four_times(f, f.load(block.at(34 + n, 1), u8x16))
        points = _eights(f, "IQ2S", 1, f.scalars(_u16(f, block, 2 + n) | high))
        yield from _signed_eights(f, 16, n, points, signs)


def _iq3_xxs_steps(f: Function, block: Block) -> Iterator[Step]:
    for group in range(8):
        signs = _signs_of_codes(f, word32(f, block, 66 + 4 * group))
        for n in range(8):
            points = _fours(f, "IQ3XXS", _byte_indices(f, block, 2 + 8 * group + n))
            yield group, n, _signed(f, points, _byte_of_lane(f, signs, n // 2), 4 * (n % 2))


def _iq3_s_steps(f: Function, block: Block) -> Iterator[Step]:
    for group in range(8):
        ninth = _u16(f, block, 66 + group)
        for n in range(8):
            signs = _four_times(f, f.load(block.at(74 + 4 * group + n // 2, 1), u8x16))
            index = _u16(f, block, 2 + 8 * group + n) | ((ninth << (8 - n)) & 0x100)
            yield group, n, _signed(f, _fours(f, "IQ3S", f.scalars(index)), signs, 4 * (n % 2))


def _iq3_s_scale(f: Function, block: Block, group: int) -> Scales:
    s = f.to_float(_nibble(f, block, 106, group))
    return half(f, block, 0) * (s * 2.0 + 1.0), None


def _moved(f: Function, points: Value, down: Value) -> Value:
    """Eighths: 8 * coordinate + 1, or - 1 in the lanes of `down`; 128 stands for zero."""
    up, less = f.constant(i32x16, 0x01010101), f.constant(i32x16, -1)
    return points + f.bits(f.select(down, less, up), u8x64)


def _iq1_s_steps(f: Function, block: Block) -> Iterator[Step]:
    for group in range(8):
        word = f.load(block.at(34 + 2 * group, 2), u16x16)
        down = f.widen(word, I32) >= 0x8000
        for n in range(4):
            high = (word << (8 - 3 * n) if 3 * n < 8 else word >> (3 * n - 8)) & 0x700
            points = _eights(f, "IQ1S", 8, f.scalars(_u16(f, block, 2 + 4 * group + n) | high))
            for part in range(2):
                yield group, 2 * n + part, _moved(f, points[part], down)


def _odd_scale(f: Function, d: Value, s: Value) -> Scales:
    """d * (2 s + 1) / 8: the integers are eighths."""
    return d * (f.to_float(s) * 2.0 + 1.0) * 0.125, None


def _iq1_s_scale(f: Function, block: Block, group: int) -> Scales:
    return _odd_scale(f, half(f, block, 0), (short(f, block, 34 + 2 * group) >> 12) & 7)


def _iq1_m_steps(f: Function, block: Block) -> Iterator[Step]:
    for n in range(32):
        high = _u16(f, block, 32 + n // 2) >> (4 * (n % 2))
        points = _eights(f, "IQ1S", 8, f.scalars(_u16(f, block, n) | ((high & 7) << 8)))
        down = (f.widen(high, I32) & 8).differs(0)
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
    return IntegerPanel(name, fields, 256, group, 128, False, steps, scales)


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
