"""Fusion: each pass replaces operations that one kernel can run with one fused operation.

A backend names the passes for which it has kernels. Values in `keep` are read after the step, so no pass makes them
internal to a fused operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from localllm.plan.attention import Append, Attention, Rotate
from localllm.plan.fused import Heads, HeadsAppend, LinearAdd, LinearGlu, LinearGroup, RotateEnds
from localllm.plan.operation import Operation
from localllm.plan.operations import Add, Concat, Glu, Linear, Norm, Slice
from localllm.plan.plan import Plan
from localllm.plan.values import Value

Pass = Callable[[Plan, Collection[Value]], Plan]


def fuse(plan: Plan, passes: Sequence[Pass], keep: Collection[Value] = ()) -> Plan:
    """Return the plan after all passes, in order."""
    for rewrite in passes:
        plan = rewrite(plan, keep)
    return plan


def fuse_additions(plan: Plan, keep: Collection[Value] = ()) -> Plan:
    """Fuse an addition into the preceding linear if the linear's result has no other reader and the other term is
    computed earlier.
    """
    operations, uses = plan.operations, _uses(plan, keep)
    made = {value.index: number for number, op in enumerate(operations) for value in op.outputs}
    changed: dict[int, list[Operation]] = {}
    for number, op in enumerate(operations):
        if not isinstance(op, Add) or op.a == op.b:
            continue
        for term, other in ((op.a, op.b), (op.b, op.a)):
            at = made[term.index]
            linear = operations[at]
            own = isinstance(linear, Linear) and linear.out == term and at not in changed
            if own and uses[term.index] == 1 and made[other.index] < at:
                assert isinstance(linear, Linear)
                changed |= {at: [LinearAdd(linear, op)], number: []}
                break
    return _rewritten(plan, changed)


def fuse_linears(plan: Plan, keep: Collection[Value] = (), most: int = 3) -> Plan:
    """Group adjacent linears with the same input and format, at most `most` per group.

    Fuse two linears with the following glu if only the glu reads their results.
    """
    operations, uses = plan.operations, _uses(plan, keep)
    changed: dict[int, list[Operation]] = {}
    at = 0
    while at < len(operations):
        stop = at
        linears: list[Linear] = []
        while stop < len(operations):
            op = operations[stop]
            if not isinstance(op, Linear) or (linears and op.x != linears[0].x):
                break
            linears.append(op)
            stop += 1
        after = operations[stop] if stop < len(operations) else None
        kinds: dict[tuple[str, bool], list[Linear]] = {}
        for linear in linears:
            kinds.setdefault((linear.weight.format, linear.bias is None), []).append(linear)
        if isinstance(after, Glu) and len(kinds) == 1 and _alone_reads(after, linears, uses):
            gate, up = sorted(linears, key=lambda linear: linear.out != after.gate)
            changed |= {at: [LinearGlu(gate, up, after)], at + 1: [], stop: []}
            stop += 1
        elif len(linears) > 1:
            groups = [own[i : i + most] for own in kinds.values() for i in range(0, len(own), most)]
            changed |= {number: [] for number in range(at + 1, stop)}
            changed[at] = [LinearGroup(tuple(group)) if len(group) > 1 else group[0] for group in groups]
        at = max(stop, at + 1)
    return _rewritten(plan, changed)


def _alone_reads(glu: Glu, linears: Sequence[Linear], uses: Mapping[int, int]) -> bool:
    made = {op.out.index for op in linears if uses[op.out.index] == 1 and op.out.width == glu.out.width}
    return len(linears) == 2 and made == {glu.gate.index, glu.up.index}


def fuse_heads(plan: Plan, keep: Collection[Value] = ()) -> Plan:
    """Fuse the norms and rotations of queries and keys into the append of the keys, if both are processed the same way.

    The append must be the only reader of the rotated keys, and the same layer's attention the only reader of the
    rotated queries.
    """
    uses = _uses(plan, keep)
    changed: dict[int, list[Operation]] = {}
    # queries of the layer that writes the cache, not of later layers that share the cache
    queries: dict[int, tuple[int, Value]] = {}
    for number, op in enumerate(plan.operations):
        if isinstance(op, Attention):
            queries.setdefault(op.layer, (number, op.q))
    norms: dict[int, tuple[int, Norm]] = {}  # norms by the index of their output
    rotated: dict[int, tuple[tuple[int, ...], Heads]] = {}
    for number, op in enumerate(plan.operations):
        if isinstance(op, Norm) and uses[op.out.index] == 1:
            norms[op.out.index] = number, op
        elif isinstance(op, Rotate) and uses[op.out.index] == 1:
            before, norm = norms.get(op.x.index, (number, None))
            if norm is None or not _of_each_head(norm, op.head_dim):
                rotated[op.out.index] = (number,), Heads(None, op)
            else:
                rotated[op.out.index] = (before, number), Heads(norm, op)
        elif isinstance(op, Append) and op.layer in queries:
            reader, q = queries[op.layer]
            both = rotated.get(q.index), rotated.get(op.k.index)
            if both[0] is None or both[1] is None or reader < number or both[0][1].kind != both[1][1].kind:
                continue
            changed |= {gone: [] for numbers, _ in (both[0], both[1]) for gone in numbers}
            changed[number] = [HeadsAppend(both[0][1], both[1][1], op)]
    return _rewritten(plan, changed)


def fuse_ends(plan: Plan, keep: Collection[Value] = ()) -> Plan:
    """Rotate the last dimensions of heads in place, if only the concatenated heads are read afterwards."""
    uses = _uses(plan, keep)
    made = {value.index: number for number, op in enumerate(plan.operations) for value in op.outputs}
    changed: dict[int, list[Operation]] = {}
    for number, join in enumerate(plan.operations):
        if not isinstance(join, Concat):
            continue
        others, rotation = plan.operations[made[join.a.index]], plan.operations[made[join.b.index]]
        if not isinstance(others, Slice) or not isinstance(rotation, Rotate):
            continue
        ends = plan.operations[made[rotation.x.index]]
        if not isinstance(ends, Slice) or not _halves(others, ends, join, rotation):
            continue
        parts = others, rotation, ends
        if all(uses[op.out.index] == 1 for op in parts):
            changed |= {made[op.out.index]: [] for op in parts}
            changed[number] = [RotateEnds(ends, rotation, others, join)]
    return _rewritten(plan, changed)


def _halves(first: Slice, last: Slice, join: Concat, rotation: Rotate) -> bool:
    """Return whether the slices are the two parts of each head of one value, with the last part rotated."""
    size = last.x.width // last.groups
    return (
        first.x == last.x and first.groups == last.groups == join.groups and rotation.head_dim == size - last.start
        and (first.start, first.stop, last.stop) == (0, last.start, size)
    )  # fmt: skip


def _of_each_head(norm: Norm, head_dim: int) -> bool:
    """Return whether the norm applies to each head separately, with the same weights and without a bias."""
    return (
        norm.kind == "rms" and norm.bias is None and norm.weight.shape == (head_dim,) and norm.x.width % head_dim == 0
    )


def _uses(plan: Plan, keep: Collection[Value]) -> Mapping[int, int]:
    """Return the number of readers of each value, by index; keeping a value counts as one."""
    uses = plan.uses
    uses.update(value.index for value in keep)
    return uses


def _rewritten(plan: Plan, changed: Mapping[int, Sequence[Operation]]) -> Plan:
    """Return the plan with each operation in `changed`, by index, replaced by the given operations."""
    own = [changed.get(number, (op,)) for number, op in enumerate(plan.operations)]
    new = [0, *accumulate(len(operations) for operations in own)]  # old index -> new index
    operations = tuple([op for operations in own for op in operations])
    return replace(plan, operations=operations, starts=tuple([new[at] for at in plan.starts]))
