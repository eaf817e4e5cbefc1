"""Formats whose values are points of a codebook: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.

A lane's point is fetched from a table in the kernel's own constants. Layouts are stated in quant.formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from backends.cpu.panels import Block, IntegerPanel, Scales, Step, byte, half, i32x16, short, u8x64, word32
from backends.cpu.simd import F32, I16, Function, Value, vector
from quant.formats.grids import grid


@cache
def _points(name: str, factor: int, bias: int) -> tuple[tuple[int, ...], ...]:
    """Per four coordinates: the table's int32, by point number; coordinates times `factor` plus `bias`, a byte each."""
    points = (grid(name) * factor + bias).astype(np.uint8)  # (points, 4 or 8)
    numbers = np.ascontiguousarray(points).view("<u4")
    return tuple(tuple(int(n) for n in column) for column in numbers.T)


def _fetch(f: Function, name: str, factor: int, bias: int, part: int, index: Value) -> Value:
    """Coordinates 4 * part .. of the points that 16 lanes name: u8 x 64."""
    table = f.table(f"{name}_{part}", _points(name, factor, bias)[part])
    return f.bits(f.gather(table, index), u8x64)


def _spread(f: Function, bits: Value, first: int) -> Value:
    """Bits first .. first + 3 of every int32 lane to the lowest bits of its four bytes: u8 x 64 of 0 and 1."""
    four = ((bits >> first) & 15) * 0x00204081
    return f.bits(four & 0x01010101, u8x64)


def _signed(f: Function, magnitude: Value, minus: Value) -> Value:
    """128 + magnitude, or 128 - magnitude where the byte of `minus` is 1."""
    mask = f.zeros(u8x64) - minus
    return ((magnitude ^ mask) + minus) + 128


