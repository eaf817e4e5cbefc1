"""IQ1_S and IQ1_M. Their panels hold the coordinates of the codebook's points, in two bits each, instead of indices.

A point of the codebook is ternary, so its 8 coordinates fill two bytes, and its index 11 bits. Panels are 1.4 times as
large as the GGUF, but products need no table: looking up 64 coordinates took 5 to 6 cycles of loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np

from localllm.backends.cpu.panels import (
    SUPER_BLOCK,
    Block,
    Conversion,
    IntegerPanel,
    Step,
    SuperScales,
    byte,
    i32x16,
    short,
    u8x64,
    word32,
)
from localllm.backends.cpu.simd import I8, I16, I32, I64, Function, Value
from localllm.backends.cpu.unpack.codebook import odd_scales
from localllm.quant.formats.grids import levels_of

ZERO = 16  # the byte for zero. Values are eighths, within +-9.
RUN = 8  # values of a point, which also share the shift of an eighth up or down
WORDS = SUPER_BLOCK // 16  # a word holds two points of a row. Value 4 n + i of them is in bits 2 n of its byte i.


@cache
def _points() -> tuple[int, ...]:
    """Return the coordinates + 1 of each point, in the lower halves of the bytes of a word."""
    codes = levels_of("IQ1S").astype(np.uint32).reshape(-1, 2, 4)
    return tuple(int(n) for n in ((codes[:, 0] | codes[:, 1] << 2) << 8 * np.arange(4, dtype=np.uint32)).sum(-1))


def _words(f: Function, runs: Sequence[tuple[Value, Value]]) -> Iterator[Value]:
    """Yield the words of a block from the indices of its points (I32), and whether each is shifted down.

    ZERO + 8 c - 1 is 8 (c + 1) + 7, and ZERO + 8 c + 1 is 8 (c + 2) + 1. So a code is c + 1 or c + 2, and the lowest
    three bits depend only on the shift.
    """
    table, same, one = f.table("IQ1S_codes", _points()), f.constant(I32, 0), f.constant(I32, 0x05050505)
    for pair in range(0, len(runs), 2):
        low, high = (
            f.load(table + f.widen(index, I64) * 4, I32) + f.select(down, same, one)
            for index, down in runs[pair : pair + 2]
        )
        yield low | high << 4


def _steps(f: Function, block: Block, first: int, group: int, down: Callable[[int], Value]) -> Iterator[Step]:
    """Yield the steps of a block whose words begin at `first`. `down(run)` has the lanes of a run that are shifted."""

    @cache
    def lowest(run: int) -> Value:
        return f.select(down(run), f.constant(i32x16, 0x07070707), f.constant(i32x16, 0x01010101))

    for word in range(WORDS):
        codes = word32(f, block, first + 4 * word)
        for n in range(4):
            k, shift = 16 * word + 4 * n, 3 - 2 * n
            moved = codes << shift if shift > 0 else codes >> -shift
            yield k // group, k % group // 4, f.bits((moved & 0x18181818) | lowest(k // RUN), u8x64)


# Values are eighths, so the factor of the scales is an eighth.


def _panel(
    name: str, fields: tuple[tuple[int, int], ...], group: int, steps: Callable[[Function, Block], Iterator[Step]],
    scales: SuperScales, conversion: Conversion, in_order: bool, direct_rows: int,
) -> IntegerPanel:  # fmt: skip
    """Return a panel. On Zen 4, the order of memory makes one row of IQ1_M faster, and one row of IQ1_S slower.

    With AVX2, up to `direct_rows` rows are faster with packed bytes.
    """
    return IntegerPanel(
        name, fields, SUPER_BLOCK, group, ZERO, False, steps, scales.product, ZERO + 9, scales, conversion=conversion,
        by_group=steps, in_order=in_order,
        direct_rows=(0, direct_rows),
    )  # fmt: skip


def _index(f: Function, block: Value, run: int, high: Value) -> Value:
    return f.widen(f.load(block + run, I8), I32) | (high & 7) << 8


# -- IQ1_S: f16 d, the words, a nibble per 32 values: bits 0..2 s, bit 3 whether they are shifted down ----------------


def _iq1_s_elements(f: Function, block: Value) -> Iterator[Value]:
    shorts = [f.widen(f.load(block + (34 + 2 * group), I16), I32) for group in range(8)]
    runs = []
    for run in range(32):
        of_group = shorts[run // 4]
        runs.append((_index(f, block + 2, run, of_group >> 3 * (run % 4)), (of_group & 0x8000).differs(0)))
    yield f.load(block, I16)
    yield from _words(f, runs)
    for group in range(0, 8, 2):
        yield f.truncate(shorts[group] >> 12 | shorts[group + 1] >> 12 << 4, I8)


def _iq1_s_nibble(f: Function, block: Block, group: int, bits: int) -> Value:
    return byte(f, block, 2 + 4 * WORDS + group // 2) >> 4 * (group % 2) & bits


def _iq1_s_steps(f: Function, block: Block) -> Iterator[Step]:
    down = cache(lambda group: _iq1_s_nibble(f, block, group, 8).differs(0))
    return _steps(f, block, 2, 32, lambda run: down(run // 4))


IQ1_S = _panel(
    "IQ1_S", ((2, 1), (4, WORDS), (1, 4)), 32, _iq1_s_steps,
    odd_scales(0.125, partial(_iq1_s_nibble, bits=7)), Conversion(50, _iq1_s_elements),
    in_order=False, direct_rows=4,
)  # fmt: skip

# -- IQ1_M: a word with a bit per point that is shifted down, the words of codes, and the GGUF's four words of scales --

SCALES = 4 + 4 * WORDS


def _iq1_m_elements(f: Function, block: Value) -> Iterator[Value]:
    bytes_ = [f.widen(f.load(block + (32 + number), I8), I32) for number in range(16)]
    nibbles = [bytes_[run // 2] >> 4 * (run % 2) for run in range(32)]
    down = f.constant(I32, 0)
    for run, nibble in enumerate(nibbles):
        down = down | (nibble >> 3 & 1) << run
    yield down
    yield from _words(f, [(_index(f, block, run, n), (n & 8).differs(0)) for run, n in enumerate(nibbles)])
    for number in range(4):
        yield f.load(block + (48 + 2 * number), I16)


def _iq1_m_steps(f: Function, block: Block) -> Iterator[Step]:
    bits = word32(f, block, 0)
    return _steps(f, block, 4, 16, lambda run: (bits & 1 << run).differs(0))


def _iq1_m_d(f: Function, block: Block) -> Value:
    """Assemble a half-precision value from the upper four bits of four words, lowest bits first."""
    bits = short(f, block, SCALES) >> 12
    for number in range(1, 4):
        bits = bits | ((short(f, block, SCALES + 2 * number) >> 12) << (4 * number))
    return f.half_bits(f.truncate(bits, I16))


def _iq1_m_s(f: Function, block: Block, group: int) -> Value:
    return (short(f, block, SCALES + 2 * (group // 4)) >> (3 * (group % 4))) & 7


IQ1_M = _panel(
    "IQ1_M", ((4, 1), (4, WORDS), (2, 4)), 16, _iq1_m_steps, odd_scales(0.125, _iq1_m_s, _iq1_m_d),
    Conversion(56, _iq1_m_elements), in_order=True, direct_rows=2,
)  # fmt: skip
