"""Formats whose panels hold indices of a codebook's points: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.

`quant.formats` defines the layouts, and `points` looks up the points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

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
    u8x64,
    word32,
    words,
)
from localllm.backends.cpu.simd import Function, Value
from localllm.backends.cpu.unpack.points import (
    CENTRE,
    Index,
    fields_of,
    signed_steps,
    signs_of_codes,
)


def _nibble(f: Function, block: Block, at: int, number: int) -> Value:
    return (byte(f, block, at + number // 2) >> (4 * (number % 2))) & 15


def _iq2_xxs_steps(f: Function, block: Block) -> Iterator[Step]:
    def signs(group: int) -> Value:
        return signs_of_codes(f, fields_of(f, word32(f, block, 6 + 8 * group), (0, 7, 14, 21), 0x7F))

    return signed_steps(f, "IQ2XXS", 32, lambda group: (words(f, block, 2 + 8 * group), None), signs)


def _iq2_xs_steps(f: Function, block: Block) -> Iterator[Step]:
    def bytes_(four: int, number: int) -> Value:
        """Return byte `number` of four words of every row."""
        pairs = words(f, block, 2 + 8 * four), words(f, block, 6 + 8 * four)
        order = [n // 4 * 4 + n % 2 * 2 + number + (64 if n % 4 > 1 else 0) for n in range(64)]
        return f.shuffle(*pairs, order)

    def signs(four: int) -> Value:
        codes = (f.bits(bytes_(four, 1), i32x16) >> 1) & 0x7F7F7F7F
        return signs_of_codes(f, f.bits(codes, u8x64))

    return signed_steps(f, "IQ2XS", 16, lambda four: (bytes_(four, 0), bytes_(four, 1) & 1), signs)


def _iq2_s_steps(f: Function, block: Block) -> Iterator[Step]:
    def index(four: int) -> Index:
        starts = [four % 4 * 8 + 2 * n for n in range(4)]
        high = fields_of(f, word32(f, block, 66 + four // 4 * 4), starts, 3)
        return words(f, block, 2 + 4 * four), high

    return signed_steps(f, "IQ2S", 16, index, lambda group: words(f, block, 34 + 4 * group))


def _iq3_xxs_steps(f: Function, block: Block, strided: bool = False) -> Iterator[Step]:
    def signs(group: int) -> Value:
        return signs_of_codes(f, fields_of(f, word32(f, block, 66 + 4 * group), (0, 7, 14, 21), 0x7F))

    return signed_steps(f, "IQ3XXS", 32, lambda four: (words(f, block, 2 + 4 * four), None), signs, strided)


def _iq3_s_steps(f: Function, block: Block, strided: bool = False) -> Iterator[Step]:
    def index(four: int) -> Index:
        starts = [four % 8 * 4 + n for n in range(4)]
        ninth = fields_of(f, word32(f, block, 66 + four // 8 * 4), starts, 1)
        return words(f, block, 2 + 4 * four), ninth

    return signed_steps(f, "IQ3S", 32, index, lambda group: words(f, block, 74 + 4 * group), strided)


def odd_scales(
    factor: float,
    s: Callable[[Function, Block, int], Value],
    d: Callable[[Function, Block], Value] = lambda f, block: half(f, block, 0),
) -> SuperScales:
    """Return the scales of formats whose group scales are odd: value = d * factor * (2 s + 1) * q."""

    def whole(f: Function, block: Block) -> Scales:
        return d(f, block) * factor, None

    def of_group(f: Function, block: Block, group: int) -> Scales:
        return (s(f, block, group) << 1) | 1, None

    return SuperScales(whole, of_group)


def _panel(
    name: str, fields: tuple[tuple[int, int], ...], group: int, steps: Callable[[Function, Block], Iterator[Step]],
    scales: SuperScales, strided: Callable[..., Iterator[Step]] | None = None,
    order: tuple[int, ...] = (), direct_rows: int = 4,
) -> IntegerPanel:  # fmt: skip
    # Sum in integers if float operations would dominate otherwise (Zen 4, decode: IQ2_S becomes 1.4 times as fast).
    in_integers = scales if group == 16 else None
    return IntegerPanel(
        name, fields, SUPER_BLOCK, group, CENTRE, False, steps, scales.product, super_scales=in_integers,
        direct_rows=(direct_rows, 1),  # with 16 registers, lookups leave few for the sums of more rows
        strided=None if strided is None else partial(strided, strided=True), order=order,
    )  # fmt: skip


def _in_turn(first: int, signs: int, points: int, rest: int = 0) -> tuple[int, ...]:
    """Return the offsets of the 4-byte elements in reading order: for each group of 32 values, point indices and signs.

    If the rest of the indices begins at `rest`, it has one element for four groups.
    """
    found: list[int] = []
    for group in range(8):
        found += [rest + group] if rest and group % 4 == 0 else []
        found += [signs + 4 * group, *range(first + points * group, first + points * (group + 1), 4)]
    return tuple(found)


IQ2_XXS = _panel(
    "IQ2_XXS", ((2, 1), (4, 16)), 32, _iq2_xxs_steps,
    odd_scales(0.125, lambda f, block, group: word32(f, block, 2 + 8 * group + 4) >> 28),
)  # fmt: skip
IQ2_XS = _panel(
    "IQ2_XS", ((2, 1), (4, 16), (1, 8)), 16, _iq2_xs_steps,
    odd_scales(0.125, lambda f, block, group: _nibble(f, block, 66, group)), direct_rows=3,
)  # fmt: skip
IQ2_S = _panel(
    "IQ2_S",
    ((2, 1), (4, 18), (1, 8)),
    16,
    _iq2_s_steps,
    odd_scales(0.125, lambda f, block, group: _nibble(f, block, 74, group)),
    order=_in_turn(2, 34, points=4, rest=66),
    direct_rows=3,
)
IQ3_XXS = _panel(
    "IQ3_XXS", ((2, 1), (4, 24)), 32, _iq3_xxs_steps,
    odd_scales(0.25, lambda f, block, group: word32(f, block, 66 + 4 * group) >> 28), strided=_iq3_xxs_steps,
    order=_in_turn(2, 66, points=8),
)  # fmt: skip
IQ3_S = _panel(
    "IQ3_S",
    ((2, 1), (4, 26), (1, 4)),
    32,
    _iq3_s_steps,
    odd_scales(1.0, lambda f, block, group: _nibble(f, block, 106, group)),
    strided=_iq3_s_steps,
    order=_in_turn(2, 74, points=8, rest=66),
)
