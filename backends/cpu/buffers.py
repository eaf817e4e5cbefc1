"""Row buffers for a plan's values: taken when a value is made, reused after its last use."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.base import Limits
from localllm.backends.cpu.kernels.common import X_BLOCK, X_VALUES
from localllm.backends.cpu.memory import LINE, Arena, aligned
from localllm.backends.cpu.panels import Activations
from localllm.plan import Rows

# Rows a power of two apart would share cache sets; an extra line spreads them.
ROW_PADDING = LINE


@dataclass(frozen=True, slots=True)
class Buffer:
    """`rows` rows, `stride` bytes apart. `number` identifies the buffer; `offset` is from the start of the arena."""

    number: int
    offset: int
    stride: int


def float_stride(width: int) -> int:
    """Bytes of a float32 row: whole pairs of panels, so that kernels store full vectors."""
    return -(-width // 32) * 32 * 4 + ROW_PADDING


def activation_stride(kind: Activations, width: int) -> int:
    """Bytes of a row of activations of one kind; bfloats are stored as float32 if the instruction set has no pairs."""
    if kind is Activations.BFLOATS:
        return float_stride(width)
    return aligned(width // X_VALUES * X_BLOCK) + ROW_PADDING


class Buffers:
    """Sizes first, memory last: `take` and `give` plan, `commit` allocates."""

    def __init__(self, limits: Limits) -> None:
        self._rows = {"batch": limits.rows, "logits": limits.logit_rows}
        self._free: dict[tuple[Rows, int, int], list[Buffer]] = {}
        self._kind: dict[int, tuple[Rows, int, int]] = {}
        self.size = 0
        self._arena: Arena | None = None

    def take(self, rows: Rows, stride: int, times: int = 1) -> Buffer:
        """A buffer of `times` rows of `stride` bytes per row."""
        free = self._free.get((rows, stride, times))
        if free:
            return free.pop()
        buffer = Buffer(len(self._kind), self.size, stride)
        self._kind[buffer.number] = (rows, stride, times)
        # A line more at the end: kernels may read one vector beyond the last row's values.
        self.size += aligned(self._rows[rows] * stride * times) + LINE
        return buffer

    def give(self, buffer: Buffer) -> None:
        self._free.setdefault(self._kind[buffer.number], []).append(buffer)

    def commit(self) -> Arena:
        self._arena = Arena(self.size, "the activations")
        return self._arena

    def address(self, buffer: Buffer) -> int:
        assert self._arena is not None
        return self._arena.address + buffer.offset
