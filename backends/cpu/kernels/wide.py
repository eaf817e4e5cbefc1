"""The mat-mul with 16-bit products. Weights are unpacked to int16, and activations are widened once per tile of rows.

AVX2 multiplies unsigned by signed bytes, and int16 holds the sum of only two such products if a weight may be any byte.
With 16-bit operands, two products and their sum are one instruction that never overflows. Unpacking subtracts the
offset and multiplies by the integer scale of a super-block's group, so that a group or a super-block is one plain sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from localllm.backends.cpu import dot
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.kernels.common import S_BLOCK, S_SCALE, S_VALUES, X_BLOCK, X_SCALE, X_VALUES, f32x16, i32x16
from localllm.backends.cpu.panels import Block, IntegerPanel, u8x64
from localllm.backends.cpu.simd import F32, I8, I16, I32, LANES, Function, Value, vector

ROWS = 4  # rows per tile, with one panel: registers hold 8 sums, 2 weights, 1 activation and products in flight
SUMS_BYTES = 64 * ROWS  # bytes of the float32 sums of a tile, which stay in memory
LINE = 32  # adjacent values of a row after widening

i16x32 = vector(I16, 32)


def used(isa: Isa, panel: IntegerPanel) -> bool:
    """Return whether the mat-mul of a format uses this module: if its weights may be any byte.

    Otherwise products of bytes are faster. GOP/s on Zen 4 with bytes and with 16-bit pairs: Q8_0 218 and 290, IQ4_XS
    255 and 331, but Q6_K 386 and 314, MXFP4 337 and 286.
    """
    return isa.dot == "maddubs" and panel.offset == 128


def _activations(panel: IntegerPanel) -> tuple[int, int, int]:
    """Return an activation block's number of values, its bytes, and the scale's offset.

    A block is summed in integers.
    """
    assert not panel.minimum
    if panel.super_scales is not None:
        return S_VALUES, S_BLOCK, S_SCALE
    assert panel.group == X_VALUES
    return X_VALUES, X_BLOCK, X_SCALE


def tile_bytes(isa: Isa, panel: IntegerPanel) -> int:
    """Return the bytes of a panel's unpacked weights for one activation block: a scale, and two bytes per value."""
    return 4 * LANES + 2 * LANES * _activations(panel)[0]


def panel_bytes(isa: Isa, panel: IntegerPanel, columns: int) -> int:
    """Return the bytes of a whole unpacked panel."""
    return columns // _activations(panel)[0] * tile_bytes(isa, panel)


def widened_bytes(columns: int) -> int:
    """Return the bytes of a tile's widened activations."""
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
        return f.bits(dot.pair_products(scale, scale), i16x32)

    zeros = f.zeros(u8x64)
    for group, word, weights in panel.steps(f, source):
        k = group * panel.group + 4 * word
        at = k // values * size + 4 * LANES + 2 * LANES * (k % values)
        for half in range(2):  # two of each row's four bytes, each followed by a zero byte
            picked = [n for lane in range(LANES) for i in range(2) for n in (4 * lane + 2 * half + i, 64)]
            pairs = f.bits(f.shuffle(weights, zeros, picked), i16x32) - panel.offset
            f.store(target + (at + 64 * half), pairs * factor(group))


def widen(f: Function, panel: IntegerPanel, x: Sequence[Value], blocks: Value, target: Value) -> None:
    """Widen the activations of a tile to int16: LINE values of each row, then the next LINE values of each row."""
    values, size, _ = _activations(panel)
    with f.loop(0, blocks) as block:
        for at in range(0, values, LINE):
            for t, row in enumerate(x):
                line = f.widen(f.load(row + block * size + at, vector(I8, LINE)), I16, signed=True)
                f.store(target + block * (2 * values * len(x)) + 2 * (at * len(x) + LINE * t), line)


def tile(
    f: Function, panel: IntegerPanel, w: Value, x: Sequence[Value], widened: Value, blocks: Value, sums: Value
) -> None:
    """Emit sums[t] (float32 x 16) += a panel's unpacked weights times the activations of row t."""
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
