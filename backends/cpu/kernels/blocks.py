"""Products of blocks: panels of quantized weights times activation blocks of 32 values, group by group.

The integer sum of a group is exact. One chain of float32 fused multiply-adds, in order of k, adds up the groups. Packed
panels (`direct_block`) and unpacked ones (`tile`) run the same chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.backends.cpu import dot
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.kernels.common import (
    X_BLOCK,
    X_OFFSET,
    X_OFFSET_HALF,
    X_SCALE,
    X_SUM,
    X_VALUES,
    f32x16,
    i32x16,
    lines_ahead,
    read_ahead,
    spread,
)  # fmt: skip
from localllm.backends.cpu.panels import STRIDED, Block, IntegerPanel, u8x64
from localllm.backends.cpu.simd import F32, I8, I32, LANES, Function, Value, Variable, vector

VALUES = X_VALUES  # k per call of `tile`
X_BYTES = X_BLOCK  # bytes of activations per call


def _x_at(k: int) -> int:
    """Return the byte offset of value k in a row of activation blocks."""
    return k // X_VALUES * X_BLOCK + k % X_VALUES


def _start(f: Function, panel_offset: int, group: int, x: Value, k: int) -> Value:
    """Return the initial integer sum of the group at k: -offset * (sum of its activations), or 0 without an offset."""
    if panel_offset == 0 or (panel_offset == 128 and not f.isa.biased_needs_offset):
        return f.zeros(i32x16)
    slot = X_OFFSET if group == X_VALUES else X_OFFSET_HALF + k % X_VALUES // 4
    sum128 = f.load(x + (k // X_VALUES * X_BLOCK + slot), I32, 4)
    shift = (128 // panel_offset).bit_length() - 1
    return f.splat(sum128.sra(shift) if shift else sum128)


def _weigh(
    f: Function, integers: Value, scale: Value, minimum: Value | None, group: int, x: Value, k: int, total: Variable
) -> None:
    """Emit total += scale * activation scale * integers - minimum * (sum of activations)."""
    block = x + k // X_VALUES * X_BLOCK
    x_scale = f.broadcast(block + X_SCALE, F32)
    value = f.fma(f.to_float(integers), scale * x_scale, total.get())
    if minimum is not None:
        if group == X_VALUES:
            x_sum = f.broadcast(block + X_SUM, F32)
        else:  # for half groups, a block stores only integer sums
            sum128 = f.broadcast(block + (X_OFFSET_HALF + k % X_VALUES // 4), I32)
            x_sum = f.to_float(sum128) * (x_scale * (-1.0 / 128.0))
        value = f.fma(f.zeros(f32x16) - minimum, x_sum, value)
    total.set(value)


def _strided(f: Function, x: Value, count: int) -> Value:
    """Copy `count` values of a row in the order of `IntegerPanel.strided`. Return the address of the copy."""
    copy, order = f.buffer(count), [n // STRIDED * STRIDED + n % 4 * 4 + n % STRIDED // 4 for n in range(X_VALUES)]
    for k in range(0, count, X_VALUES):
        values = f.load(x + _x_at(k), vector(I8, X_VALUES))
        f.store(copy + k, f.shuffle(values, values, order))
    return copy


def rows_per_call(isa: Isa) -> int:
    """Return the maximum rows per call of `direct_block`."""
    return isa.direct_tile


def direct_block(f: Function, panel: IntegerPanel, block: Block, x: Sequence[Value], sums: Sequence[Variable]) -> None:
    """Multiply one block of a panel by the same range of k of every row. Add the groups in order of k."""
    integers: dict[tuple[int, int], dot.Sum] = {}
    seen = [0] * panel.groups
    due = 0
    lines = lines_ahead(f, panel.lines(block), panel.value_bytes, len(x), panel.name)
    words = panel.block_values // 4
    steps, strided = panel.direct_steps(f.isa)
    values = [_strided(f, row, panel.block_values) for row in x] if strided else []
    if strided:
        f.keep_order()  # otherwise the compiler shuffles registers instead of loading from the copy
    # The compiler loads the scales first, although they follow the values in memory, and prefetchers lose the stream:
    # 2, 3 and 4 rows of Q8_0 take 1.26, 1.27 and 1.28 of one row, and 1.06, 1.16 and 1.13 in order.
    in_order = len(x) > 1 and panel.value_bytes > 1 and f.isa.dot == "vnni512"
    for number, (group, word, weights) in enumerate(steps(f, block)):
        if in_order:
            f.keep_order()
        # prefetches are spread out: a burst of requests would stall
        read_ahead(f, spread(lines, number, words))
        k = group * panel.group
        for t, row in enumerate(x):
            if (group, t) not in integers:
                integers[group, t] = dot.Sum(f, _start(f, panel.offset, panel.group, row, k), panel.magnitude)
            at = values[t] + (k + 4 * word) if strided else row + _x_at(k + 4 * word)
            integers[group, t].add(weights, dot.broadcast4(f, at))
        seen[group] += 1
        while due < panel.groups and seen[due] == panel.group // 4:
            scale, minimum = panel.scales(f, block, due)
            for t, row in enumerate(x):
                integer = integers.pop((due, t)).total()
                _weigh(f, integer, scale, minimum, panel.group, row, due * panel.group, sums[t])
            due += 1
    assert due == panel.groups, f"{panel.name}: group {due} is incomplete"


# -- unpacked: per group a scale and, if the format has one, a minimum; per value a byte ------------------------------


def _tile_offset(isa: Isa, panel: IntegerPanel) -> int:
    """Return the offset of unpacked bytes: 128 if any byte value can be multiplied, otherwise the format's offset."""
    return 128 if isa.biased_needs_offset else panel.offset


