"""The result of lowering: the buffers of a plan's values and the launches of its operations. Nothing is allocated.

An operation has launches for few rows and, if another kernel is better, separate launches for many rows. Kernels for
few rows (decode, verify) sum in an order that does not depend on the batch; kernels for many rows (prefill) use tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localllm.backends.allocation import Buffer
from localllm.backends.base import Limits
from localllm.backends.gpu.kernels.kernel import FEW_ROWS, Kernel, Launch
from localllm.backends.gpu.kernels.products import SOME_ROWS
from localllm.backends.gpu.references import Choices, Scratch
from localllm.backends.stages import Stage
from localllm.plan import Rope, Rows, Weight


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The launches of one operation, in order, selected by the number of rows."""

    label: str
    rows: Rows
    few: tuple[Launch, ...]
    many: tuple[Launch, ...] = ()
    one: tuple[Launch, ...] = ()
    some: tuple[Launch, ...] | None = None

    def launches(self, rows: int) -> tuple[Launch, ...]:
        """Return the launches for this number of rows."""
        if rows > FEW_ROWS:
            return self.some if self.some is not None and rows <= SOME_ROWS else self.many or self.few
        return self.one if rows == 1 and self.one else self.few


@dataclass(frozen=True, slots=True)
class KeptRouting:
    """Buffers that keep the expert routing: the experts of each row, and the inputs of the down matrices."""

    choices: Choices
    hidden: Buffer
    used: int


@dataclass(slots=True)
class Program:
    """The result of lowering, before memory is allocated."""

    dispatches: list[Dispatch] = field(default_factory=list)
    stages: list[Stage[Buffer]] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)  # strides in elements of 4 bytes
    matrices: dict[str, Weight] = field(default_factory=dict)
    vectors: dict[str, Weight] = field(default_factory=dict)
    ropes: set[Rope] = field(default_factory=set)
    scratch: dict[Scratch, int] = field(default_factory=dict)  # sizes in bytes
    where: dict[int, Buffer] = field(default_factory=dict)  # buffers of kept values and logits, which outlive the step
    routings: dict[int, KeptRouting] = field(default_factory=dict)  # expert routings, by index of the mixture's output
    has_top_k: list[Launch] = field(default_factory=list)  # passes of the top-k search

    def kernels(self) -> list[Kernel]:
        """Return the distinct kernels in order of first use."""
        launches = (launch for d in self.dispatches for launch in (*d.one, *d.few, *(d.some or ()), *d.many))
        return list(dict.fromkeys(launch.kernel for launch in (*launches, *self.has_top_k)))

    def scratch_bytes(self, limits: Limits) -> int:
        rows = {"batch": limits.rows, "logits": limits.logit_rows}
        return sum(4 * b.stride * rows[b.rows] for b in self.buffers) + sum(self.scratch.values())
