"""Memory for the values of a program: all buffers are in one arena, one after the other.

An executable has one arena per step that may be under way.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.backends.allocation import Buffer
from localllm.backends.base import Limits
from localllm.backends.cpu.kernels.common import X_BLOCK, X_VALUES
from localllm.backends.cpu.memory import LINE, aligned
from localllm.backends.cpu.panels import Activations

# Rows a power of two apart would compete for the same cache sets; an extra cache line spreads them.
ROW_PADDING = LINE


def float_stride(width: int) -> int:
    """Return the stride of a float32 row in bytes, rounded up to pairs of panels so that kernels store full vectors."""
    return -(-width // 32) * 32 * 4 + ROW_PADDING


def activation_stride(kind: Activations, width: int) -> int:
    """Return the stride of a row of activations in bytes. BF16 rows take as much as float32 rows."""
    if kind is Activations.BFLOATS:
        return float_stride(width)
    return aligned(width // X_VALUES * X_BLOCK) + ROW_PADDING


class Buffers:
    """The offsets of the buffers in their arena, and its size in bytes."""

    def __init__(self, buffers: Sequence[Buffer], limits: Limits) -> None:
        self._rows = {"batch": limits.rows, "logits": limits.logit_rows}
        self._offsets: list[int] = []
        self.size = 0
        for buffer in buffers:
            self._offsets.append(self.size)
            self.size += self.bytes(buffer)

    def bytes(self, buffer: Buffer) -> int:
        """Return the size of a buffer: its rows, plus a cache line because kernels may read one vector past the end."""
        return aligned(self._rows[buffer.rows] * buffer.stride * buffer.times) + LINE

    def offset(self, buffer: Buffer) -> int:
        return self._offsets[buffer.number]
