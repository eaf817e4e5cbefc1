"""What binding decides: the buffers of a plan's values, and the launches of its operations. Nothing is allocated here.

A stage has launches for few rows and, where another kernel is better, for many. Few rows (decode, verify) have kernels
whose sums have one order whatever else is in the batch; many rows (prefill) have tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localllm.backends.base import Limits
from localllm.backends.gpu.kernels import FEW_ROWS, Kernel
from localllm.backends.gpu.products import SOME_ROWS
from localllm.plan import CacheLayer, Rope, Rows, Weight

NOTHING = "nothing"  # a small buffer, where a kernel reads no such argument
PICKED, KEYS = "picked", ("keys: even passes", "keys: odd passes")  # of the search for the largest logits

Count = str  # "batch", "logits", "tiles", "partitions", "keys 0" and so on
# (count, of a group, times) or also (..., more): ceil(count / of a group) * times + more
Dimension = int | tuple[Count, int, int] | tuple[Count, int, int, int]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows of 4-byte elements for the values of a plan, one after the other."""

    number: int
    rows: Rows
    stride: int  # elements of a row


Argument = Buffer | Rope | str


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Kernel
    grid: tuple[Dimension, Dimension, Dimension]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """Launches of one operation, in order; a row, more than FEW_ROWS (`some`) or than SOME_ROWS may have their own."""

    label: str
    rows: Rows
    few: tuple[Launch, ...]
    many: tuple[Launch, ...] = ()
    one: tuple[Launch, ...] = ()
    some: tuple[Launch, ...] | None = None

    def launches(self, rows: int) -> tuple[Launch, ...]:
        """For this many rows."""
        if rows > FEW_ROWS:
            return self.some if self.some is not None and rows <= SOME_ROWS else self.many or self.few
        return self.one if rows == 1 and self.one else self.few


@dataclass(frozen=True, slots=True)
class PartStages:
    """The stages of a part, and where values that cross its edges lie."""

    stages: slice
    enters: tuple[Buffer, ...]
    leaves: tuple[Buffer, ...]


@dataclass(slots=True)
class Program:
    """All that binding decides."""

    stages: list[Stage] = field(default_factory=list)
    parts: list[PartStages] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    matrices: dict[str, Weight] = field(default_factory=dict)
    vectors: dict[str, Weight] = field(default_factory=dict)
    ropes: set[Rope] = field(default_factory=set)
    lists: dict[str, int] = field(default_factory=dict)  # name of a buffer -> bytes
    where: dict[int, Buffer] = field(default_factory=dict)  # of values that outlive the step
    routings: dict[int, tuple[str, Buffer, int]] = field(default_factory=dict)  # choices, hidden rows, chosen
    picks: list[Launch] = field(default_factory=list)  # passes of the search for the largest logits

    def kernels(self) -> list[Kernel]:
        """Each once, in order."""
        launches = (launch for s in self.stages for launch in (*s.one, *s.few, *(s.some or ()), *s.many))
        return list(dict.fromkeys(launch.kernel for launch in (*launches, *self.picks)))

    def scratch(self, limits: Limits) -> int:
        rows = {"batch": limits.rows, "logits": limits.logit_rows}
        return sum(4 * b.stride * rows[b.rows] for b in self.buffers) + sum(self.lists.values())


def has_own_blocks(layer: CacheLayer, limits: Limits) -> bool:
    """Whether the layer goes by the tables of the window."""
    return bool(layer.window and limits.window_blocks)
