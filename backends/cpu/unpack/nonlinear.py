"""Formats whose nibbles index a table of 16 levels: IQ4_NL, IQ4_XS, MXFP4. `quant.formats` defines the layouts."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.backends.cpu.panels import Block, IntegerPanel, Scales, Step, SuperScales, byte, half, short, words
from localllm.backends.cpu.simd import F32, Function, vector
from localllm.quant.formats import fp4, iq4

# Levels plus the smallest possible offset, because AVX2 can add up more products of small bytes.
IQ4_LEVELS = tuple(128 + int(level) for level in iq4.LEVELS)
FP4_CENTRE = 16
FP4_LEVELS = tuple(FP4_CENTRE + int(level) for level in fp4.LEVELS)


def _nl_steps(f: Function, block: Block) -> Iterator[Step]:
    for word in range(4):
        w = words(f, block, 2 + 4 * word)
        low, high = f.lookup_nibbles(IQ4_LEVELS, w)
        yield 0, word, low
        yield 0, 4 + word, high


def _nl_whole(f: Function, block: Block) -> Scales:
    return half(f, block, 0), None


def _nl_scale(f: Function, block: Block, group: int) -> Scales:
    return _nl_whole(f, block)


def _xs_steps(f: Function, block: Block) -> Iterator[Step]:
    for group in range(8):
        for word in range(4):
            w = words(f, block, 8 + 16 * group + 4 * word)
            low, high = f.lookup_nibbles(IQ4_LEVELS, w)
            yield group, word, low
            yield group, 4 + word, high


def _xs_scale(f: Function, block: Block, group: int) -> Scales:
    low = (byte(f, block, 4 + group // 2) >> (4 * (group % 2))) & 15
    high = (short(f, block, 2) >> (2 * group)) & 3
    return (low | (high << 4)) - 32, None


def _fp4_steps(f: Function, block: Block) -> Iterator[Step]:
    for word in range(4):
        w = words(f, block, 1 + 4 * word)
        low, high = f.lookup_nibbles(FP4_LEVELS, w)
        yield 0, word, low
        yield 0, 4 + word, high


def _fp4_scale(f: Function, block: Block, group: int) -> Scales:
    """Return 2^(e - 128): half the power of two that E8M0 encodes, because the levels are doubled."""
    e = byte(f, block, 0)
    one = f.constant(e.type, 1)
    small = f.bits(f.select(e < one, f.constant(e.type, 0x00200000), f.constant(e.type, 0x00400000)), vector(F32))
    return f.select(e < 2, small, f.bits((e - 1) << 23, vector(F32))), None


IQ4_NL = IntegerPanel("IQ4_NL", ((2, 1), (4, 4)), 32, 32, 128, False, _nl_steps, _nl_scale)
_XS_SCALES = SuperScales(_nl_whole, _xs_scale)
IQ4_XS = IntegerPanel(
    "IQ4_XS", ((2, 1), (2, 1), (1, 4), (4, 32)), 256, 32, 128, False, _xs_steps, _XS_SCALES.product,
    super_scales=_XS_SCALES, in_order=True,
)  # fmt: skip
MXFP4 = IntegerPanel(
    "MXFP4", ((1, 1), (4, 4)), 32, 32, FP4_CENTRE, False, _fp4_steps, _fp4_scale, largest=max(FP4_LEVELS)
)