def _signs_of_code(code: Value) -> Value:
    """8 sign bits from 7: the eighth makes their number even."""
    parity = code ^ (code >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    return code | (parity << 7)


def _nibble(f: Function, block: Block, at: int, number: int) -> Value:
    return (byte(f, block, at + number // 2) >> (4 * (number % 2))) & 15


def _half_step_scale(f: Function, block: Block, s: Value, factor: float) -> Scales:
    """d * ((s + 1/2) * factor)."""
    return half(f, block, 0) * ((f.to_float(s) + 0.5) * factor), None


def _runs(name: str, group: int, run: object) -> object:
    """Steps of an IQ2 format: `run(f, block, n)` gives point number and sign bits of run n of 8 values."""
    assert callable(run)

    def steps(f: Function, block: Block) -> Iterator[Step]:
        for n in range(32):
            index, signs = run(f, block, n)
            for part in range(2):
                word = (8 * n + 4 * part) % group // 4
                magnitude = _fetch(f, name, 1, 0, part, index)
                yield 8 * n // group, word, _signed(f, magnitude, _spread(f, signs, 4 * part))

    return steps


def _iq2_xxs_run(f: Function, block: Block, n: int) -> tuple[Value, Value]:
    signs = word32(f, block, 2 + 8 * (n // 4) + 4)
    return byte(f, block, 2 + 8 * (n // 4) + n % 4), _signs_of_code((signs >> (7 * (n % 4))) & 127)


def _iq2_xs_run(f: Function, block: Block, n: int) -> tuple[Value, Value]:
    word = short(f, block, 2 + 2 * n)
    return word & 511, _signs_of_code(word >> 9)


def _iq2_s_run(f: Function, block: Block, n: int) -> tuple[Value, Value]:
    high = (byte(f, block, 66 + n // 4) >> (2 * (n % 4))) & 3
    return byte(f, block, 2 + n) | (high << 8), byte(f, block, 34 + n)


def _iq3_xxs_steps(f: Function, block: Block) -> Iterator[Step]:
    for n in range(64):
        code = (word32(f, block, 66 + 4 * (n // 8)) >> (7 * (n % 8 // 2))) & 127
        magnitude = _fetch(f, "IQ3XXS", 1, 0, 0, byte(f, block, 2 + n))
        yield n // 8, n % 8, _signed(f, magnitude, _spread(f, _signs_of_code(code), 4 * (n % 2)))


def _iq3_s_steps(f: Function, block: Block) -> Iterator[Step]:
    for n in range(64):
        ninth = (byte(f, block, 66 + n // 8) >> (n % 8)) & 1
        magnitude = _fetch(f, "IQ3S", 1, 0, 0, byte(f, block, 2 + n) | (ninth << 8))
        yield n // 8, n % 8, _signed(f, magnitude, _spread(f, byte(f, block, 74 + n // 2), 4 * (n % 2)))


def _iq3_s_scale(f: Function, block: Block, group: int) -> Scales:
    s = f.to_float(_nibble(f, block, 106, group))
    return half(f, block, 0) * (s * 2.0 + 1.0), None


def _moved(f: Function, points: Value, shift: Value) -> Value:
    """Eighths: 8 * coordinate + 1, or - 1 where the int32 lane `shift` is 1; 128 stands for zero."""
    ones = f.bits(f.constant(i32x16, 0x01010101) + shift * 0xFEFEFEFE, u8x64)  # a byte of 1 or of 255, no carry
    return points + ones


def _iq1_s_steps(f: Function, block: Block) -> Iterator[Step]:
    for n in range(32):
        word = short(f, block, 34 + 2 * (n // 4))
        index = byte(f, block, 2 + n) | (((word >> (3 * (n % 4))) & 7) << 8)
        for part in range(2):
            points = _fetch(f, "IQ1S", 8, 128, part, index)
            yield n // 4, (8 * n + 4 * part) % 32 // 4, _moved(f, points, word >> 15)


def _odd_scale(f: Function, d: Value, s: Value) -> Scales:
    """d * (2 s + 1) / 8: the integers are eighths."""
    return d * (f.to_float(s) * 2.0 + 1.0) * 0.125, None


def _iq1_s_scale(f: Function, block: Block, group: int) -> Scales:
    return _odd_scale(f, half(f, block, 0), (short(f, block, 34 + 2 * group) >> 12) & 7)


def _iq1_m_steps(f: Function, block: Block) -> Iterator[Step]:
    for n in range(32):
        high = _nibble(f, block, 32, n)
        index = byte(f, block, n) | ((high & 7) << 8)
        for part in range(2):
            points = _fetch(f, "IQ1S", 8, 128, part, index)
            yield n // 2, (8 * n + 4 * part) % 16 // 4, _moved(f, points, high >> 3)


def _iq1_m_scale(f: Function, block: Block, group: int) -> Scales:
    bits = short(f, block, 48) >> 12
    for number in range(1, 4):
        bits = bits | ((short(f, block, 48 + 2 * number) >> 12) << (4 * number))
    d = f.half_bits(f.truncate(bits, I16))
    return _odd_scale(f, d, (short(f, block, 48 + 2 * (group // 4)) >> (3 * (group % 4))) & 7)


def _panel(name: str, fields: tuple[tuple[int, int], ...], group: int, steps: object, scales: object) -> IntegerPanel:
    return IntegerPanel(name, fields, 256, group, 128, False, steps, scales)  # type: ignore[arg-type]


IQ2_XXS = _panel(
    "IQ2_XXS", ((2, 1), *((1, 4), (4, 1)) * 8), 32, _runs("IQ2XXS", 32, _iq2_xxs_run),
    lambda f, block, group: _half_step_scale(f, block, word32(f, block, 2 + 8 * group + 4) >> 28, 0.25),
)  # fmt: skip
IQ2_XS = _panel(
    "IQ2_XS", ((2, 1), (2, 32), (1, 8)), 16, _runs("IQ2XS", 16, _iq2_xs_run),
    lambda f, block, group: _half_step_scale(f, block, _nibble(f, block, 66, group), 0.25),
)  # fmt: skip
IQ2_S = _panel(
    "IQ2_S", ((2, 1), (1, 80)), 16, _runs("IQ2S", 16, _iq2_s_run),
    lambda f, block, group: _half_step_scale(f, block, _nibble(f, block, 74, group), 0.25),
)  # fmt: skip
IQ3_XXS = _panel(
    "IQ3_XXS", ((2, 1), (1, 64), (4, 8)), 32, _iq3_xxs_steps,
    lambda f, block, group: _half_step_scale(f, block, word32(f, block, 66 + 4 * group) >> 28, 0.5),
)  # fmt: skip
IQ3_S = _panel("IQ3_S", ((2, 1), (1, 108)), 32, _iq3_s_steps, _iq3_s_scale)
IQ1_S = _panel("IQ1_S", ((2, 1), (1, 32), (2, 8)), 32, _iq1_s_steps, _iq1_s_scale)
IQ1_M = _panel("IQ1_M", ((1, 48), (2, 4)), 16, _iq1_m_steps, _iq1_m_scale)

assert vector(F32).element == F32