def _header(panel: IntegerPanel) -> int:
    return 64 * (1 + panel.minimum)


def _group_bytes(panel: IntegerPanel) -> int:
    return _header(panel) + LANES * panel.group


def tile_bytes(isa: Isa, panel: IntegerPanel) -> int:
    """Return the bytes of VALUES unpacked weights for every row of a panel."""
    return VALUES // panel.group * _group_bytes(panel)


def unpack(f: Function, panel: IntegerPanel, source: Block, target: Value) -> None:
    for group in range(panel.groups):
        for i, number in enumerate(panel.scales(f, source, group)):
            if number is not None:
                f.store(target + (group * _group_bytes(panel) + 64 * i), number)
    add = _tile_offset(f.isa, panel) - panel.offset
    for group, word, weights in panel.steps(f, source):
        at = group * _group_bytes(panel) + _header(panel) + 64 * word
        f.store(target + at, weights + add if add else weights)


def tile(
    f: Function, panel: IntegerPanel, w: Sequence[Value], x: Sequence[Value], sums: Sequence[Sequence[Variable]]
) -> None:
    """Emit sums[t][i] += VALUES unpacked weights of panel i times the activations of row t."""
    for group in range(VALUES // panel.group):
        _tile_group(f, panel, [v + group * _group_bytes(panel) for v in w], x, group * panel.group, sums)


def _tile_group(
    f: Function, panel: IntegerPanel, w: Sequence[Value], x: Sequence[Value], k: int, sums: Sequence[Sequence[Variable]]
) -> None:
    offset, header = _tile_offset(f.isa, panel), _header(panel)
    magnitude = dot.BIASED if offset == 128 else panel.magnitude
    starts = [_start(f, offset, panel.group, row, k) for row in x]
    integers = [[dot.Sum(f, start, magnitude) for _ in w] for start in starts]
    # Otherwise LLVM works row by row and spills the weights. Spilling is still faster if registers must hold more than
    # int16 sums.
    in_order = f.isa.dot == "maddubs" and dot.shorts(magnitude) >= panel.group // 4 and not panel.minimum
    for word in range(panel.group // 4):
        if in_order:
            f.keep_order()
        weights = [f.load(v + (header + 64 * word), u8x64) for v in w]
        for row, of_row in zip(x, integers, strict=True):
            values = dot.broadcast4(f, row + _x_at(k + 4 * word))
            for integer, bytes_ in zip(of_row, weights, strict=True):
                integer.add(bytes_, values)
    for i, v in enumerate(w):
        scale = f.load(v, f32x16)
        minimum = f.load(v + 64, f32x16) if panel.minimum else None
        for t, row in enumerate(x):
            _weigh(f, integers[t][i].total(), scale, minimum, panel.group, row, k, sums[t][i])
