"""The places that kernels are told of: what stands where is known once a program's memory is allocated.

`backends.cpu.storage` allocates what these name and gives their addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.backends.allocation import Buffer
from localllm.backends.cpu.arguments import Output, Place, Rows
from localllm.backends.cpu.kernels.attention_shape import Shape
from localllm.plan import Rope, Weight
from localllm.plan import Rows as RowsOf

Scratch = Literal["attention", "unpacked weights"]


class Shared(Place):
    """A place that threads write during a step, and other threads read: barriers keep them apart."""

    __slots__ = ()

    @property
    def memory(self) -> Shared:
        """Equal for places in the same memory."""
        return self


@dataclass(frozen=True, slots=True)
class BufferOf(Shared):
    """Rows of a value."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class CacheOf(Shared):
    """Keys or values of a layer."""

    layer: int
    part: Literal["keys", "values"]


@dataclass(frozen=True, slots=True)
class ListOf(Shared):
    """Memory that belongs to one operation."""

    number: int
    bytes: int
    offset: int = 0

    @property
    def memory(self) -> ListOf:
        return ListOf(self.number, self.bytes)


class Partials(Shared):
    """What tasks of a split attention leave for the merge."""

    __slots__ = ()


PARTIALS = Partials()


class Counter(Place):
    """The counter from which threads take the tasks of a call; each call has its own."""

    __slots__ = ()


COUNTER = Counter()


@dataclass(frozen=True, slots=True)
class ScratchOf(Place):
    """Memory of each thread for itself: for attention, or for unpacked weights."""

    what: Scratch


@dataclass(frozen=True, slots=True)
class PanelsOf(Place):
    """A matrix in panels."""

    weight: Weight


@dataclass(frozen=True, slots=True)
class VectorOf(Place):
    """A tensor of plain numbers as float32, padded to whole runs of `lanes`."""

    weight: Weight
    lanes: int


@dataclass(frozen=True, slots=True)
class ExpertVectorsOf(Place):
    """Numbers (experts, rows) as float32, each expert's padded to `width`."""

    weight: Weight
    width: int


@dataclass(frozen=True, slots=True)
class RopeOf(Place):
    """Cosines and sines."""

    rope: Rope


@dataclass(frozen=True, slots=True)
class StepOf(Place):
    """The `Step` of layers with the usual cache blocks, or of those with a window and blocks of their own."""

    windowed: bool = False


@dataclass(frozen=True, slots=True)
class CountOf(Place):
    """The number of rows of a step."""

    rows: RowsOf


@dataclass(frozen=True, slots=True)
class WorkOf(Place):
    """The `Work` of one kind of attention."""

    shape: Shape
    window: int


def rows_in(buffer: Buffer) -> Rows:
    """The rows of a buffer for a kernel that reads them."""
    return Rows(address=BufferOf(buffer), stride=buffer.stride)


def output_to(buffer: Buffer) -> Output:
    """The rows of a buffer for a kernel that writes them."""
    return Output(address=BufferOf(buffer), stride=buffer.stride)
