"""Weight panels (repacked weights): 16 output rows interleaved so that lane = row.

Panels have the size of the GGUF, except for formats with a `Conversion`, which store other fields.

A matrix (rows, K) becomes ceil(rows / 16) panels, padded to an even count. A panel of a quantized format is a run of
blocks. Each block interleaves the GGUF blocks of 16 rows: every element of every field occurs 16 times, once per row. A
field of quantized values has elements of 4 bytes, so that one register holds four consecutive bytes of each row. If the
smaller elements of a block do not fill whole cache lines, a few blocks share the lines. The 4-byte elements are stored
in reading order. So memory is read sequentially, and no vector load crosses a cache line (Q6_K on Zen 4: 30 GB/s; 15
GB/s in the GGUF's order). Formats whose decode speed is limited by memory are also loaded in exactly that order
(`in_order`): prefetchers lose a stream whose loads the compiler has reordered. A panel of a float format is K vectors
of 16; of BF16, K / 2 vectors of 16 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.memory import LINE
from localllm.backends.cpu.simd import F32, I8, I16, I32, LANES, Function, Value, vector

u8x64 = vector(I8, 64)
f32x16 = vector(F32)
i32x16 = vector(I32)

Step = tuple[int, int, Value]  # group, word within the group, bytes of 16 rows x 4 values
Scales = tuple[Value, Value | None]  # value = scale * q - minimum, each float32 x 16
SUPER_BLOCK = 256
STRIDED = 16  # values of a row that `IntegerPanel.strided` yields in steps of every fourth value


class Activations(Enum):
    """The activation formats other than float32."""

    BLOCKS = auto()  # blocks of 32 int8 values that share a scale
    SUPER_BLOCKS = auto()  # super-blocks of 256 int8 values that share a scale
    BFLOATS = auto()  # values rounded to BF16


@dataclass(frozen=True, slots=True)
class Block:
    """The addresses of one block of a panel: of its 4-byte elements, and of its smaller elements."""

    wide: Value
    narrow: Value
    places: dict[int, int]  # offset in the GGUF block -> offset among elements of the same kind, in bytes of one row

    def at(self, offset: int, size: int) -> Value:
        """Return the address of the 16 elements of `size` bytes that are at `offset` in the GGUF block."""
        return (self.wide if size == 4 else self.narrow) + LANES * self.places[offset]


@dataclass(frozen=True, slots=True)
class SuperScales:
    """Two levels of scales: value = whole[0] * (of_group[0] * q) - whole[1] * of_group[1]."""

    whole: Callable[[Function, Block], Scales]  # float32 x 16: the super-block's scale and minimum
    of_group: Callable[[Function, Block, int], Scales]  # int32 x 16 holding 8 bits: signed scales, unsigned minimums

    def product(self, f: Function, block: Block, group: int) -> Scales:
        """Multiply both levels of scales, as the format defines its values."""
        (d, d_minimum), (scale, minimum) = self.whole(f, block), self.of_group(f, block, group)
        if d_minimum is None or minimum is None:
            return d * f.to_float(scale), None
        return d * f.to_float(scale), d_minimum * f.to_float(minimum)


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a block of the GGUF becomes the elements of a panel, if they are not the same."""

    block_bytes: int  # of the GGUF
    elements: Callable[[Function, Value], Iterator[Value]]  # the elements of `fields`, from the address of a block


