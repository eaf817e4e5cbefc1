"""The interface of all plan operations, used by properties of whole plans and by rewrites."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.values import Value
from localllm.plan.weights import Weight


@dataclass(frozen=True, slots=True)
class Read:
    """The part of a weight that is read per token: `used` of `of` equal parts."""

    weight: Weight
    used: int = 1
    of: int = 1

    def share(self, size: int) -> int:
        """Return the size of the part that is read, given the size of the whole weight, in any unit."""
        return size * self.used // self.of


class Operation:
    """An operation: an immutable object whose fields define the computation. Counts are per token of a batch."""

    __slots__ = ()

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values read by the operation."""
        return ()

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The values computed by the operation."""
        return ()

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """The matrices of matrix products, and embedding tables in memory."""
        return ()

    @property
    def vectors(self) -> tuple[Weight, ...]:
        """The other weights: norms, biases, scales, sinks."""
        return ()

    @property
    def products(self) -> tuple[tuple[Value, Weight], ...]:
        """The inputs of matrix products, each with the matrix."""
        return ()

    @property
    def reads(self) -> tuple[Read, ...]:
        """The part of each weight that the operation reads; by default the whole weight."""
        return tuple([Read(weight) for weight in (*self.matrices, *self.vectors)])

    @property
    def lookups(self) -> tuple[Read, ...]:
        """The tables that stay on disk, and the part of each that is read per token."""
        return ()

    @property
    def state(self) -> tuple[int, ...]:
        """The cache layers that the operation reads or writes."""
        return ()

    @property
    def flops(self) -> int:
        """Floating-point operations in matrix products: two per matrix element."""
        return 0

    @property
    def flops_per_position(self) -> int:
        """Additional floating-point operations per position in the cache."""
        return 0


@dataclass(frozen=True, slots=True)
class Producer(Operation):
    """An operation that computes one value."""

    out: Value

    @property
    def outputs(self) -> tuple[Value, ...]:
        return (self.out,)


@dataclass(frozen=True, slots=True)
class Unary(Producer):
    """An operation that computes one value from one value."""

    x: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)
