"""What every operation of a plan knows of itself, whichever it is: the ground for folds over plans and for rewrites."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.values import Value
from localllm.plan.weights import Weight


@dataclass(frozen=True, slots=True)
class Read:
    """What one row of a batch reads of a weight: `used` of its `of` equal shares."""

    weight: Weight
    used: int = 1
    of: int = 1

    def share(self, size: int) -> int:
        """The part that is read if the whole weight has this size, in any unit."""
        return size * self.used // self.of


class Operation:
    """One operation: a frozen value whose fields say what is computed. Counts are for one row of a batch."""

    __slots__ = ()

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Values that it reads."""
        return ()

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Values that it makes."""
        return ()

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """Weights that it multiplies by, and tables that it looks rows up in."""
        return ()

    @property
    def vectors(self) -> tuple[Weight, ...]:
        """The other weights: of norms, biases, scales, sinks."""
        return ()

    @property
    def products(self) -> tuple[tuple[Value, Weight], ...]:
        """Inputs that it multiplies by a matrix, each with that matrix."""
        return ()

    @property
    def reads(self) -> tuple[Read, ...]:
        """What it reads of each weight: by default all of it."""
        return tuple([Read(weight) for weight in (*self.matrices, *self.vectors)])

    @property
    def state(self) -> tuple[int, ...]:
        """Layers of the cache that it reads or writes."""
        return ()

    @property
    def flops(self) -> int:
        """Floating-point operations in products with matrices, two for every number of a matrix."""
        return 0

    @property
    def flops_per_position(self) -> int:
        """More of them for every position in the cache."""
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
