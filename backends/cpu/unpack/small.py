"""Formats of one or two bits without a codebook, and NVFP4. `quant.formats` defines the layouts."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.backends.cpu.panels import Block, IntegerPanel, Scales, Step, byte, f32x16, half, u8x64, words
from localllm.backends.cpu.simd import I8, I16, Function, Value, vector
from localllm.backends.cpu.unpack.nonlinear import FP4_CENTRE, FP4_LEVELS


def _digit(f: Function, w: Value, n: int) -> Value:
    """Return ternary digit n (0 is the first) of bytes that hold five: the upper byte of 3 * (byte * 3^n mod 256)."""
    shifted = f.widen(w * 3**n if n else w, I16)
    return f.truncate((shifted * 3) >> 8, I8)


def _tq1_steps(f: Function, block: Block) -> Iterator[Step]:
    for word in range(8):
        w = words(f, block, 4 * word)
        for n in range(5):
            yield n, word, _digit(f, w, n)
    for word in range(4):
        w = words(f, block, 32 + 4 * word)
        for n in range(5):
            yield 5 + n // 2, 4 * (n % 2) + word, _digit(f, w, n)
    w = words(f, block, 48)
    for n in range(4):
        yield 7, 4 + n, _digit(f, w, n)


def _tq2_steps(f: Function, block: Block) -> Iterator[Step]:
    for half_ in range(2):
        for word in range(8):
            w = words(f, block, 32 * half_ + 4 * word)
            for n in range(4):
                yield 4 * half_ + n, word, (w >> (2 * n)) & 3


def _q1_steps(f: Function, block: Block) -> Iterator[Step]:
    for word in range(32):  # 2 * bit - 1
        four = (byte(f, block, 2 + word // 2) >> (4 * (word % 2))) & 15
        yield word // 8, word % 8, f.bits(((four * 0x00204081) & 0x01010101) << 1, u8x64)


def _q2_steps(f: Function, block: Block) -> Iterator[Step]:
    for word in range(16):
        b = byte(f, block, 2 + word)
        yield word // 8, word % 8, f.bits((b | (b << 6) | (b << 12) | (b << 18)) & 0x03030303, u8x64)


def _nvfp4_steps(f: Function, block: Block) -> Iterator[Step]:
    for group in range(4):
        for word in range(2):
            w = words(f, block, 4 + 8 * group + 4 * word)
            low, high = f.lookup_nibbles(FP4_LEVELS, w)
            yield group, word, low
            yield group, 2 + word, high


def _nvfp4_scale(f: Function, block: Block, group: int) -> Scales:
    """Return half of the unsigned E4M3 value, because the levels are doubled. 0x7F reads as 0."""
    b = byte(f, block, group)
    exponent, mantissa = (b >> 3) & 15, b & 7
    normal = f.bits(((exponent + (127 - 8)) << 23) | (mantissa << 20), f32x16)
    value = f.select(exponent.equals(0), f.to_float(mantissa) * 2.0**-10, normal)
    return f.select(b.equals(0x7F), f.zeros(f32x16), value), None


def _scale_at(at: int) -> object:
    def scales(f: Function, block: Block, group: int) -> Scales:
        return half(f, block, at), None

    return scales


def _panel(name: str, fields: tuple[tuple[int, int], ...], values: int, steps: object, scales: object) -> IntegerPanel:
    return IntegerPanel(name, fields, values, 32, 1, False, steps, scales, 3)  # type: ignore[arg-type]


TQ1_0 = _panel("TQ1_0", ((4, 12), (4, 1), (2, 1)), 256, _tq1_steps, _scale_at(52))
TQ2_0 = _panel("TQ2_0", ((4, 16), (2, 1)), 256, _tq2_steps, _scale_at(64))
Q1_0 = _panel("Q1_0", ((2, 1), (1, 16)), 128, _q1_steps, _scale_at(0))
Q2_0 = _panel("Q2_0", ((2, 1), (1, 16)), 64, _q2_steps, _scale_at(0))
NVFP4 = IntegerPanel("NVFP4", ((1, 4), (4, 8)), 64, 16, FP4_CENTRE, False, _nvfp4_steps, _nvfp4_scale, max(FP4_LEVELS))

assert vector(I8, 64) == u8x64
