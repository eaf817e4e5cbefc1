"""Emitters of the values that cross stage boundaries: no launches, only buffers that the executable reads and fills."""

from __future__ import annotations

from localllm.backends.gpu.lowering import Lowering
from localllm.plan import Receive, Send


def receive(low: Lowering, op: Receive) -> None:
    low.received += [(value, low.make(value)) for value in op.values]


def send(low: Lowering, op: Send) -> None:
    low.sent += [(value, low.floats(value)) for value in op.values]
