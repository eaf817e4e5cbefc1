"""Who reads what in a plan: the facts that decide when a buffer is free and which operations can be made one."""

from __future__ import annotations

from collections import Counter

from backends.plan import Add, Append, Attention, Embed, Experts, Glu, Linear, Operation, Plan, Value


def inputs_of(op: Operation) -> tuple[Value, ...]:
    match op:
        case Embed():
            return ()
        case Append(k=k, v=v):
            return (k, v)
        case Attention(q=q):
            return (q,)
        case Glu(gate=gate, up=up):
            return (gate, up)
        case Add(a=a, b=b):
            return (a, b)
        case Experts(x=x, router=router):
            return (x, router)
    return (op.x,)


def embedded_rows(plan: Plan) -> int:
    """Tokens that the plan knows: rows of the smallest table of embeddings, any number where it looks up none."""
    return min((op.table.shape[0] for op in plan.operations if isinstance(op, Embed)), default=1 << 31)


def uses_of(plan: Plan) -> Counter[int]:
    uses = Counter(value.index for op in plan.operations for value in inputs_of(op))
    uses[plan.logits.index] += 1  # the caller's
    uses.update(value.index for part in plan.parts for value in part.leaves)
    return uses


def additions_into_linears(plan: Plan, uses: Counter[int]) -> dict[int, int]:
    """{linear: addition} where an addition is the only reader of a linear's result and its other operand is older."""
    operations = plan.operations
    made = {value.index: part.start - 1 for part in plan.parts for value in part.enters}
    made |= {op.out.index: number for number, op in enumerate(operations) if not isinstance(op, Append)}
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
