"""Weight panels: 16 output rows interleaved so that lane = row, one row of a table per weight format.

A matrix (rows, K) becomes ceil(rows / 16) panels, padded to an even count. A panel of an integer format is K/32 blocks, each
16 half-precision scales and then the rows' bytes, four consecutive k of one row to a lane. A panel of a float format is K
vectors of 16. Repacking keeps every bit of the file's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from backends.cpu import dot
from backends.cpu.simd import F32, I8, I16, I32, LANES, Function, Value, vector

u8x64 = vector(I8, 64)
DotStep = tuple[Value, int, Callable[[Function, Value, Value, Value], Value]]


@dataclass(frozen=True, slots=True)
class IntegerPanel:
    """How kernels read one block (32 values of 16 rows) of a quantized format."""

    name: str
    file_block_bytes: int
    block_bytes: int
    offset: int  # the stored byte is q + offset
    offset_always: bool  # the dot product leaves offset * sum(x) on every instruction set, not only on some
    steps: Callable[[Function, Value], Iterator[DotStep]]  # (bytes of 16 rows x 4 k, first k, dot product) of a block
    repack_block: Callable[[Function, Value, Value], None]  # one row's file block -> its lane of the panel block
    read_row: Callable[[Function, Value, Value], Iterator[tuple[int, Value]]]  # (k, int32 x 4) of one lane of a block

    block_values: int = 32

    def panel_bytes(self, columns: int) -> int:
        return columns // self.block_values * self.block_bytes

    def scale(self, f: Function, block: Value) -> Value:
        return f.load_half(block)


def _q4_0_steps(f: Function, block: Value) -> Iterator[DotStep]:
    for group in range(4):
        w = f.load(block + (32 + 64 * group), u8x64)
        yield w & 15, 4 * group, dot.small
        yield w >> 4, 16 + 4 * group, dot.small


def _q4_0_repack(f: Function, source: Value, lane: Value) -> None:
    for group in range(4):
        f.store(lane + (32 + 64 * group), f.load(source + (2 + 4 * group), I32))


def _q4_0_row(f: Function, block: Value, lane: Value) -> Iterator[tuple[int, Value]]:
    for group in range(4):
        w = f.load(block + lane * 4 + (32 + 64 * group), vector(I8, 4))
        yield 4 * group, f.widen(w & 15, I32) - 8
        yield 16 + 4 * group, f.widen(w >> 4, I32) - 8


def _q8_0_steps(f: Function, block: Value) -> Iterator[DotStep]:
    for group in range(8):
        yield f.load(block + (32 + 64 * group), u8x64), 4 * group, dot.biased


def _q8_0_repack(f: Function, source: Value, lane: Value) -> None:
    for group in range(8):
        f.store(lane + (32 + 64 * group), f.load(source + (2 + 4 * group), I32) ^ 0x80808080)


def _q8_0_row(f: Function, block: Value, lane: Value) -> Iterator[tuple[int, Value]]:
    for group in range(8):
        w = f.load(block + lane * 4 + (32 + 64 * group), vector(I8, 4))
        yield 4 * group, f.widen(w, I32) - 128


@dataclass(frozen=True, slots=True)
class FloatPanel:
    """How kernels read 16 weights (one k of 16 rows) of a float format."""

    name: str
    value_bytes: int
    load: Callable[[Function, Value, int], Value]

    block_values: int = 1

    def panel_bytes(self, columns: int) -> int:
        return columns * LANES * self.value_bytes


def _load_f32(f: Function, pointer: Value, lanes: int) -> Value:
    return f.load(pointer, vector(F32, lanes))


INTEGER_PANELS: dict[str, IntegerPanel] = {
    panel.name: panel
    for panel in (
        IntegerPanel("Q4_0", 18, 288, 8, True, _q4_0_steps, _q4_0_repack, _q4_0_row),
        IntegerPanel("Q8_0", 34, 544, 128, False, _q8_0_steps, _q8_0_repack, _q8_0_row),
    )
}
FLOAT_PANELS: dict[str, FloatPanel] = {
    panel.name: panel
    for panel in (
        FloatPanel("F32", 4, _load_f32),
        FloatPanel("F16", 2, lambda f, p, n: f.load_half(p, n)),
        FloatPanel("BF16", 2, lambda f, p, n: f.load_bfloat(p, n)),
    )
}
FORMATS = (*FLOAT_PANELS, *INTEGER_PANELS)


def panel_count(rows: int) -> int:
    """Panels of a matrix, even so that the mat-mul can always take two."""
    return -(-rows // (2 * LANES)) * 2


def panel_of(name: str) -> IntegerPanel | FloatPanel:
    return INTEGER_PANELS.get(name) or FLOAT_PANELS[name]


def half_bits(f: Function, source: Value, target: Value) -> None:
    f.store(target, f.load(source, I16))
