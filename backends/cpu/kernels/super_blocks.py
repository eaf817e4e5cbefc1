"""Products of super-blocks: panels whose groups have integer scales, times activation super-blocks of 256 values.

A super-block is summed in integers, including the scales and minimums of its groups, so the sum is exact in any order.
One chain of float32 fused multiply-adds adds up the super-blocks. Packed panels (`direct_block`) and unpacked ones
(`tile`) compute the same integers in different ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from localllm.backends.cpu import dot
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.kernels.common import (
    S_BLOCK,
    S_OFFSET,
    S_OFFSETS_16,
    S_OFFSETS_32,
    S_SCALE,
    S_SUMS_16,
    S_SUMS_32,
    S_VALUES,
    f32x16,
    i32x16,
    lines_ahead,
    read_ahead,
    spread,
)  # fmt: skip
from localllm.backends.cpu.panels import Block, IntegerPanel, SuperScales, u8x64
from localllm.backends.cpu.simd import F32, I32, Function, Value, Variable

VALUES = S_VALUES  # k per call of `tile`
X_BYTES = S_BLOCK  # bytes of activations per call
TOGETHER = 32  # values per iteration of the loop over a folded super-block
BY_GROUP = 4  # rows from which `IntegerPanel.by_group` is faster on Zen 4; with 3, Q6_K is slower and Q3_K faster
SOME = 4  # steps between compiler barriers, if a barrier in every step would be slower


def _scales(panel: IntegerPanel) -> SuperScales:
    assert panel.super_scales is not None
    return panel.super_scales


def _offset_by_pairs(isa: Isa, panel: IntegerPanel) -> bool:
    """Return whether the offset is subtracted like a minimum: AVX2's int16 sums have no room to start with it."""
    return isa.dot == "maddubs" and panel.offset not in (0, 128)


