"""What binding decides: the buffers of a plan's values and the launches of its operations. Nothing is allocated here.

An operation has launches for few rows and, if another kernel is better, others for many. Kernels for few rows (decode,
verify) sum in one order whatever else is in the batch; kernels for many rows (prefill) use tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localllm.backends.base import Limits
from localllm.backends.gpu.kernels import FEW_ROWS, Kernel
from localllm.backends.gpu.products import SOME_ROWS
from localllm.backends.stages import Stage
from localllm.plan import Rope, Rows, Weight

NOTHING = "nothing"  # a small buffer, where a kernel reads no such argument
PICKED, KEYS = "picked", ("keys: even passes", "keys: odd passes")  # of the search for the largest logits

Count = str  # "batch", "logits", "tiles", "partitions", "keys 0" and so on
# (count, of a group, times) or also (..., more): ceil(count / of a group) * times + more
Dimension = int | tuple[Count, int, int] | tuple[Count, int, int, int]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows of 4-byte elements; the values of a plan share buffers in turn."""

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
class Dispatch:
    """Launches of one operation, in order, chosen by the number of rows."""

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


@dataclass(slots=True)
class Program:
    """Everything that binding decides before it allocates memory."""

    dispatches: list[Dispatch] = field(default_factory=list)
    stages: list[Stage[Buffer]] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    matrices: dict[str, Weight] = field(default_factory=dict)
    vectors: dict[str, Weight] = field(default_factory=dict)
    ropes: set[Rope] = field(default_factory=set)
    lists: dict[str, int] = field(default_factory=dict)  # name of a buffer -> bytes
    where: dict[int, Buffer] = field(default_factory=dict)  # of values that outlive the step: kept ones, logits
    routings: dict[int, tuple[str, Buffer, int]] = field(default_factory=dict)  # choices, hidden rows, chosen
    picks: list[Launch] = field(default_factory=list)  # passes of the search for the largest logits

    def kernels(self) -> list[Kernel]:
        """Each once, in order."""
        launches = (launch for d in self.dispatches for launch in (*d.one, *d.few, *(d.some or ()), *d.many))
        return list(dict.fromkeys(launch.kernel for launch in (*launches, *self.picks)))

    def scratch(self, limits: Limits) -> int:
        rows = {"batch": limits.rows, "logits": limits.logit_rows}
        return sum(4 * b.stride * rows[b.rows] for b in self.buffers) + sum(self.lists.values())
