"""Super-blocks of 256 values: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K. `quant.formats` defines the layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product

from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.panels import SUPER_BLOCK, Block, IntegerPanel, Scales, Step, SuperScales, byte, half, words
from localllm.backends.cpu.simd import Function, Value

Load = Callable[[int], Value]  # loads four bytes of every row at an offset of the GGUF block
WordOf = Callable[[Load, int, int], Value]  # returns the integers of (group, word)
Order = Callable[[Isa], Iterable[tuple[int, int]]]  # every (group, word) once


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


def _q4(load: Load, group: int, word: int) -> Value:
    w = load(16 + 32 * (group // 2) + 4 * word)
    return w >> 4 if group % 2 else w & 15


def _q4_order(isa: Isa) -> Iterable[tuple[int, int]]:
    return ((2 * pair + high, word) for pair in range(4) for word in range(8) for high in range(2))


def _q5(load: Load, group: int, word: int) -> Value:
    high, w = load(16 + 4 * word), load(48 + 32 * (group // 2) + 4 * word)
    nibbles = w >> 4 if group % 2 else w & 15
    return nibbles | (((high >> group) & 1) << 4)


def _q5_order(isa: Isa) -> Iterable[tuple[int, int]]:
    if isa.registers < 32:
        return _q4_order(isa)
    # Sum all eight groups at once, in reading order, if there are enough registers.
    return ((group, word) for word in range(8) for group in range(8))


def _q6(load: Load, group: int, word: int) -> Value:
    half_, quarter, word = group // 8, group % 8 // 2, group % 2 * 4 + word  # 8 words are 32 bytes: two groups of 16
    high, low = load(128 + 32 * half_ + 4 * word), load(64 * half_ + 32 * (quarter % 2) + 4 * word)
    nibbles = low & 15 if quarter < 2 else low >> 4
    return nibbles | (((high >> (2 * quarter)) & 3) << 4)


def _q6_order(isa: Isa) -> Iterable[tuple[int, int]]:
    numbers = product(range(2), range(8), range(4))
    return ((8 * half_ + 2 * quarter + word // 4, word % 4) for half_, word, quarter in numbers)


def _q6_scale(f: Function, block: Block, group: int) -> Scales:
    return byte(f, block, 192 + group, signed=True), None


def _q2(load: Load, group: int, word: int) -> Value:
    half_, j, word = group // 8, group % 8 // 2, group % 2 * 4 + word
    return (load(16 + 32 * half_ + 4 * word) >> (2 * j)) & 3


def _q2_scale(f: Function, block: Block, group: int) -> Scales:
    packed = byte(f, block, group)
    return packed & 15, packed >> 4


def _q3(load: Load, group: int, word: int) -> Value:
    half_, j, word = group // 8, group % 8 // 2, group % 2 * 4 + word
    high, w = load(4 * word), load(32 + 32 * half_ + 4 * word)
    bit = (high >> (4 * half_ + j)) & 1
    return ((w >> (2 * j)) & 3) | (bit << 2)


def _q3_order(isa: Isa) -> Iterable[tuple[int, int]]:
    numbers = product(range(8), range(2), range(4))
    return ((8 * half_ + 2 * j + word // 4, word % 4) for word, half_, j in numbers)


def _q3_scale(f: Function, block: Block, group: int) -> Scales:
    low = byte(f, block, 96 + group % 8)
    low = low & 15 if group < 8 else low >> 4
    high = (byte(f, block, 104 + group % 4) >> (2 * (group // 4))) & 3
    return (low | (high << 4)) - 32, None


def _as_read(words: int, *starts: int) -> tuple[int, ...]:
    """Return the GGUF offsets of fields that are read in alternation, one word of each field at a time."""
    return tuple(start + 4 * word for word in range(words) for start in starts)


def _steps(word_of: WordOf, order: Order) -> Callable[[Function, Block], Iterator[Step]]:
    """Return steps in this order. Every word of the block is loaded once."""

    def steps(f: Function, block: Block) -> Iterator[Step]:
        load = cache(lambda at: words(f, block, at))
        for group, word in order(f.isa):
            yield group, word, word_of(load, group, word)

    return steps


def _steps_by_group(word_of: WordOf, size: int) -> Callable[[Function, Block], Iterator[Step]]:
    """Return steps that complete one group of `size` values after the other, and load a word for each group in it."""

    def steps(f: Function, block: Block) -> Iterator[Step]:
        for group in range(SUPER_BLOCK // size):
            for word in range(size // 4):
                yield group, word, word_of(lambda at: words(f, block, at), group, word)

    return steps


def _panel(
    name: str, fields: tuple[tuple[int, int], ...], group: int, offset: int, bits: int, word_of: WordOf,
    reading: Order, scales: SuperScales, folds: bool = False, order: tuple[int, ...] = (), order_registers: int = 0,
    in_order: bool = False, at_once: int = 8,
) -> IntegerPanel:  # fmt: skip
    """Return a panel. `reading` sums `at_once` groups at a time."""
    return IntegerPanel(
        name, fields, SUPER_BLOCK, group, offset, offset == 0, _steps(word_of, reading), scales.product,
        (1 << bits) - 1, scales, folds, order=order, order_registers=order_registers, in_order=in_order,
        by_group=_steps_by_group(word_of, group) if at_once > 2 else None,
    )  # fmt: skip


Q2_K = _panel(
    "Q2_K", ((1, 16), (4, 16), (2, 2)), 16, 0, 2, _q2, _q6_order, SuperScales(_halves(80, 82), _q2_scale), folds=True,
)  # fmt: skip
Q3_K = _panel(
    "Q3_K", ((4, 8), (4, 16), (1, 12), (2, 1)), 16, 4, 3, _q3, _q3_order, SuperScales(_halves(108), _q3_scale),
    folds=True, order=_as_read(8, 0, 32, 64),
)  # fmt: skip
Q4_K = _panel(
    "Q4_K", ((2, 2), (1, 12), (4, 32)), 32, 0, 4, _q4, _q4_order, SuperScales(_halves(0, 2), _six_bits),
    in_order=True, at_once=2,
)  # fmt: skip
Q5_K = _panel(
    "Q5_K", ((2, 2), (1, 12), (4, 8), (4, 32)), 32, 0, 5, _q5, _q5_order, SuperScales(_halves(0, 2), _six_bits),
    order=_as_read(8, 16, 48, 80, 112, 144), order_registers=32, in_order=True,
)  # fmt: skip
Q6_K = _panel(
    "Q6_K", ((4, 32), (4, 16), (1, 16), (2, 1)), 16, 32, 6, _q6, _q6_order, SuperScales(_halves(208), _q6_scale),
    order=_as_read(8, 128, 0, 32) + _as_read(8, 160, 64, 96), in_order=True,
)  # fmt: skip