def _start(f: Function, panel: IntegerPanel, x: Value, group: Value | int) -> Value:
    """Return the initial integer sum of a group: -offset * (sum of its activations), or 0 without an offset."""
    offset = panel.offset
    if offset == 0 or _offset_by_pairs(f.isa, panel) or (offset == 128 and not f.isa.biased_needs_offset):
        return f.zeros(i32x16)
    slot, stored = (S_OFFSETS_16, 32) if panel.group == 16 else (S_OFFSETS_32, 128)
    start = f.broadcast(x + group * 4 + slot if isinstance(group, Value) else x + (group * 4 + slot), I32)
    if offset > stored:
        return start << ((offset // stored).bit_length() - 1)
    shift = (stored // offset).bit_length() - 1
    return start.sra(shift) if shift else start


def _pair_sums(f: Function, panel: IntegerPanel, x: Value, number: int) -> Value:
    """Load the sums of activations of groups 2 * `number` and 2 * `number` + 1, as a pair of int16 in every lane."""
    return f.broadcast(x + ((S_SUMS_16 if panel.group == 16 else S_SUMS_32) + 4 * number), I32)


def _pair_factor(f: Function, panel: IntegerPanel, block: Block, number: int) -> Value:
    """Return the factors of the pair sums: minimums, or scales times the offset."""
    factors = []
    for group in (2 * number, 2 * number + 1):
        scale, minimum = _scales(panel).of_group(f, block, group)
        factors.append(scale * panel.offset if minimum is None else minimum)
    return dot.pair_products(*factors)


def _has_pairs(isa: Isa, panel: IntegerPanel) -> bool:
    return panel.minimum or _offset_by_pairs(isa, panel)


def _weigh(
    f: Function, integers: Value, pairs: Value | None, scale: Value, minus: Value | None, x: Value, total: Variable
) -> None:
    """Emit total += activation scale * (scale * integers - minimum * pairs); `minus` is the negated minimum."""
    x_scale = f.broadcast(x + S_SCALE, F32)
    if pairs is not None and minus is None:
        integers = integers - pairs
    if pairs is not None and minus is not None:
        value = f.fma(f.to_float(integers), scale, f.to_float(pairs) * minus)
        total.set(f.fma(value, x_scale, total.get()))
    else:
        total.set(f.fma(f.to_float(integers), scale * x_scale, total.get()))


def rows_per_call(isa: Isa) -> int:
    """Return the maximum rows per call of `direct_block`.

    On Zen 4, 8 rows take as long in one call as in two of 4. With 3, LLVM runs out of registers of 256 bits or less.
    """
    return min(isa.direct_tile, 6 if isa.dot == "vnni512" else 2)


def direct_block(f: Function, panel: IntegerPanel, block: Block, x: Sequence[Value], sums: Sequence[Variable]) -> None:
    """Multiply one block of a panel by the same range of k of every row."""
    scales = _scales(panel)
    weight = cache(lambda group: dot.weight_form(f, scales.of_group(f, block, group)[0]))
    integers: dict[int, list[dot.Sum]] = {}
    totals = [f.zeros(i32x16) for _ in x]
    has_pairs = _has_pairs(f.isa, panel)
    pairs: list[Value | None] = [f.zeros(i32x16) if has_pairs else None for _ in x]
    seen = [0] * panel.groups
    full = panel.group // 4
    # Sum all groups before multiplying the first one by its scale, if there are enough registers for the sums.
    most = 2 if f.isa.dot == "vnni512" else 1
    in_order = panel.in_order and len(x) <= most and f.isa.registers >= 32
    # Several rows need the registers for their sums, but prefetchers still follow only loads in memory order.
    values_in_order = panel.in_order and len(x) > 1 and f.isa.dot == "vnni512"
    # With more rows, even the sums need too many registers if `steps` completes several groups at once.
    by_group = panel.by_group if len(x) >= BY_GROUP and f.isa.dot == "vnni512" else None
    # With fewer registers, spills cost more than in-order reads gain, except for panels stored in reading order.
    some_order = panel.in_order and len(x) == 1 and bool(panel.order) and f.isa.registers >= panel.order_registers
    lines = lines_ahead(f, panel.lines(block), panel.value_bytes, len(x), panel.name)
    words = panel.block_values // 4

    def weigh(group: int) -> None:
        for t, integer in enumerate(integers.pop(group)):
            totals[t] = totals[t] + integer.total()
        if has_pairs and seen[group ^ 1] == full and group ^ 1 not in integers:  # the scales are in registers now
            factor = _pair_factor(f, panel, block, group // 2)
            for t, (pair, row) in enumerate(zip(pairs, x, strict=True)):
                assert pair is not None
                pairs[t] = dot.pairs(f, pair, factor, _pair_sums(f, panel, row, group // 2))

    for number, (group, word, weights) in enumerate((by_group or panel.steps)(f, block)):
        if in_order or values_in_order or by_group or (some_order and number % SOME == 0):
            f.keep_order()
        # prefetches are spread out: a burst of requests would stall
        read_ahead(f, spread(lines, number, words))
        if group not in integers:
            integers[group] = [
                dot.Sum(f, _start(f, panel, row, group), panel.magnitude, lambda group=group: weight(group))  # type: ignore[misc]
                for row in x
            ]
        for row, integer in zip(x, integers[group], strict=True):
            integer.add(weights, dot.broadcast4(f, row + (group * panel.group + 4 * word)))
        seen[group] += 1
        if seen[group] == full and not in_order:
            weigh(group)
    for group in sorted(integers):
        assert seen[group] == full, f"{panel.name}: group {group} is incomplete"
        weigh(group)
    scale, minimum = scales.whole(f, block)
    minus = None if minimum is None else f.zeros(f32x16) - minimum
    for t, row in enumerate(x):
        _weigh(f, totals[t], pairs[t], scale, minus, row, sums[t])


# -- unpacked --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layout:
    """Offsets within an unpacked super-block.

    The super-block's scale comes first, then the factors of the pair sums.
    """

    pairs: int  # one vector per two groups
    scales: int  # one vector per group
    values: int  # one byte per value
    size: int


def _folded(isa: Isa, panel: IntegerPanel) -> bool:
    """Return whether unpacked bytes are already multiplied by the scales of their groups.

    AVX2 does not do this: it can add up more products of small bytes, and multiplies by scales at no cost.
    """
    return panel.folds and isa.dot != "maddubs"


def _layout(isa: Isa, panel: IntegerPanel) -> _Layout:
    pairs = 64 * (1 + panel.minimum)
    scales = pairs + (64 * (panel.groups // 2) if _has_pairs(isa, panel) else 0)
    values = scales + (0 if _folded(isa, panel) else 64 * panel.groups)
    return _Layout(pairs, scales, values, values + 16 * VALUES)


def tile_bytes(isa: Isa, panel: IntegerPanel) -> int:
    """Return the bytes of VALUES unpacked weights for every row of a panel."""
    return _layout(isa, panel).size


def unpack(f: Function, panel: IntegerPanel, source: Block, target: Value) -> None:
    layout, folded = _layout(f.isa, panel), _folded(f.isa, panel)
    whole, minimum = _scales(panel).whole(f, source)
    negative = folded and panel.offset > 0  # q * scale reaches 128 only with one sign, as -128
    f.store(target, f.zeros(f32x16) - whole if negative else whole)
    if minimum is not None:
        f.store(target + 64, f.zeros(f32x16) - minimum)
    if _has_pairs(f.isa, panel):
        for number in range(panel.groups // 2):
            f.store(target + (layout.pairs + 64 * number), _pair_factor(f, panel, source, number))
    if not folded:
        for group in range(panel.groups):
            scale, _ = _scales(panel).of_group(f, source, group)
            f.store(target + (layout.scales + 64 * group), dot.weight_form(f, scale))
    for group, word, weights in panel.steps(f, source):
        if folded:
            scale, _ = _scales(panel).of_group(f, source, group)
            four = f.bits((scale & 0xFF) * 0x01010101, u8x64)
            weights = (f.constant(u8x64, panel.offset) - weights) * four + 128 if negative else weights * four
        f.store(target + (layout.values + 64 * (group * (panel.group // 4) + word)), weights)


def tile(
    f: Function, panel: IntegerPanel, w: Sequence[Value], x: Sequence[Value], sums: Sequence[Sequence[Variable]]
) -> None:
    """Emit sums[t][i] += VALUES unpacked weights of panel i times the activations of row t."""
    layout = _layout(f.isa, panel)
    if _folded(f.isa, panel):
        integers = _folded_integers(f, panel, [v + layout.values for v in w], x)
    else:
        integers = _integers(f, panel, layout, w, x)
    pairs: list[list[Value | None]] = [[None] * len(w) for _ in x]
    if _has_pairs(f.isa, panel):
        totals = [[f.zeros(i32x16) for _ in w] for _ in x]
        for number in range(panel.groups // 2):
            factors = [f.load(v + (layout.pairs + 64 * number), i32x16) for v in w]
            for row, of_row in zip(x, totals, strict=True):
                values = _pair_sums(f, panel, row, number)
                of_row[:] = [dot.pairs(f, total, a, values) for total, a in zip(of_row, factors, strict=True)]
        pairs = [list(of_row) for of_row in totals]
    for i, v in enumerate(w):
        scale = f.load(v, f32x16)
        minus = f.load(v + 64, f32x16) if panel.minimum else None
        for t, row in enumerate(x):
            _weigh(f, integers[t][i].get(), pairs[t][i], scale, minus, row, sums[t][i])


def _folded_integers(f: Function, panel: IntegerPanel, w: Sequence[Value], x: Sequence[Value]) -> list[list[Variable]]:
    biased = panel.offset > 0
    multiply = dot.biased if biased else dot.small
    starts = [
        f.broadcast(row + S_OFFSET, I32) if biased and f.isa.biased_needs_offset else f.zeros(i32x16) for row in x
    ]
    integers = [[f.var(start) for _ in w] for start in starts]
    with f.loop(0, VALUES, TOGETHER) as k:
        for word in range(TOGETHER // 4):
            weights = [f.load(v + (k * 16 + 64 * word), u8x64) for v in w]
            for row, of_row in zip(x, integers, strict=True):
                values = dot.broadcast4(f, row + (k + 4 * word))
                for integer, bytes_ in zip(of_row, weights, strict=True):
                    integer.set(multiply(f, integer.get(), bytes_, values))
    return integers


def _integers(
    f: Function, panel: IntegerPanel, layout: _Layout, w: Sequence[Value], x: Sequence[Value]
) -> list[list[Variable]]:
    integers = [[f.var(f.zeros(i32x16)) for _ in w] for _ in x]
    with f.loop(0, panel.groups) as group:  # one per iteration: with two the compiler interleaves the sums, and spills
        scales = [f.load(v + (group * 64 + layout.scales), i32x16) for v in w]
        starts = [_start(f, panel, row, group) for row in x]
        here = [[dot.Sum(f, s, panel.magnitude, lambda w=w: w) for w in scales] for s in starts]  # type: ignore[misc]
        for word in range(panel.group // 4):
            at = group * (16 * panel.group) + (layout.values + 64 * word)
            weights = [f.load(v + at, u8x64) for v in w]
            for row, groups in zip(x, here, strict=True):
                values = dot.broadcast4(f, row + (group * panel.group + 4 * word))
                for group_sum, bytes_ in zip(groups, weights, strict=True):
                    group_sum.add(bytes_, values)
        for t, groups in enumerate(here):
            for i, group_sum in enumerate(groups):
                integers[t][i].set(integers[t][i].get() + group_sum.total())
    return integers
