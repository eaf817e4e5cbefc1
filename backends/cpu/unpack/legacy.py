"""Formats of 32 values with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. `quant.formats` defines the layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from localllm.backends.cpu.panels import (
    Block,
    Conversion,
    IntegerPanel,
    Scales,
    Step,
    half,
    stored_elements,
    word32,
    words,
)
from localllm.backends.cpu.simd import I32, Function, Value

Steps = Callable[[Function, Block], Iterator[Step]]


def _nibbles(at: int) -> Steps:
    def steps(f: Function, block: Block) -> Iterator[Step]:
        for word in range(4):
            w = words(f, block, at + 4 * word)
            yield 0, word, w & 15
            yield 0, 4 + word, w >> 4

    return steps


def _nibbles_and_bit(bits: int, at: int) -> Steps:
    """Yield 5-bit values: nibbles from `at`, fifth bits from the int32 at `bits`, rearranged by `_spread_bits`."""

    def steps(f: Function, block: Block) -> Iterator[Step]:
        fifth = word32(f, block, bits)
        for word in range(4):
            w = words(f, block, at + 4 * word)
            for group, nibbles in ((word, w & 15), (4 + word, w >> 4)):
                shifted = fifth << (4 - group) if group < 4 else fifth >> (group - 4)
                yield 0, group, nibbles | f.bits(shifted & 0x10101010, w.type)

    return steps


def _spread_bits(f: Function, bits: Value) -> Value:
    """Move bit k, which belongs to value k = 4 g + i, to bit 8 i + g.

    One shift then brings the bits of a word's four values into their bytes.
    """
    out = f.constant(I32, 0)
    for group in range(8):
        four = (bits >> (4 * group)) & 15
        out = out | (((four * 0x00204081) & 0x01010101) << group)
    return out


def _bytes(f: Function, block: Block) -> Iterator[Step]:
    for word in range(8):
        yield 0, word, words(f, block, 2 + 4 * word) ^ 0x80


def _scale(f: Function, block: Block, group: int) -> Scales:
    return half(f, block, 0), None


def _scale_and_minimum(f: Function, block: Block, group: int) -> Scales:
    m = half(f, block, 2)
    return half(f, block, 0), f.zeros(m.type) - m


def _panel(
    name: str,
    fields: tuple[tuple[int, int], ...],
    offset: int,
    minimum: bool,
    steps: Steps,
    bits: int,
    spread: int = -1,
) -> IntegerPanel:
    """Return a panel. The bits of element `spread` are spread to the bytes of their values."""
    scales = _scale_and_minimum if minimum else _scale

    def elements(f: Function, block: Value) -> Iterator[Value]:
        for number, value in enumerate(stored_elements(f, fields, block)):
            yield _spread_bits(f, value) if number == spread else value

    conversion = Conversion(sum(size * count for size, count in fields), elements) if spread >= 0 else None
    return IntegerPanel(
        name, fields, 32, 32, offset, minimum, steps, scales, (1 << bits) - 1, conversion=conversion
    )  # fmt: skip


Q4_0 = _panel("Q4_0", ((2, 1), (4, 4)), 8, False, _nibbles(2), 4)
Q4_1 = _panel("Q4_1", ((2, 2), (4, 4)), 0, True, _nibbles(4), 4)
Q5_0 = _panel("Q5_0", ((2, 1), (4, 1), (4, 4)), 16, False, _nibbles_and_bit(2, 6), 5, spread=1)
Q5_1 = _panel("Q5_1", ((2, 2), (4, 1), (4, 4)), 0, True, _nibbles_and_bit(4, 8), 5, spread=2)
Q8_0 = _panel("Q8_0", ((2, 1), (4, 8)), 128, False, _bytes, 8)