@dataclass(frozen=True, slots=True)
class IntegerPanel:
    """How kernels read one block of a quantized format: integers in groups that share a scale.

    `steps` yields the block's integers u8 (16 rows x 4 values) in any order. `scales` returns the scales of one group.
    q = byte - offset. With `super_scales`, a block of 256 values is summed in integers, and the activations of the
    block also share one scale.
    """

    name: str
    fields: tuple[tuple[int, int], ...]  # (element bytes, elements) of the block's fields, in order
    block_values: int
    group: int  # values that share a scale: 16 or 32
    offset: int  # 128: all bytes are possible; less: bytes are at most `largest`
    minimum: bool  # whether `scales` has a minimum
    steps: Callable[[Function, Block], Iterator[Step]]
    scales: Callable[[Function, Block, int], Scales]
    largest: int = 127
    super_scales: SuperScales | None = None
    folds: bool = False  # q times its group's scale fits a byte: 0..127 without an offset, -128..127 with an offset
    # Up to this number of rows multiply packed bytes, and more are unpacked: with 32 registers, and with fewer. 0: the
    # Isa's number.
    direct_rows: tuple[int, int] = (0, 0)
    conversion: Conversion | None = None  # None: the fields are the GGUF's
    order: tuple[int, ...] = ()  # GGUF offsets of the 4-byte elements in reading order; empty: the GGUF's order
    order_registers: int = 0  # registers that this order needs; with fewer, the GGUF's order is used
    # Like `steps`, but word n of 16 values holds the values n, n + 4, n + 8 and n + 12; faster with `Isa.byte_permute`.
    strided: Callable[[Function, Block], Iterator[Step]] | None = None
    # Like `steps`, but one group after the other: several rows keep fewer sums, and packed bytes are read repeatedly.
    by_group: Callable[[Function, Block], Iterator[Step]] | None = None
    in_order: bool = False  # scales follow the values of a block, and decode loads in memory order

    def _bytes(self, wide: bool) -> int:
        """Return the bytes of a block's 4-byte elements (`wide`), or of its smaller elements."""
        return LANES * sum(size * count for size, count in self.fields if (size == 4) == wide)

    @property
    def block_bytes(self) -> int:
        return self._bytes(wide=True) + self._bytes(wide=False)

    @property
    def value_bytes(self) -> float:
        """The packed bytes of a value."""
        return self.block_bytes / LANES / self.block_values

    @property
    def together(self) -> int:
        """Number of blocks that share cache lines: 1, 2 or 4, the smallest number that fills whole lines."""
        return LINE // math.gcd(LINE, self._bytes(wide=False))

    def places(self, isa: Isa) -> dict[int, int]:
        """Map offsets in the GGUF block to offsets among the panel's wide or narrow elements, in bytes of one row."""
        found: dict[int, int] = {}
        offset, wide, narrow = 0, 0, 0
        for size, count in self.fields:
            for _ in range(count):
                found[offset] = wide if size == 4 else narrow
                wide, narrow = (wide + 4, narrow) if size == 4 else (wide, narrow + size)
                offset += size
        if isa.registers >= self.order_registers:
            found |= {at: 4 * number for number, at in enumerate(self.order)}
        return found

    def block(self, panel: Value, number: Value, blocks: Value) -> Block:
        """Return block `number` of a panel of `blocks`. The last run may have fewer blocks than `together`."""
        places = self.places(panel.f.isa)
        together, wide, narrow = self.together, self._bytes(wide=True), self._bytes(wide=False)
        within = number % together
        start = panel + (number - within) * self.block_bytes
        if together == 1 and self.in_order:
            return Block(start, start + wide, places)
        if together == 2:  # order in memory: wide, narrow, narrow, wide
            return Block(start + within * (wide + 2 * narrow), start + (within * narrow + wide), places)
        here = panel.f.minimum(blocks - (number - within), together)
        return Block(start + (here * narrow + within * wide), start + within * narrow, places)

    def lines(self, block: Block) -> list[Value]:
        """Return the addresses of the block's cache lines. Neighbouring blocks may share a line."""
        return [
            start + at
            for start, wide in ((block.narrow, False), (block.wide, True))
            for at in range(0, self._bytes(wide), LINE)
        ]

    def direct_steps(self, isa: Isa) -> tuple[Callable[[Function, Block], Iterator[Step]], bool]:
        """Return the steps for products with packed bytes, and whether they are strided."""
        if self.strided is not None and isa.byte_permute:
            return self.strided, True
        return self.steps, False

    @property
    def activations(self) -> Activations:
        return Activations.BLOCKS if self.super_scales is None else Activations.SUPER_BLOCKS

    @property
    def groups(self) -> int:
        return self.block_values // self.group

    def panel_bytes(self, columns: int) -> int:
        return -(-(columns // self.block_values) * self.block_bytes // LINE) * LINE

    @property
    def magnitude(self) -> int:
        """The largest byte, as `dot.Sum` expects it."""
        return 128 if self.offset == 128 else self.largest

    def tile_bytes(self, columns: int) -> int:
        """Return the maximum bytes of one unpacked panel: a byte per value, and a scale and a minimum per group."""
        return columns * LANES + columns // self.group * (2 * 64) + columns // self.block_values * (2 * 64)


@dataclass(frozen=True, slots=True)
class FloatPanel:
    """How kernels read the weights of a float format: one k of 16 rows, or two if the activations are BF16.

    The first value of a pair is in the upper half of its 32 bits, because `dot.bfloats` adds that product first.
    """

    name: str
    value_bytes: int
    load: Callable[[Function, Value, int], Value]  # loads adjacent values
    activations: Activations | None = None

    block_values: int = 1

    @property
    def together(self) -> int:
        """Number of values of a row that are adjacent in a panel."""
        return 1 if self.activations is None else 2

    @property
    def step_bytes(self) -> int:
        """The bytes of the adjacent values of 16 rows."""
        return LANES * self.together * self.value_bytes

    def at(self, panel: Value, k: Value, lane: Value) -> Value:
        """Return the address of one value."""
        step, within = k // self.together, k % self.together ^ (self.together - 1)
        return panel + (step * self.step_bytes + (lane * self.together + within) * self.value_bytes)

    def operands(self, f: Function, step: Value) -> list[Value]:
        """Load the adjacent values, 16 lanes each, to multiply by 4 bytes of activations."""
        if self.activations is None:
            return [self.load(f, step, LANES)]
        pairs = f.load(step, i32x16)
        return [pairs] if f.isa.bfloat_dot else [f.bits(half, f32x16) for half in (pairs & -0x10000, pairs << 16)]

    def panel_bytes(self, columns: int) -> int:
        return -(-columns // self.together) * self.step_bytes


def stored_elements(f: Function, fields: Sequence[tuple[int, int]], block: Value) -> Iterator[Value]:
    """Load the elements of a block of the GGUF, in order."""
    at = 0
    for size, count in fields:
        for _ in range(count):
            yield f.load(block + at, {1: I8, 2: I16, 4: I32}[size])
            at += size


# -- reading fields, for the unpackers: offsets are those in the block of `fields` -------------------------------


def words(f: Function, block: Block, offset: int) -> Value:
    """Load four bytes of every row: u8 x 64."""
    return f.load(block.at(offset, 4), u8x64)


def word32(f: Function, block: Block, offset: int) -> Value:
    """Load four bytes of every row as one int32 x 16."""
    return f.load(block.at(offset, 4), i32x16)


def byte(f: Function, block: Block, offset: int, signed: bool = False) -> Value:
    """Load a byte of every row as int32 x 16."""
    return f.widen(f.load(block.at(offset, 1), vector(I8)), I32, signed)


def half(f: Function, block: Block, offset: int) -> Value:
    """Load a half-precision value of every row as float32 x 16."""
    return f.load_half(block.at(offset, 2))


def short(f: Function, block: Block, offset: int) -> Value:
    """Load an unsigned 16-bit integer of every row as int32 x 16."""
    return f.widen(f.load(block.at(offset, 2), vector(I16)), I32)


def panel_count(rows: int) -> int:
    """Return the number of panels of a matrix. The number is even, so that the mat-mul can always take two panels."""
    return -(-rows // (2 * LANES)) * 2
