"""Weight panels: 16 output rows interleaved so that lane = row, in as many bytes as the file has.

A matrix (rows, K) becomes ceil(rows / 16) panels, padded to an even count. A panel of a quantized format is a run of
blocks, each the file's blocks of 16 rows: every field of the file block in the file's order, every element of a field
16 times, once per row. A field of quantized values has elements of 4 bytes, so that one register holds four
consecutive bytes of each row. A panel of a float format is K vectors of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from backends.cpu.simd import F32, I8, I16, I32, LANES, Function, Value, vector

u8x64 = vector(I8, 64)
f32x16 = vector(F32)
i32x16 = vector(I32)

Step = tuple[int, int, Value]  # group, word in the group, bytes of 16 rows x 4 values
Scales = tuple[Value, Value | None]  # value = scale * q - minimum, each float32 x 16


@dataclass(frozen=True, slots=True)
class IntegerPanel:
    """How kernels read one block of a quantized format: integers in groups that share a scale.

    `steps` yields the block's integers u8 (16 rows x 4 values) in any order; `scales` those of one group.
    q = byte - offset.
    """

    name: str
    fields: tuple[tuple[int, int], ...]  # (element bytes, elements) of the file block, in order
    block_values: int
    group: int  # values that share a scale: 16 or 32
    offset: int  # 128: bytes may be anything; less: bytes stay below 128
    minimum: bool  # whether `scales` has a minimum
    steps: Callable[[Function, Value], Iterator[Step]]
    scales: Callable[[Function, Value, int], Scales]
    repack_word: Callable[[Function, Value], Value] | None = None  # rearranges an int32 of the field `repack_field`
    repack_field: int = -1

    @property
    def file_block_bytes(self) -> int:
        return sum(size * count for size, count in self.fields)

    @property
    def block_bytes(self) -> int:
        return LANES * self.file_block_bytes

    @property
    def groups(self) -> int:
        return self.block_values // self.group

    def panel_bytes(self, columns: int) -> int:
        return columns // self.block_values * self.block_bytes

    def tile_bytes(self, columns: int) -> int:
        """Bytes of one panel unpacked for the mat-mul: per group a scale, maybe a minimum, and a byte per value."""
        return columns // self.group * self.tile_group_bytes

    @property
    def tile_group_bytes(self) -> int:
        return 64 * (1 + self.minimum) + LANES * self.group


@dataclass(frozen=True, slots=True)
class FloatPanel:
    """How kernels read 16 weights (one k of 16 rows) of a float format."""

    name: str
    value_bytes: int
    load: Callable[[Function, Value, int], Value]

    block_values: int = 1

    def panel_bytes(self, columns: int) -> int:
        return columns * LANES * self.value_bytes


# -- reading fields, for the unpackers: offsets are those of the file block ------------------------------------------


def words(f: Function, block: Value, offset: int) -> Value:
    """Four bytes of every row: u8 x 64."""
    return f.load(block + LANES * offset, u8x64)


def word32(f: Function, block: Value, offset: int) -> Value:
    """Four bytes of every row as one int32 x 16."""
    return f.load(block + LANES * offset, i32x16)


def byte(f: Function, block: Value, offset: int, signed: bool = False) -> Value:
    """A byte of every row as int32 x 16."""
    return f.widen(f.load(block + LANES * offset, vector(I8)), I32, signed)


def half(f: Function, block: Value, offset: int) -> Value:
    """A half-precision number of every row as float32 x 16."""
    return f.load_half(block + LANES * offset)


def short(f: Function, block: Value, offset: int) -> Value:
    """An unsigned 16-bit number of every row as int32 x 16."""
    return f.widen(f.load(block + LANES * offset, vector(I16)), I32)


def panel_count(rows: int) -> int:
    """Panels of a matrix, even so that the mat-mul can always take two."""
    return -(-rows // (2 * LANES)) * 2
