"""Super-blocks of 256 values: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K. `quant.formats` defines the layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from localllm.backends.cpu.panels import SUPER_BLOCK, Block, IntegerPanel, Scales, Step, SuperScales, byte, half, words
from localllm.backends.cpu.simd import Function, Value


def _six_bits(f: Function, block: Block, group: int) -> Scales:
    """Return the 6-bit scale and minimum of a group of Q4_K or Q5_K. Their 12 bytes start at offset 4."""
    at, j = 4, group
    if j < 4:
        return byte(f, block, at + j) & 63, byte(f, block, at + j + 4) & 63
    low = byte(f, block, at + j + 4)
    scale = (low & 15) | ((byte(f, block, at + j - 4) >> 6) << 4)
    minimum = (low >> 4) | ((byte(f, block, at + j) >> 6) << 4)
    return scale, minimum


def _halves(at: int, minimum_at: int | None = None) -> Callable[[Function, Block], Scales]:
    """Return a function that loads a block's scale and minimum, half-precision values at these offsets."""

    def whole(f: Function, block: Block) -> Scales:
        return half(f, block, at), None if minimum_at is None else half(f, block, minimum_at)

    return whole


def _q4_steps(f: Function, block: Block) -> Iterator[Step]:
    for pair in range(4):
        for word in range(8):
            w = words(f, block, 16 + 32 * pair + 4 * word)
            yield 2 * pair, word, w & 15
            yield 2 * pair + 1, word, w >> 4


def _q5_steps(f: Function, block: Block) -> Iterator[Step]:
    pairs = range(4)
    # Sum all eight groups at once, in reading order, if there are enough registers.
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
    return byte(f, block, 192 + group, signed=True), None


def _q2_steps(f: Function, block: Block) -> Iterator[Step]:
    for half_ in range(2):
        for word in range(8):
            w = words(f, block, 16 + 32 * half_ + 4 * word)
            for j in range(4):
                yield 8 * half_ + 2 * j + word // 4, word % 4, (w >> (2 * j)) & 3


def _q2_scale(f: Function, block: Block, group: int) -> Scales:
    packed = byte(f, block, group)
    return packed & 15, packed >> 4


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
    return (low | (high << 4)) - 32, None


def _as_read(words: int, *starts: int) -> tuple[int, ...]:
    """Return the GGUF offsets of fields that are read in alternation, one word of each field at a time."""
    return tuple(start + 4 * word for word in range(words) for start in starts)


def _panel(
    name: str, fields: tuple[tuple[int, int], ...], group: int, offset: int, bits: int,
    steps: Callable[[Function, Block], Iterator[Step]], scales: SuperScales, folds: bool = False,
    order: tuple[int, ...] = (), order_registers: int = 0, in_order: bool = False,
) -> IntegerPanel:  # fmt: skip
    return IntegerPanel(
        name, fields, SUPER_BLOCK, group, offset, offset == 0, steps, scales.product, (1 << bits) - 1, scales, folds,
        order=order, order_registers=order_registers, in_order=in_order,
    )  # fmt: skip


Q2_K = _panel(
    "Q2_K", ((1, 16), (4, 16), (2, 2)), 16, 0, 2, _q2_steps, SuperScales(_halves(80, 82), _q2_scale), folds=True
)
Q3_K = _panel(
    "Q3_K", ((4, 8), (4, 16), (1, 12), (2, 1)), 16, 4, 3, _q3_steps, SuperScales(_halves(108), _q3_scale), folds=True,
    order=_as_read(8, 0, 32, 64),
)  # fmt: skip
Q4_K = _panel(
    "Q4_K", ((2, 2), (1, 12), (4, 32)), 32, 0, 4, _q4_steps, SuperScales(_halves(0, 2), _six_bits), in_order=True
)
Q5_K = _panel(
    "Q5_K", ((2, 2), (1, 12), (4, 8), (4, 32)), 32, 0, 5, _q5_steps, SuperScales(_halves(0, 2), _six_bits),
    order=_as_read(8, 16, 48, 80, 112, 144), order_registers=32, in_order=True,
)  # fmt: skip
Q6_K = _panel(
    "Q6_K", ((4, 32), (4, 16), (1, 16), (2, 1)), 16, 32, 6, _q6_steps, SuperScales(_halves(208), _q6_scale),
    order=_as_read(8, 128, 0, 32) + _as_read(8, 160, 64, 96), in_order=True,
)  # fmt: skip
