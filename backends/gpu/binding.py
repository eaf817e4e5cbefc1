"""Buffers for the values of a plan while it is bound: each is taken for a value and given back after its last use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from localllm.backends.base import CacheTypes, Limits
from localllm.backends.gpu import formats
from localllm.backends.gpu.kernels import delivered
from localllm.backends.gpu.products import block_words
from localllm.backends.gpu.program import NOTHING, Argument, Buffer, Dispatch, Launch, Program
from localllm.plan import Plan, Rows, Value, Weight, flattened


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where a kernel that makes rows is to put them: as floats, as activation blocks, or both."""

    floats: Buffer | None
    blocks: Buffer | None = None
    block_words: int = 0  # of a row

    @property
    def constants(self) -> dict[str, int]:
        return delivered(self.floats is not None, self.block_words)

    @property
    def arguments(self) -> tuple[Argument, Argument]:
        return self.floats or NOTHING, self.blocks or NOTHING


class Binding:
    """A plan on its way to a program: its values' buffers, taken and given back as operations follow."""

    def __init__(self, plan: Plan, limits: Limits, cache: CacheTypes, keep: Collection[Value], compute: str) -> None:
        self.plan, self.limits, self.cache, self.keep, self.compute = plan, limits, cache, keep, compute
        self.most = {"batch": limits.rows, "logits": limits.logit_rows}
        self.out = Program()
        self.where: dict[int, Buffer] = {}
        self.received: list[tuple[Value, Buffer]] = []  # by the stage
        self.sent: list[tuple[Value, Buffer]] = []
        self.prepared: dict[int, dict[str, Buffer]] = {}  # by value and kind: what products read instead of it
        self.free: dict[tuple[Rows, int], list[Buffer]] = {}
        self.uses = plan.uses
        self.uses.update(value.index for value in keep)  # a use that never comes
        self.wants_blocks, self.wants_floats = _readers(plan, keep)

    def take(self, rows: Rows, stride: int) -> Buffer:
        free = self.free.get((rows, stride))
        if free:
            return free.pop()
        buffer = Buffer(len(self.out.buffers), rows, stride)
        self.out.buffers.append(buffer)
        return buffer

    def give(self, buffer: Buffer) -> None:
        self.free.setdefault((buffer.rows, buffer.stride), []).append(buffer)

    def value(self, value: Value) -> Buffer:
        self.where[value.index] = self.take(value.rows, value.width)
        return self.where[value.index]

    def deliver(self, value: Value) -> Delivery:
        """For a kernel that can make activation blocks: what is read of the value."""
        index, words, blocks = value.index, 0, None
        if index in self.wants_blocks:
            words = block_words(value.width)
            self.prepared[index] = {"int8": (blocks := self.take(value.rows, words))}
        return Delivery(self.value(value) if index in self.wants_floats else None, blocks, words)

    def used(self, *values: Value) -> None:
        for value in values:
            self.uses[value.index] -= 1
            if not self.uses[value.index]:
                if value.index in self.where:
                    self.give(self.where.pop(value.index))
                for buffer in self.prepared.pop(value.index, {}).values():
                    self.give(buffer)

    def dispatch(
        self, label: str, rows: Rows, few: Sequence[Launch], many: Sequence[Launch] = (), one: Sequence[Launch] = (),
        some: Sequence[Launch] | None = None,
    ) -> None:  # fmt: skip
        optional = None if some is None else tuple(some)
        self.out.dispatches.append(Dispatch(label, rows, tuple(few), tuple(many), tuple(one), optional))

    def matrix(self, weight: Weight) -> str:
        formats.check(weight)
        self.out.matrices[weight.name] = weight
        return f"weights:{weight.name}"

    def vector(self, weight: Weight | None) -> str:
        if weight is None:
            return NOTHING
        self.out.vectors[weight.name] = weight
        return f"vector:{weight.name}"


def _readers(plan: Plan, keep: Collection[Value]) -> tuple[set[int], set[int]]:
    """Values that products read as activation blocks, and those that anything reads as floats."""
    floats = {plan.logits.index, *(value.index for value in keep)}
    blocks: set[int] = set()
    for op in flattened(plan.operations):
        for x, weight in op.products:
            (blocks if weight.format in formats.QUANTIZED else floats).add(x.index)
        multiplied = {x.index for x, _ in op.products}
        floats |= {value.index for value in op.inputs if value.index not in multiplied}
    return blocks, floats
