"""Run a segment on the NumPy reference. Large matrices are computed from their distinct rows, because NumPy is slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.backends.base import CacheTypes, Limits
from localllm.backends.gpu.conformance.samples import EXPERTS, PERIOD
from localllm.backends.gpu.conformance.segments import Segment
from localllm.backends.reference import ReferenceExecutable
from localllm.plan import (
    BLOCK,
    F32,
    Batch,
    Concat,
    Embed,
    Experts,
    Linear,
    Operation,
    Plan,
    Send,
    Slice,
    Value,
    flattened,
)

BLOCKS = 5  # cache blocks per sequence


class _Cycled:
    """The matrices of an expert stack in which the same few experts repeat."""

    def __init__(self, matrices: F32) -> None:
        self._matrices = matrices

    def __getitem__(self, expert: int) -> F32:
        found: F32 = self._matrices[expert % len(self._matrices)]
        return found


class SegmentReference(ReferenceExecutable):
    """Runs a segment with `BLOCKS` cache blocks."""

    def __init__(self, segment: Segment, limits: Limits, cache: CacheTypes) -> None:
        self._few: set[str] = set()  # stacks with few distinct experts
        self._tables = [op.table.shape[0] for op in flattened(segment.operations) if isinstance(op, Embed)]
        plan = self._shortened(segment.plan)
        positions = BLOCKS * BLOCK
        super().__init__(plan, replace(limits, positions=positions, rows=256, logit_rows=256), cache, _quiet)
        weights: dict[str, Any] = self._weights
        weights |= {name: _Cycled(self._weights[name]) for name in self._few}

    def step(self, batch: Batch, received: list[F32] | None = None) -> list[F32]:  # type: ignore[override]
        tokens = batch.tokens % PERIOD if any(rows > PERIOD for rows in self._tables) else batch.tokens
        self.begin(replace(batch, tokens=tokens))
        found = self.run(received or ())
        return (
            [rows.copy() for rows in found] if isinstance(self._plan.operations[-1], Send) else [self.result().copy()]
        )

    def _shortened(self, plan: Plan) -> Plan:
        """Return the plan with each large matrix reduced to its distinct rows."""
        made, values = list[Operation](), list(plan.values)

        def value(width: int, like: Value) -> Value:
            values.append(Value(len(values), width, like.rows, like.name))
            return values[-1]

        for op in flattened(plan.operations):
            if isinstance(op, Embed) and not op.positions and op.table.shape[0] > PERIOD:
                op = replace(op, table=op.table.part(0, PERIOD))
            if isinstance(op, Experts):
                stacks = {name: self._of_few(getattr(op, name)) for name in ("gate", "up", "down")}
                op = replace(op, **stacks)
            if not isinstance(op, Linear) or op.out.width <= PERIOD:
                made.append(op)
                continue
            rows = value(PERIOD, op.out)
            bias = None if op.bias is None else op.bias.part(0, PERIOD)
            made.append(replace(op, out=rows, weight=op.weight.part(0, PERIOD), bias=bias))
            while rows.width < op.out.width:
                twice = value(2 * rows.width, op.out)
                made.append(Concat(twice, rows, rows, 1))
                rows = twice
            made.append(Slice(op.out, rows, 1, 0, op.out.width))
        return replace(plan, operations=tuple(made), values=tuple(values))

    def _of_few(self, stack: Any) -> Any:
        if stack.weight.shape[0] <= EXPERTS:
            return stack
        own = stack.weight.part(0, EXPERTS)
        self._few.add(own.name)
        return replace(stack, weight=own)


def _quiet(what: str, done: int, total: int) -> None: ...
