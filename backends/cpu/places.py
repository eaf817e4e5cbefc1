"""Places: the memory that a kernel's arguments point to, named before the program's memory is allocated.

`backends.cpu.storage` allocates the memory and returns the address of each place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.backends.allocation import Buffer
from localllm.backends.cpu.arguments import Output, Place, Rows
from localllm.backends.cpu.kernels.attention_shape import AttentionShape
from localllm.plan import Rope, Weight
from localllm.plan import Rows as RowsOf

Scratch = Literal["attention", "indexer", "unpacked weights"]


class Shared(Place):
    """A place that some threads write and others read during a step, with barriers in between."""

    __slots__ = ()

    @property
    def memory(self) -> Shared:
        """The memory that contains this place. Places in the same memory return equal objects."""
        return self


@dataclass(frozen=True, slots=True)
class BufferOf(Shared):
    """The buffer of a value."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class CacheOf(Shared):
    """The keys or values of a layer."""

    layer: int
    part: Literal["keys", "values"]  # for a recurrent layer: its two parts, in the order of `backends.cpu.stores`


@dataclass(frozen=True, slots=True)
class ListOf(Shared):
    """Scratch memory that one operation uses."""

    number: int
    bytes: int
    offset: int = 0

    @property
    def memory(self) -> ListOf:
        return ListOf(self.number, self.bytes)


class Partials(Shared):
    """The partial results of split attention tasks, for the merge."""

    __slots__ = ()


PARTIALS = Partials()


@dataclass(frozen=True, slots=True)
class ScoresOf(Shared):
    """The scores that the scoring tasks of an indexer pass to the selection. All indexers share this memory."""

    bytes: int

    @property
    def memory(self) -> ScoresOf:
        return ScoresOf(0)


class Counter(Place):
    """The counter from which threads take the tasks of a call. Each call has its own counter."""

    __slots__ = ()


COUNTER = Counter()


@dataclass(frozen=True, slots=True)
class ScratchOf(Place):
    """Scratch memory of each thread."""

    what: Scratch


@dataclass(frozen=True, slots=True)
class RepackedOf(Place):
    """A matrix in panels."""

    weight: Weight


@dataclass(frozen=True, slots=True)
class VectorOf(Place):
    """A small tensor as float32, padded to whole runs of `lanes`."""

    weight: Weight
    lanes: int


@dataclass(frozen=True, slots=True)
class ColumnsOf(Place):
    """A small matrix (rows, columns) as float32, stored by column. The columns are padded to whole runs of `lanes`."""

    weight: Weight
    lanes: int


@dataclass(frozen=True, slots=True)
class ExpertVectorsOf(Place):
    """Per-expert vectors (experts, rows) as float32, each padded to `width`."""

    weight: Weight
    width: int


@dataclass(frozen=True, slots=True)
class EdgedOf(Place):
    """A small matrix as float32. The first and the last value of each row are repeated `more` times at either end."""

    weight: Weight
    more: int


@dataclass(frozen=True, slots=True)
class RopeOf(Place):
    """A RoPE table of cosines and sines."""

    rope: Rope


@dataclass(frozen=True, slots=True)
class AxesOf(Place):
    """The axis of each pair of a rotation, int32 (n_rot / 2,)."""

    rope: Rope


@dataclass(frozen=True, slots=True)
class StepOf(Place):
    """The `Step` of layers with the usual cache blocks, or of sliding-window layers with separate blocks.

    Its rows are the rows of the batch, or the rows whose logits are requested.
    """

    windowed: bool = False
    rows: RowsOf = "batch"


@dataclass(frozen=True, slots=True)
class CountOf(Place):
    """The number of rows in a step."""

    rows: RowsOf


@dataclass(frozen=True, slots=True)
class WorkOf(Place):
    """The `Work` struct of one kind of attention."""

    shape: AttentionShape
    window: int
    rows: RowsOf = "batch"


def rows_in(buffer: Buffer) -> Rows:
    """Return the rows of a buffer for a kernel that reads them."""
    return Rows(address=BufferOf(buffer), stride=buffer.stride)


def output_to(buffer: Buffer) -> Output:
    """Return the rows of a buffer for a kernel that writes them."""
    return Output(address=BufferOf(buffer), stride=buffer.stride)
