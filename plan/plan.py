"""The plan itself: operations in order, the values they make, and what the attention layers keep."""

from __future__ import annotations

from dataclasses import dataclass

from plan.operations import Operation
from plan.values import Value


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """What one attention layer keeps per token."""

    kv_heads: int
    head_dim: int
    window: int = 0  # positions that a row sees; 0: all


@dataclass(frozen=True, slots=True)
class Part:
    """Operations start..stop, which run without a break; values that come from outside before, and are wanted there
    afterwards."""

    start: int
    stop: int
    enters: tuple[Value, ...] = ()
    leaves: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Operations in order; `logits` is the value (L, vocabulary) that a step returns.

    What is recorded is one part; `backends.hybrid.cut` makes plans of several.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    layers: tuple[CacheLayer, ...]
    logits: Value
    parts: tuple[Part, ...]
    starts: tuple[int, ...] = ()  # the operation that each layer begins with, and the output after the last

    @property
    def window(self) -> int:
        """The largest window of a layer; 0 where none has one."""
        return max((layer.window for layer in self.layers), default=0)
