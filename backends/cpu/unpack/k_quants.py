"""Super-blocks of 256 values: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K. Layouts are stated in quant.formats."""

from __future__ import annotations

from collections.abc import Iterator

from backends.cpu.panels import Block, IntegerPanel, Scales, Step, byte, half, words
from backends.cpu.simd import Function, Value


def _six_bits(f: Function, block: Block, at: int, group: int) -> tuple[Value, Value]:
    """6-bit scale and minimum of a group of Q4_K and Q5_K, int32 x 16; `at` is where the 12 bytes start."""
    j = group
    if j < 4:
        return byte(f, block, at + j) & 63, byte(f, block, at + j + 4) & 63
    low = byte(f, block, at + j + 4)
    scale = (low & 15) | ((byte(f, block, at + j - 4) >> 6) << 4)
    minimum = (low >> 4) | ((byte(f, block, at + j) >> 6) << 4)
    return scale, minimum


def _scale_min(f: Function, block: Block, group: int) -> Scales:
    scale, minimum = _six_bits(f, block, 4, group)
    return half(f, block, 0) * f.to_float(scale), half(f, block, 2) * f.to_float(minimum)


def _q4_steps(f: Function, block: Block) -> Iterator[Step]:
    for pair in range(4):
        for word in range(8):
            w = words(f, block, 16 + 32 * pair + 4 * word)
            yield 2 * pair, word, w & 15
            yield 2 * pair + 1, word, w >> 4


def _q5_steps(f: Function, block: Block) -> Iterator[Step]:
    pairs = range(4)
    # All eight groups are summed at once, in the order of reading, where there are registers for them.
    order = ((word, pair) for word in range(8) for pair in pairs)
    if f.isa.registers < 32:
        order = ((word, pair) for pair in pairs for word in range(8))
    highs: dict[int, Value] = {}
    for word, pair in order:
        if word not in highs:
            highs[word] = words(f, block, 16 + 4 * word)
        w = words(f, block, 48 + 32 * pair + 4 * word)
        for group, nibbles in ((2 * pair, w & 15), (2 * pair + 1, w >> 4)):
            yield group, word, nibbles | (((highs[word] >> group) & 1) << 4)


def _q6_steps(f: Function, block: Block) -> Iterator[Step]:
    for half_ in range(2):
        for word in range(8):  # 8 words are 32 bytes: two groups of 16
            high = words(f, block, 128 + 32 * half_ + 4 * word)
            low = [words(f, block, 64 * half_ + 32 * i + 4 * word) for i in range(2)]
            for quarter in range(4):
                nibbles = low[quarter % 2] & 15 if quarter < 2 else low[quarter % 2] >> 4
                bits = (high >> (2 * quarter)) & 3
                group = 8 * half_ + 2 * quarter + word // 4
                yield group, word % 4, nibbles | (bits << 4)


def _q6_scale(f: Function, block: Block, group: int) -> Scales:
    return half(f, block, 208) * f.to_float(byte(f, block, 192 + group, signed=True)), None


def _q2_steps(f: Function, block: Block) -> Iterator[Step]:
    for half_ in range(2):
        for word in range(8):
            w = words(f, block, 16 + 32 * half_ + 4 * word)
            for j in range(4):
                yield 8 * half_ + 2 * j + word // 4, word % 4, (w >> (2 * j)) & 3


def _q2_scale(f: Function, block: Block, group: int) -> Scales:
    packed = byte(f, block, group)
    return half(f, block, 80) * f.to_float(packed & 15), half(f, block, 82) * f.to_float(packed >> 4)


def _q3_steps(f: Function, block: Block) -> Iterator[Step]:
    for word in range(8):
        high = words(f, block, 4 * word)
        for half_ in range(2):
            w = words(f, block, 32 + 32 * half_ + 4 * word)
            for j in range(4):
                bit = (high >> (4 * half_ + j)) & 1
                yield 8 * half_ + 2 * j + word // 4, word % 4, ((w >> (2 * j)) & 3) | (bit << 2)


def _q3_scale(f: Function, block: Block, group: int) -> Scales:
    low = byte(f, block, 96 + group % 8)
    low = low & 15 if group < 8 else low >> 4
    high = (byte(f, block, 104 + group % 4) >> (2 * (group // 4))) & 3
    return half(f, block, 108) * f.to_float((low | (high << 4)) - 32), None


def _as_read(words: int, *starts: int) -> tuple[int, ...]:
    """File offsets of fields that are read side by side: one word of each, then the next."""
    return tuple(start + 4 * word for word in range(words) for start in starts)


Q2_K = IntegerPanel("Q2_K", ((1, 16), (4, 16), (2, 2)), 256, 16, 0, True, _q2_steps, _q2_scale)
Q3_K = IntegerPanel(
    "Q3_K", ((4, 8), (4, 16), (1, 12), (2, 1)), 256, 16, 4, False, _q3_steps, _q3_scale, order=_as_read(8, 0, 32, 64)
)
Q4_K = IntegerPanel("Q4_K", ((2, 2), (1, 12), (4, 32)), 256, 32, 0, True, _q4_steps, _scale_min, in_order=True)
Q5_K = IntegerPanel(
    "Q5_K", ((2, 2), (1, 12), (4, 8), (4, 32)), 256, 32, 0, True, _q5_steps, _scale_min,
    order=_as_read(8, 16, 48, 80, 112, 144), order_registers=32, in_order=True,
)  # fmt: skip
Q6_K = IntegerPanel(
    "Q6_K", ((4, 32), (4, 16), (1, 16), (2, 1)), 256, 16, 32, False, _q6_steps, _q6_scale,
    order=_as_read(8, 128, 0, 32) + _as_read(8, 160, 64, 96), in_order=True,
)  # fmt: skip
