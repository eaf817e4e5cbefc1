"""The layout of keys and values in a CPU cache block, by cache type, and the kernel code that writes them.

Keys are stored like the rows of a weight matrix: 16 positions per panel, one position per lane. Float values are stored
as rows. Integer values are stored with one value per lane and four positions next to each other, so that an int8 dot
product sums over positions. One head of one block (64 positions, D values per head, E = D rounded up to whole groups of
32) holds:

  floats   keys (4 panels, D, 16 positions)   values (64 positions, D padded to whole vectors)
  blocks   keys (4 panels, E / 32) of {words (4 or 8, 16 positions, 4 bytes), fifth bits (16 positions, 4 bytes),
           scales (16), minimums (16)}; values (E / 32) of {scales (64), minimums (64), fifth bits (64, 4 bytes),
           integers (16 fours of positions, 16 or 32 bytes, 4 positions)}

Words and integers of 4 or 5 bits are packed as in the GGUF format: byte i of 16 holds value i in its low half and value
i + 16 in its high half. Bit g of byte i of a key's fifth bits belongs to value 4 g + i; bit i of a value's fifth bits
belongs to value i. Keys of 8 bits are stored as q + 128, for the dot product of unsigned with signed bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.backends.cache import CACHE_TYPES, CacheType, rotation
from localllm.backends.cpu.simd import F32, I8, I16, I32, LANES, Function, Value, vector, vector_constant
from localllm.plan import BLOCK

U8 = NDArray[np.uint8]
f32x16, i32x16 = vector(F32), vector(I32)
PANELS = BLOCK // LANES
GROUP = 32  # values of a head per scale
FOUR = 4  # positions whose values are adjacent
HALF_AWAY = float(np.float32(0.49999997))  # the same constant as in quant.pack: ties round away from zero


def whole_lanes(n: int, of: int) -> int:
    return -(-n // of) * of


def value_groups(head_dim: int) -> int:
    return -(-head_dim // GROUP)


@dataclass(frozen=True, slots=True)
class Floats:
    """A cache type that stores floats without a scale."""

    type: CacheType
    bytes: int  # bytes per value
    load: Callable[[Function, Value], Value]  # loads 16 values as float32, multiplied by 1 / factor
    bits: Callable[[Function, Value], Value]  # converts 16 values in range to their stored bits
    infinite: int  # bits that are all set only in infinity and NaN; 0 if the type has neither
    factor: float = 1.0

    def key_bytes(self, head_dim: int) -> int:
        """Return the bytes of one head's keys in a cache block."""
        return BLOCK * head_dim * self.bytes

    def value_bytes(self, head_dim: int) -> int:
        return BLOCK * self.width(head_dim) * self.bytes

    def width(self, head_dim: int) -> int:
        """Return the padded number of values per head that kernels compute with."""
        return whole_lanes(head_dim, LANES)

    def write_key(self, f: Function, x: Value, keys: Value, head_dim: int, position: Value) -> None:
        panel = keys + (position // LANES * (head_dim * LANES * self.bytes) + position % LANES * self.bytes)

        def write(d: Value, count: int) -> None:
            numbers = self._numbers(f, x, d)
            for lane in range(count):
                f.store(panel + (d + lane) * (LANES * self.bytes), f.lane(numbers, lane))

        _vectors(f, head_dim, write)

    def write_value(self, f: Function, x: Value, values: Value, head_dim: int, position: Value) -> None:
        row = values + position * (self.width(head_dim) * self.bytes)

        def write(d: Value, count: int) -> None:  # the last vector reaches into the next head: stop at `count`
            numbers = self._numbers(f, x, d)
            if count == LANES:
                f.store(row + d * self.bytes, numbers)
                return
            for lane in range(count):
                f.store(row + (d + lane) * self.bytes, f.lane(numbers, lane))

        _vectors(f, head_dim, write)

    def finite_keys(self, content: U8) -> bool:
        """Return whether block contents uint8 (n, bytes) are free of infinity and NaN.

        FP8 contents are always finite, because kernels read FP8 NaN as 480.
        """
        bits = np.ascontiguousarray(content).view(f"u{self.bytes}")
        return not self.infinite or not bool(((bits & self.infinite) == self.infinite).any())

    finite_values = finite_keys

    def _numbers(self, f: Function, x: Value, d: Value) -> Value:
        return self.bits(f, finite_within(f, f.load(x + d * 4, f32x16), self.type.largest))


def _finite_halves(rows: U8) -> bool:
    return bool(np.isfinite(np.ascontiguousarray(rows).view(np.float16)).all())


def _vectors(f: Function, head_dim: int, write: Callable[[Value, int], None]) -> None:
    """Call write(d, values) for every vector of a head; `d` is its first dimension."""
    full = head_dim // LANES * LANES
    if full:
        with f.loop(0, full, LANES) as d:
            write(d, LANES)
    if full < head_dim:
        write(f.i64(full), head_dim - full)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A cache type that stores integers. Every 32 integers share a scale, and in some types also a minimum."""

    type: CacheType
    integer_bits: int
    offset: int  # value = scale * (integer - offset), or scale * integer + minimum
    minimum: bool = False

    @property
    def fifth(self) -> bool:
        return self.integer_bits == 5

    @property
    def words(self) -> int:
        """The number of four-byte words that hold the integers of a group, excluding fifth bits."""
        return 8 if self.integer_bits == 8 else 4

    @property
    def group_bytes(self) -> int:
        """The number of bytes that a group takes per position."""
        return 4 * (self.words + self.fifth) + 2 * (1 + self.minimum)

    def key_bytes(self, head_dim: int) -> int:
        return BLOCK * value_groups(head_dim) * self.group_bytes

    def value_bytes(self, head_dim: int) -> int:
        return self.key_bytes(head_dim)

    def width(self, head_dim: int) -> int:
        return value_groups(head_dim) * GROUP

    @property
    def value_integers(self) -> int:
        """The byte offset of the integers within a group of values."""
        return BLOCK * (2 * (1 + self.minimum) + 4 * self.fifth)

    def write_key(self, f: Function, x: Value, keys: Value, head_dim: int, position: Value) -> None:
        size = LANES * self.group_bytes
        panel, lane = keys + position // LANES * (value_groups(head_dim) * size), position % LANES
        for number, (integers, scale, minimum) in enumerate(self.quantized(f, x, head_dim)):
            at, words = panel + number * size, self.key_words(f, integers)
            for word in range(self.words):
                f.store(at + lane * 4 + 64 * word, f.lane(words[word // 4], word % 4))
            scales = at + 64 * (self.words + self.fifth)
            if self.fifth:
                f.store(at + lane * 4 + 64 * self.words, self.fifth_of_key(f, integers))
            f.store(scales + lane * 2, f.half_of(scale))
            if minimum is not None:
                f.store(scales + (lane * 2 + 2 * LANES), f.half_of(minimum))

    def write_value(self, f: Function, x: Value, values: Value, head_dim: int, position: Value) -> None:
        for number, (integers, scale, minimum) in enumerate(self.quantized(f, x, head_dim)):
            at = values + number * (BLOCK * self.group_bytes)
            f.store(at + position * 2, f.half_of(scale))
            if minimum is not None:
                f.store(at + (position * 2 + 2 * BLOCK), f.half_of(minimum))
            if self.fifth:
                f.store(at + (position * 4 + 2 * BLOCK * (1 + self.minimum)), self.fifth_of_value(f, integers))
            to = at + (position // FOUR * (FOUR * 4 * self.words) + position % FOUR + self.value_integers)
            bytes_ = self.value_bytes_of(f, integers)
            for number_of_byte in range(4 * self.words):  # bytes of other positions may be written by other threads
                f.store(to + FOUR * number_of_byte, f.lane(bytes_, number_of_byte))

    def finite_keys(self, content: U8) -> bool:
        """Return whether all scales and minimums in the block contents uint8 (n, bytes) are finite."""
        scales = content.reshape(-1, LANES * self.group_bytes)[:, 64 * (self.words + self.fifth) :]
        return _finite_halves(scales)

    def finite_values(self, content: U8) -> bool:
        scales = content.reshape(-1, BLOCK * self.group_bytes)[:, : 2 * BLOCK * (1 + self.minimum)]
        return _finite_halves(scales)

    def key_words(self, f: Function, integers: Sequence[Value]) -> list[Value]:
        """Return the words of a key's group, four to a vector."""
        if self.integer_bits == 8:
            return [f.bits(f.truncate(half + 128, I8), vector(I32, 4)) for half in integers]
        return [f.bits(self._nibbles(f, integers), vector(I32, 4))]

    def value_bytes_of(self, f: Function, integers: Sequence[Value]) -> Value:
        """Return the bytes of a value's group."""
        if self.integer_bits == 8:
            return f.join([f.truncate(half, I8) for half in integers])
        return self._nibbles(f, integers)

    def _nibbles(self, f: Function, integers: Sequence[Value]) -> Value:
        low, high = integers
        return f.truncate((low & 15) | ((high & 15) << 4), I8)

    def fifth_of_key(self, f: Function, integers: Sequence[Value]) -> Value:
        low, high = (half >> 4 for half in integers)
        parts = low * _powers(f, [lane // 4 for lane in range(LANES)])
        parts = parts | high * _powers(f, [lane // 4 + 4 for lane in range(LANES)])
        for n in (8, 4):
            parts = f.shuffle(parts, parts, range(n)) | f.shuffle(parts, parts, range(n, 2 * n))
        return f.bits(f.truncate(parts, I8), I32)

    def fifth_of_value(self, f: Function, integers: Sequence[Value]) -> Value:
        low, high = (half >> 4 for half in integers)
        bits = low * _powers(f, range(LANES)) | high * _powers(f, range(LANES, 2 * LANES))
        return f.reduce(bits, lambda a, b: a | b)

    def quantized(self, f: Function, x: Value, head_dim: int) -> list[tuple[list[Value], Value, Value | None]]:
        """Return (32 integers in two vectors, scale, minimum) for every group of a head."""
        largest = self.type.largest
        parts = [finite_within(f, part, largest) for part in head(f, x, head_dim)]
        if self.type.rotated:
            parts = [finite_within(f, part, largest) for part in rotate_keys(f, parts, head_dim)]
        quantize = _affine if self.minimum else _bytes if self.integer_bits == 8 else _symmetric
        top = (1 << self.integer_bits) - 1
        return [quantize(f, list(pair), top) for pair in zip(parts[::2], parts[1::2], strict=True)]


CacheRow = Floats | Blocks
CACHE: dict[str, CacheRow] = {
    row.type.name: row
    for row in (
        Floats(CACHE_TYPES["f32"], 4, lambda f, p: f.load(p, f32x16), lambda f, x: f.bits(x, i32x16), 0x7F800000),
        Floats(CACHE_TYPES["f16"], 2, lambda f, p: f.load_half(p), lambda f, x: f.to_half(x), 0x7C00),
        Floats(CACHE_TYPES["bf16"], 2, lambda f, p: f.load_bfloat(p), lambda f, x: _to_bfloat(f, x), 0x7F80),
        Floats(CACHE_TYPES["fp8"], 1, lambda f, p: _load_fp8(f, p), lambda f, x: _to_fp8(f, x), 0, 256.0),
        Blocks(CACHE_TYPES["q8_0"], 8, 0),
        Blocks(CACHE_TYPES["q5_1"], 5, 0, minimum=True),
        Blocks(CACHE_TYPES["q5_0"], 5, 16),
        Blocks(CACHE_TYPES["q4_1"], 4, 0, minimum=True),
        Blocks(CACHE_TYPES["q4_0"], 4, 8),
    )
}

# -- pieces of kernels ---------------------------------------------------------------------------------------------


def finite_within(f: Function, x: Value, largest: float) -> Value:
    """Clamp x to +-largest. NaN becomes `largest`, so that its product with weight 0 is 0."""
    return f.fmax(f.fmin(x, f.constant(x.type, largest)), f.constant(x.type, -largest))


def head(f: Function, x: Value, head_dim: int) -> list[Value]:
    """Load a float32 head as vectors, padded with zeros to whole groups of 32."""
    parts = []
    for at in range(0, value_groups(head_dim) * GROUP, LANES):
        part = f.load(x + 4 * at, f32x16) if at < head_dim else f.zeros(f32x16)
        if 0 < head_dim - at < LANES:
            part = f.select(f.lane_numbers() < head_dim - at, part, f.zeros(f32x16))
        parts.append(part)
    return parts


def rotate_keys(f: Function, parts: list[Value], head_dim: int) -> list[Value]:
    """Emit the Hadamard rotation of `backends.cache.rotate_keys` with the same additions in the same order."""
    size, span = rotation(head_dim), 1
    while span < min(size, LANES):
        order = [lane ^ span for lane in range(LANES)]
        signs = Value(f, vector_constant(F32, [-1.0 if lane & span else 1.0 for lane in range(LANES)]))
        parts = [f.shuffle(part, part, order) + part * signs for part in parts]
        span *= 2
    while span < size:
        apart, before = span // LANES, parts
        parts = [
            before[i - apart] - before[i] if i & apart else before[i] + before[i + apart] for i in range(len(before))
        ]
        span *= 2
    return [part * float(np.float32(size**-0.5)) for part in parts]


def _powers(f: Function, exponents: Sequence[int]) -> Value:
    numbers = [1 << n for n in exponents]
    return Value(f, vector_constant(I32, [n - (1 << 32) if n >> 31 else n for n in numbers]))


def fifth_bits(f: Function, bits: Value, first: int) -> Value:
    """Expand bits int8 x 16 (32 for each of four positions) to (lanes, 4): 16 where bit first + lane is set, else 0."""
    lanes = [first + lane for lane in range(LANES) for _ in range(FOUR)]
    here = f.shuffle(bits, bits, [4 * (n % FOUR) + lane // 8 for n, lane in enumerate(lanes)])
    one = Value(f, vector_constant(I8, [(1 << lane % 8) - 256 * (lane % 8 == 7) for lane in lanes]))
    return f.select((here & one).equals(0), f.zeros(here.type), f.constant(here.type, 16))


def _reciprocal(f: Function, x: Value) -> Value:
    inverse = f.constant(F32, 1.0) / x
    return f.select(f.abs(inverse) <= float(np.finfo(np.float32).max), inverse, f.constant(F32, 0.0))


def _largest(f: Function, parts: Sequence[Value]) -> Value:
    return f.reduce(f.fmax(*(f.abs(part) for part in parts)), f.fmax)


def _bytes(f: Function, parts: list[Value], top: int) -> tuple[list[Value], Value, Value | None]:
    """Quantize so that the largest magnitude becomes 127. Ties round away from zero."""
    scale = _largest(f, parts) / f.constant(F32, 127.0)
    inverse = f.splat(_reciprocal(f, scale))
    integers = []
    for part in parts:
        y = part * inverse
        half = (f.bits(y, i32x16) & -0x80000000) | f.bits(f.constant(f32x16, HALF_AWAY), i32x16)
        integers.append(f.to_int32(y + f.bits(half, f32x16)))
    return integers, scale, None


def _symmetric(f: Function, parts: list[Value], top: int) -> tuple[list[Value], Value, Value | None]:
    """Quantize so that the largest magnitude (the first, if several) becomes the lowest integer."""
    zero = (top + 1) // 2
    largest = f.splat(_largest(f, parts))
    where = [
        f.select(f.abs(part).equals(largest), f.lane_numbers() + 16 * n, f.constant(i32x16, 64))
        for n, part in enumerate(parts)
    ]
    first = f.reduce(f.fmin(*where), f.fmin)
    low, high = (f.lane_at(part, first & 15) for part in parts)
    scale = f.select(first < 16, low, high) / f.constant(F32, -zero)
    inverse = f.splat(_reciprocal(f, scale))
    highest = f.constant(f32x16, top)
    return [f.to_int32(f.fmin(part * inverse + (zero + 0.5), highest)) for part in parts], scale, None


def _affine(f: Function, parts: list[Value], top: int) -> tuple[list[Value], Value, Value | None]:
    """Quantize so that the smallest value becomes 0 and the largest becomes the highest integer."""
    least, most = (f.reduce(pick(*parts), pick) for pick in (f.fmin, f.fmax))
    scale = (most - least) / f.constant(F32, top)
    inverse, minimum, highest = f.splat(_reciprocal(f, scale)), f.splat(least), f.constant(f32x16, top)
    return [f.to_int32(f.fmin((part - minimum) * inverse + 0.5, highest)) for part in parts], scale, least


def _to_bfloat(f: Function, x: Value) -> Value:
    return f.truncate(f.to_bfloat(x) >> 16, I16)


def _load_fp8(f: Function, pointer: Value) -> Value:
    """Load FP8 as half precision. Its exponent bias is 8 larger, so every value is exactly 1 / 256 of the FP8 value."""
    wide = f.widen(f.load(pointer, vector(I8)), I16, signed=True)
    return f.half_bits((wide << 7) & -0x4001)


def _to_fp8(f: Function, x: Value) -> Value:
    bits = f.bits(x, i32x16)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    subnormal = 2.0**14  # adding this rounds to a multiple of 2^-9, the smallest FP8 value
    small = f.bits(f.bits(size, f32x16) + subnormal, i32x16) - f.bits(f.constant(f32x16, subnormal), i32x16)
    code = f.select(f.bits(size, f32x16) < 2.0**-6, small, normal)
    return f.truncate(code | ((bits >> 24) & 0x80), I8)
