"""The mat-mul in products of 16 bits: weights unpacked to int16, activations widened once for a tile of rows.

AVX2 multiplies bytes only where one side has no sign, and its 16 bits hold the sum of two such products if a weight may
be any byte. Two products of 16 bits and their sum are one instruction that never overflows. Unpacking takes off the
offset and multiplies in the integer scale of a super-block's group, so that a group or a super-block is one plain sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from localllm.backends.cpu import dot
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.kernels.common import S_BLOCK, S_SCALE, S_VALUES, X_BLOCK, X_SCALE, X_VALUES, f32x16, i32x16
from localllm.backends.cpu.panels import Block, IntegerPanel, u8x64
from localllm.backends.cpu.simd import F32, I8, I16, I32, LANES, Function, Value, vector

ROWS = 4  # of a tile, by one panel: 8 registers of sums, 2 of weights, 1 of activations, and products on their way
SUMS_BYTES = 64 * ROWS  # of a tile's sums in float32, which wait in memory
LINE = 32  # values of a row that stand together once widened

i16x32 = vector(I16, 32)


def used(isa: Isa, panel: IntegerPanel) -> bool:
    """Whether the mat-mul of a format goes this way: where bytes may be anything (Zen 4, GOP/s in bytes and in pairs:
    Q8_0 218 and 290, IQ4_XS 255 and 331; but Q6_K 386 and 314, MXFP4 337 and 286)."""
    return isa.dot == "maddubs" and panel.offset == 128


def _activations(panel: IntegerPanel) -> tuple[int, int, int]:
    """Of an activation block: its values, its bytes, and where its scale stands. Its values are summed in integers."""
    assert not panel.minimum
    if panel.super_scales is not None:
        return S_VALUES, S_BLOCK, S_SCALE
    assert panel.group == X_VALUES
    return X_VALUES, X_BLOCK, X_SCALE


def tile_bytes(isa: Isa, panel: IntegerPanel) -> int:
    """Bytes of an activation block's unpacked weights of every row of a panel: a scale and two bytes per value."""
    return 4 * LANES + 2 * LANES * _activations(panel)[0]


def panel_bytes(isa: Isa, panel: IntegerPanel, columns: int) -> int:
    """Bytes of a whole unpacked panel."""
    return columns // _activations(panel)[0] * tile_bytes(isa, panel)


def widened_bytes(columns: int) -> int:
    """Bytes of a tile's widened activations."""
    return 2 * ROWS * columns


def unpack(f: Function, panel: IntegerPanel, source: Block, target: Value) -> None:
    values, size = _activations(panel)[0], tile_bytes(f.isa, panel)
    scales = panel.super_scales
    for first in range(0, panel.block_values, values):
        scale, _ = panel.scales(f, source, first // panel.group) if scales is None else scales.whole(f, source)
        f.store(target + first // values * size, scale)

    @cache
    def factor(group: int) -> Value | int:
        if scales is None:
            return 1
        scale, _ = scales.of_group(f, source, group)
        return f.bits(dot.pair(scale, scale), i16x32)

    zeros = f.zeros(u8x64)
    for group, word, weights in panel.steps(f, source):
        k = group * panel.group + 4 * word
        at = k // values * size + 4 * LANES + 2 * LANES * (k % values)
        for half in range(2):  # two of a row's four bytes, each with a zero behind it
            picked = [n for lane in range(LANES) for i in range(2) for n in (4 * lane + 2 * half + i, 64)]
            pairs = f.bits(f.shuffle(weights, zeros, picked), i16x32) - panel.offset
            f.store(target + (at + 64 * half), pairs * factor(group))


def widen(f: Function, panel: IntegerPanel, x: Sequence[Value], blocks: Value, target: Value) -> None:
    """Activations of a tile's rows as int16: LINE values of each row, then the next LINE."""
    values, size, _ = _activations(panel)
    with f.loop(0, blocks) as block:
        for at in range(0, values, LINE):
            for t, row in enumerate(x):
                line = f.widen(f.load(row + block * size + at, vector(I8, LINE)), I16, signed=True)
                f.store(target + block * (2 * values * len(x)) + 2 * (at * len(x) + LINE * t), line)


def tile(
    f: Function, panel: IntegerPanel, w: Value, x: Sequence[Value], widened: Value, blocks: Value, sums: Value
) -> None:
    """float32 x 16 at sums[t] += the unpacked weights of a panel times those of row t."""
    values, size, scale_at = _activations(panel)
    line_bytes = 2 * LINE * len(x)
    with f.loop(0, blocks) as block:
        here = w + block * tile_bytes(f.isa, panel)
        integers = [f.var(f.zeros(i32x16)) for _ in x]
        with f.loop(0, values // LINE) as number:
            line = widened + (block * (values // LINE) + number) * line_bytes
            weights = here + 4 * LANES + number * (2 * LANES * LINE)
            for pair in range(LINE // 2):
                f.keep_order()
                two = f.load(weights + 64 * pair, i32x16)
                for t, integer in enumerate(integers):
                    both = f.broadcast(line + (2 * LINE * t + 4 * pair), I32)
                    integer.set(dot.settled(f, dot.pairs(f, integer.get(), two, both)))
        f.keep_order()
        scale = f.load(here, f32x16)
        for t, (row, integer) in enumerate(zip(x, integers, strict=True)):
            weight = scale * f.broadcast(row + block * size + scale_at, F32)
            total = f.fma(f.to_float(integer.get()), weight, f.load(sums + 64 * t, f32x16))
            f.store(sums + 64 * t, total)
