"""The interface of all operations of a plan, for folds over plans and for rewrites."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.values import Value
from localllm.plan.weights import Weight


@dataclass(frozen=True, slots=True)
class Read:
    """The part of a weight that a row of a batch reads: `used` of its `of` equal shares."""

    weight: Weight
    used: int = 1
    of: int = 1

    def share(self, size: int) -> int:
        """Return the size of the part that is read, given the size of the whole weight in any unit."""
        return size * self.used // self.of


class Operation:
    """An operation: a frozen value whose fields define the computation. Counts are per row of a batch."""

    __slots__ = ()

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values that it reads."""
        return ()

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The values that it makes."""
        return ()

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """The matrices that it multiplies by, and its lookup tables in memory."""
        return ()

    @property
    def vectors(self) -> tuple[Weight, ...]:
        """The other weights: norms, biases, scales, sinks."""
        return ()

    @property
    def products(self) -> tuple[tuple[Value, Weight], ...]:
        """The inputs that it multiplies by a matrix, each with that matrix."""
        return ()

    @property
    def reads(self) -> tuple[Read, ...]:
        """The part of each weight that it reads: by default all."""
        return tuple([Read(weight) for weight in (*self.matrices, *self.vectors)])

    @property
    def lookups(self) -> tuple[Read, ...]:
        """The tables that stay in the file, and the part of each that a row reads there."""
        return ()

    @property
    def state(self) -> tuple[int, ...]:
        """The layers of the cache that it reads or writes."""
        return ()

    @property
    def flops(self) -> int:
        """Floating-point operations in products with matrices, two for every number of a matrix."""
        return 0

    @property
    def flops_per_position(self) -> int:
        """Additional operations for every position in the cache."""
        return 0


@dataclass(frozen=True, slots=True)
class Producer(Operation):
    """An operation that makes one value."""

    out: Value

    @property
    def outputs(self) -> tuple[Value, ...]:
        return (self.out,)


@dataclass(frozen=True, slots=True)
class Unary(Producer):
    """An operation that makes one value from one value."""

    x: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)
