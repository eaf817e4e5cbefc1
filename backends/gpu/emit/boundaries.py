"""Emitters of the values that cross stage boundaries or come from lookup tables that stay in the GGUF.

These emitters make no launches. They allocate buffers that the executable reads and fills.
"""

from __future__ import annotations

from collections.abc import Iterable

from localllm.backends.gpu.lowering import Lowering
from localllm.plan import EmbedMedia, EmbedNgrams, Operation, Receive, Send


def receive(low: Lowering, op: Receive) -> None:
    low.received += [(value, low.make(value)) for value in op.values]


def send(low: Lowering, op: Send) -> None:
    low.sent += [(value, low.floats(value)) for value in op.values]


def look_up(low: Lowering, op: EmbedMedia | EmbedNgrams) -> None:
    """Emit nothing: `reserve` has allocated the buffer."""


def reserve(low: Lowering, operations: Iterable[Operation]) -> None:
    """Allocate the buffers of a stage's lookups.

    The executable fills the buffers before the stage runs, so no operation of the stage may reuse them.
    """
    low.looked_up = [(op.out, low.make(op.out)) for op in operations if isinstance(op, EmbedMedia | EmbedNgrams)]
