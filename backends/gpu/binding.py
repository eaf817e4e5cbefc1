"""Buffers for the values of a plan while it is bound: each is taken for a value and given back after its last use."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from backends.base import CacheTypes, Limits
from backends.gpu import formats
from backends.gpu.program import NOTHING, Buffer, Launch, Program, Stage
from backends.plan import Plan, Rows, Value, Weight
from backends.usage import uses_of


class Binding:
    """A plan on its way to a program: its values' buffers, taken and given back as operations follow."""

    def __init__(self, plan: Plan, limits: Limits, cache: CacheTypes, keep: Collection[Value], compute: str) -> None:
        self.plan, self.limits, self.cache, self.keep, self.compute = plan, limits, cache, keep, compute
        self.most = {"batch": limits.rows, "logits": limits.logit_rows}
        self.out = Program()
        self.where: dict[int, Buffer] = {}
        self.prepared: dict[int, dict[str, Buffer]] = {}  # by value and kind: what products read instead of it
        self.free: dict[tuple[Rows, int], list[Buffer]] = {}
        self.uses = uses_of(plan)
        self.uses.update(value.index for value in keep)  # a use that never comes

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

    def used(self, *values: Value) -> None:
        for value in values:
            self.uses[value.index] -= 1
            if not self.uses[value.index]:
                self.give(self.where.pop(value.index))
                for buffer in self.prepared.pop(value.index, {}).values():
                    self.give(buffer)

    def stage(
        self, label: str, rows: Rows, few: Sequence[Launch], many: Sequence[Launch] = (), one: Sequence[Launch] = (),
        some: Sequence[Launch] | None = None,
    ) -> None:  # fmt: skip
        optional = None if some is None else tuple(some)
        self.out.stages.append(Stage(label, rows, tuple(few), tuple(many), tuple(one), optional))

    def matrix(self, weight: Weight) -> str:
        formats.check(weight)
        self.out.matrices[weight.name] = weight
        return f"weights:{weight.name}"

    def vector(self, weight: Weight | None) -> str:
        if weight is None:
            return NOTHING
        self.out.vectors[weight.name] = weight
        return f"vector:{weight.name}"
