"""Fused operations: several operations of a plan that a backend runs as one kernel.

A fused operation keeps the operations that it replaces in `operations`; running them in order defines its result. Its
inputs and outputs are derived from them. The passes of `plan.rewrites.fusion` insert fused operations into a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.plan.attention import Append, Rotate
from localllm.plan.operation import Operation, Read
from localllm.plan.operations import Add, Concat, Glu, Linear, Norm, Slice
from localllm.plan.values import Value
from localllm.plan.weights import Weight


class Fused(Operation):
    """Several operations that run as one."""

    __slots__ = ()

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The replaced operations, in order."""
        raise NotImplementedError

    @property
    def internal(self) -> tuple[Value, ...]:
        """Values that are computed and read only inside this operation."""
        return ()

    @property
    def inputs(self) -> tuple[Value, ...]:
        made = {value.index for op in self.operations for value in op.outputs}
        read = {value.index: value for op in self.operations for value in op.inputs}
        return tuple([value for index, value in read.items() if index not in made])

    @property
    def outputs(self) -> tuple[Value, ...]:
        internal = {value.index for value in self.internal}
        return tuple([value for op in self.operations for value in op.outputs if value.index not in internal])

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return tuple([weight for op in self.operations for weight in op.matrices])

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return tuple([weight for op in self.operations for weight in op.vectors])

    @property
    def products(self) -> tuple[tuple[Value, Weight], ...]:
        return tuple([product for op in self.operations for product in op.products])

    @property
    def reads(self) -> tuple[Read, ...]:
        return tuple([read for op in self.operations for read in op.reads])

    @property
    def lookups(self) -> tuple[Read, ...]:
        return tuple([read for op in self.operations for read in op.lookups])

    @property
    def state(self) -> tuple[int, ...]:
        return tuple([layer for op in self.operations for layer in op.state])

    @property
    def flops(self) -> int:
        return sum(op.flops for op in self.operations)

    @property
    def flops_per_position(self) -> int:
        return sum(op.flops_per_position for op in self.operations)


@dataclass(frozen=True, slots=True)
class LinearAdd(Fused):
    """A linear, and the addition of an earlier value to its result."""

    linear: Linear
    add: Add

    @property
    def other(self) -> Value:
        """The value that is added to the linear's result."""
        return self.add.b if self.add.a == self.linear.out else self.add.a

    @property
    def operations(self) -> tuple[Operation, ...]:
        return self.linear, self.add

    @property
    def internal(self) -> tuple[Value, ...]:
        return (self.linear.out,)


@dataclass(frozen=True, slots=True)
class LinearGroup(Fused):
    """Several linears with the same input."""

    linears: tuple[Linear, ...]

    @property
    def operations(self) -> tuple[Operation, ...]:
        return self.linears


@dataclass(frozen=True, slots=True)
class LinearGlu(Fused):
    """Two linears with the same input, and the gated linear unit of their results."""

    gate: Linear
    up: Linear
    glu: Glu

    @property
    def operations(self) -> tuple[Operation, ...]:
        return self.gate, self.up, self.glu

    @property
    def internal(self) -> tuple[Value, ...]:
        return self.gate.out, self.up.out


@dataclass(frozen=True, slots=True)
class Heads:
    """The rotation of query or key heads, after an optional norm of each head."""

    norm: Norm | None
    rotation: Rotate

    @property
    def x(self) -> Value:
        return self.norm.x if self.norm is not None else self.rotation.x

    @property
    def operations(self) -> tuple[Operation, ...]:
        return (self.norm, self.rotation) if self.norm is not None else (self.rotation,)

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for queries and keys if one kernel can process both."""
        rotation, norm = self.rotation, self.norm
        rope = rotation.rope
        return rotation.head_dim, rope.style, rope.n_rot, rope.axes, norm is not None, norm and norm.eps


@dataclass(frozen=True, slots=True)
class RotateEnds(Fused):
    """The rotation of the last dimensions of every head, which are sliced off and concatenated again."""

    ends: Slice
    rotation: Rotate
    others: Slice
    join: Concat

    @property
    def operations(self) -> tuple[Operation, ...]:
        return self.ends, self.rotation, self.others, self.join

    @property
    def internal(self) -> tuple[Value, ...]:
        return self.ends.out, self.rotation.out, self.others.out


@dataclass(frozen=True, slots=True)
class HeadsAppend(Fused):
    """Queries and keys, normed and rotated head by head, and the append of keys and values to the cache."""

    query: Heads
    key: Heads
    append: Append

    @property
    def operations(self) -> tuple[Operation, ...]:
        return *self.query.operations, *self.key.operations, self.append

    @property
    def internal(self) -> tuple[Value, ...]:
        """All values except the rotated queries, which attention reads."""
        made: Sequence[Value] = [value for op in self.operations for value in op.outputs]
        return tuple([value for value in made if value != self.query.rotation.out])


def flattened(operations: Sequence[Operation]) -> list[Operation]:
    """Replace each fused operation with the operations in it."""
    found: list[Operation] = []
    for op in operations:
        found += flattened(op.operations) if isinstance(op, Fused) else [op]
    return found
