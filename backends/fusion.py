"""Which operations of a plan can run as one: found from who reads a value, how often and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from localllm.plan import (
    Add,
    Append,
    Attention,
    Glu,
    Linear,
    Norm,
    Plan,
    Rotate,
    Value,
)  # fmt: skip


def additions_into_linears(plan: Plan, uses: Counter[int]) -> dict[int, int]:
    """{linear: addition}, by number: the addition alone reads the linear's result, and its other operand is older."""
    operations = plan.operations
    made = {value.index: number for number, op in enumerate(operations) for value in op.outputs}
    fused: dict[int, int] = {}
    for number, op in enumerate(operations):
        if isinstance(op, Add) and op.a is not op.b:
            for term, other in ((op.a, op.b), (op.b, op.a)):
                at = made[term.index]
                linear = operations[at]
                own = isinstance(linear, Linear) and linear.out == term
                if own and uses[term.index] == 1 and made[other.index] < at:
                    fused[at] = number
                    break
    return fused


@dataclass(frozen=True, slots=True)
class Together:
    """Neighbouring linears that read the same value, and the glu right after two of them if it alone reads both."""

    linears: tuple[Linear, ...]
    glu: Glu | None

    def __len__(self) -> int:
        return len(self.linears) + (self.glu is not None)


def linears_together(plan: Plan, uses: Counter[int], additions: Mapping[int, int]) -> dict[int, Together]:
    """{number of the first linear: the run that it begins}; a linear with an addition stays alone."""
    operations = plan.operations
    found: dict[int, Together] = {}
    at = 0
    while at < len(operations):
        linears: list[Linear] = []
        for number in range(at, len(operations)):
            op = operations[number]
            if not isinstance(op, Linear) or number in additions or (linears and op.x is not linears[0].x):
                break
            linears.append(op)
        at += max(1, len(linears))
        after = operations[at] if at < len(operations) else None
        glu = after if isinstance(after, Glu) and _alone_reads(after, linears, uses) else None
        if len(linears) > 1:
            found[at - len(linears)] = Together(tuple(linears), glu)
    return found


def _alone_reads(glu: Glu, linears: list[Linear], uses: Counter[int]) -> bool:
    made = {op.out.index for op in linears if uses[op.out.index] == 1 and op.out.width == glu.out.width}
    return len(linears) == 2 and made == {glu.gate.index, glu.up.index}


@dataclass(frozen=True, slots=True)
class Heads:
    """The rotation of the heads of queries or keys, and the norm of each head before it, if there is one."""

    norm: Norm | None
    rotation: Rotate
    numbers: tuple[int, ...]  # of these operations

    @property
    def x(self) -> Value:
        return self.norm.x if self.norm is not None else self.rotation.x

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for queries and keys that one kernel can prepare."""
        rotation, norm = self.rotation, self.norm
        return rotation.head_dim, rotation.rope.style, rotation.rope.n_rot, norm is not None, norm and norm.eps


def heads_into_appends(plan: Plan, uses: Counter[int]) -> dict[int, tuple[Heads, Heads]]:
    """{number of an append: its queries and its keys}.

    The append alone reads the rotated keys, its attention alone the rotated queries, and both are prepared alike.
    """
    operations = plan.operations
    found: dict[int, tuple[Heads, Heads]] = {}
    for stage in plan.stages:
        made: dict[int, Heads] = {}  # by what is read of them once
        norms: dict[int, tuple[int, Norm]] = {}
        queries = {op.layer: op.q for op in (operations[n] for n in stage) if isinstance(op, Attention)}
        for number in stage:
            op = operations[number]
            if isinstance(op, Norm) and uses[op.out.index] == 1:
                norms[op.out.index] = number, op
            elif isinstance(op, Rotate) and uses[op.out.index] == 1:
                before, norm = norms.get(op.x.index, (number, None))
                if norm is None or not _of_each_head(norm, op.head_dim):
                    made[op.out.index] = Heads(None, op, (number,))
                else:
                    made[op.out.index] = Heads(norm, op, (before, number))
            elif isinstance(op, Append) and op.layer in queries:
                query, key = made.get(queries[op.layer].index), made.get(op.k.index)
                if query is not None and key is not None and query.kind == key.kind:
                    found[number] = query, key
    return found


def _of_each_head(norm: Norm, head_dim: int) -> bool:
    """Whether the norm is of each head by itself, with the same weights, and without a bias."""
    return (
        norm.kind == "rms" and norm.bias is None and norm.weight.shape == (head_dim,) and norm.x.width % head_dim == 0
    )
