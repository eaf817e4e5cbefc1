"""Splits blocks into scales and codes, for searches that choose the codes themselves (GPTQ).

Formats in `CODED` store one code per value: value = `offset + scale * level[code]`, with a scale and an offset per
group. `write` replaces the codes of a block and keeps its scales. The scales are derived from `dequantize`, so that
no format needs a second parser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.formats import fp4, iq4
from localllm.quant.pack import join_bits
from localllm.quant.table import FORMATS


@dataclass(frozen=True, slots=True)
class Coded:
    """How a format stores codes: its levels in ascending order, their codes, and a function that writes codes."""

    levels: F32  # (levels,)
    codes: U8  # (levels,)
    write: Callable[[U8, U8], None]  # arguments: blocks (n, bytes), changed in place, and codes (n, values)

    @property
    def even(self) -> bool:
        """Whether adjacent levels differ by one."""
        return bool((np.diff(self.levels) == 1).all())

    def nearest(self, y: F32) -> U8:
        """Return the index of the nearest level for each value, in any shape."""
        if self.even:
            clipped: F32 = np.clip(np.rint(y) - self.levels[0], 0, len(self.levels) - 1)
            return clipped.astype(np.uint8)
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        return np.searchsorted(middles, y).astype(np.uint8)


def grid(blocks: U8, name: str) -> tuple[F32, F32]:
    """Return scale and offset of every value, both (n, values), for blocks (n, bytes) of a format in `CODED`."""
    coded, dequantize = CODED[name], FORMATS[name].dequantize
    ends = []
    for level in (0, len(coded.levels) - 1):
        filled = blocks.copy()
        coded.write(filled, np.full((len(blocks), FORMATS[name].block_values), coded.codes[level], np.uint8))
        ends.append(dequantize(filled))
    scale = (ends[1] - ends[0]) / (coded.levels[-1] - coded.levels[0])
    return scale, ends[0] - scale * coded.levels[0]


def _nibbles(at: int, pair: int = 16) -> Callable[[U8, U8], None]:
    """Return a writer that packs two values, `pair` values apart, into each byte, four bits each."""

    def write(blocks: U8, q: U8) -> None:
        low = (q & np.uint8(15)).reshape(len(q), -1, 2, pair)
        blocks[:, at : at + q.shape[1] // 2] = join_bits(low, 4).reshape(len(q), -1)

    return write


def _five_bits(at: int) -> Callable[[U8, U8], None]:
    low = _nibbles(at + 4)

    def write(blocks: U8, q: U8) -> None:
        blocks[:, at : at + 4] = np.packbits(q >> 4, axis=1, bitorder="little")
        low(blocks, q)

    return write


def _two_bits(at: int) -> Callable[[U8, U8], None]:
    def write(blocks: U8, q: U8) -> None:
        low = (q & np.uint8(3)).reshape(len(q), 2, 4, 32)
        blocks[:, at : at + 64] = join_bits(low, 2).reshape(len(q), 64)

    return write


def _eight_planes(at: int, shift: int, low: Callable[[U8, U8], None]) -> Callable[[U8, U8], None]:
    """Return a writer that packs one bit of eight values, 32 apart, into each byte; `low` writes the lower bits."""

    def write(blocks: U8, q: U8) -> None:
        blocks[:, at : at + 32] = join_bits((q >> np.uint8(shift)).reshape(len(q), 8, 32), 1)
        low(blocks, q)

    return write


def _six_bits(blocks: U8, q: U8) -> None:
    blocks[:, :128] = join_bits((q & np.uint8(15)).reshape(len(q), 2, 2, 64), 4).reshape(len(q), 128)
    blocks[:, 128:192] = join_bits((q >> np.uint8(4)).reshape(len(q), 2, 4, 32), 2).reshape(len(q), 64)


def _evenly(low: int, high: int, write: Callable[[U8, U8], None]) -> Coded:
    return Coded(np.arange(low, high, dtype=np.float32), np.arange(high - low, dtype=np.uint8), write)


def _table(levels: F32, write: Callable[[U8, U8], None]) -> Coded:
    sorted_levels, codes = np.unique(levels, return_index=True)
    return Coded(sorted_levels, codes.astype(np.uint8), write)


CODED: dict[str, Coded] = {
    "Q4_0": _evenly(-8, 8, _nibbles(2)),
    "Q4_1": _evenly(0, 16, _nibbles(4)),
    "Q5_0": _evenly(-16, 16, _five_bits(2)),
    "Q5_1": _evenly(0, 32, _five_bits(4)),
    "Q2_K": _evenly(0, 4, _two_bits(16)),
    "Q3_K": _evenly(-4, 4, _eight_planes(0, 2, _two_bits(32))),
    "Q4_K": _evenly(0, 16, _nibbles(16, 32)),
    "Q5_K": _evenly(0, 32, _eight_planes(16, 4, _nibbles(48, 32))),
    "Q6_K": _evenly(-32, 32, _six_bits),
    "IQ4_NL": _table(iq4.LEVELS, _nibbles(2)),
    "IQ4_XS": _table(iq4.LEVELS, _nibbles(8)),
    "MXFP4": _table(fp4.LEVELS, _nibbles(1)),
    "NVFP4": _table(fp4.LEVELS, _nibbles(4, 8)),
}
