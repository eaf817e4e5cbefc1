"""From a plan to launches: fuse what one kernel can do, then emit operation by operation.

Adding an operation means a kernel, a function in `gpu.emit`, and a row of EMITTERS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from localllm.backends.allocation import Buffer, deaths
from localllm.backends.base import BackendError, CacheTypes, Limits
from localllm.backends.gpu.emit import attention, experts, products, rowwise
from localllm.backends.gpu.emit.context import Lowering
from localllm.backends.gpu.kernels import largest
from localllm.backends.gpu.kernels.largest import KEYS, SORTED
from localllm.backends.gpu.program import Program
from localllm.backends.gpu.references import Fixed
from localllm.backends.stages import Stage
from localllm.notice import Notice, Setting
from localllm.plan import (
    Activate,
    Add,
    Append,
    Attention,
    Embed,
    Experts,
    Glu,
    HeadsAppend,
    Linear,
    LinearAdd,
    LinearGlu,
    LinearGroup,
    Norm,
    Operation,
    Plan,
    Receive,
    Rotate,
    Scale,
    SelectRows,
    Send,
    Softcap,
    Value,
)  # fmt: skip
from localllm.plan.rewrites.fusion import fuse, fuse_additions, fuse_heads, fuse_linears

PASSES = (fuse_additions, fuse_linears, fuse_heads)  # fuse_linears makes groups of at most MOST_TOGETHER

EMITTERS: dict[type[Operation], Callable[[Lowering, Any], None]] = {
    Activate: rowwise.activate,
    Add: rowwise.add,
    Append: attention.append,
    Attention: attention.attention,
    Embed: rowwise.embed,
    Experts: experts.experts,
    Glu: rowwise.glu,
    HeadsAppend: attention.heads_append,
    Linear: products.linear,
    LinearAdd: products.linear_add,
    LinearGlu: products.linear_glu,
    LinearGroup: products.linear_group,
    Norm: rowwise.norm,
    Receive: rowwise.receive,
    Rotate: rowwise.rotate,
    Scale: rowwise.scale,
    SelectRows: rowwise.select,
    Send: rowwise.send,
    Softcap: rowwise.softcap,
}


def lower(plan: Plan, limits: Limits, cache: CacheTypes, keep: Collection[Value] = (), compute: str = "") -> Program:
    """The program of a plan for a device of this compute type. BackendError if the device cannot run the plan."""
    plan = fuse(plan, PASSES, keep)
    low = Lowering(plan, limits, cache, keep, compute)
    program = low.program
    dying = deaths([op.inputs for op in plan.operations], [*keep, plan.logits])
    for numbers in plan.stages:
        first, low.received, low.sent = len(program.dispatches), [], []
        for number in numbers:
            op = plan.operations[number]
            if type(op) not in EMITTERS:
                problem = f"there are no kernels for {type(op).__name__.lower()} on a graphics card yet"
                raise BackendError(Notice(problem, "; use ", Setting("backend", "cpu")))
            with low.allocator.operation(dying[number]):
                EMITTERS[type(op)](low, op)
        work = slice(first, len(program.dispatches))
        program.stages.append(Stage(work, tuple(low.received), tuple(low.sent)))
    program.buffers = low.allocator.buffers
    program.where = {value.index: low.floats(value) for value in keep}
    if any(plan.logits in op.outputs for op in plan.operations):  # not if another place of a split plan makes them
        program.where[plan.logits.index] = low.floats(plan.logits)
        _search(low, low.floats(plan.logits))
    return program


def _search(low: Lowering, logits: Buffer) -> None:
    """The passes of the search for the largest logits."""
    program = low.program
    program.scratch[Fixed.PICKED] = 4 * largest.NUMBERS
    for number, count in enumerate(largest.passes(logits.stride, largest.MOST)):
        own, before = KEYS[number % 2], KEYS[(number + 1) % 2]
        size = 8 * -(-count // SORTED) * largest.MOST * low.limits.logit_rows
        program.scratch[own] = max(size, program.scratch.get(own, 0))
        kernel = largest.LargestLogits(PASS=number, STRIDE=logits.stride)
        buffers = largest.LargestBuffers(logits=logits, in_=before if number else Fixed.NOTHING, out=own)
        program.picks.append(kernel.launch(((f"keys {number}", SORTED, 1), ("logits", 1, 1), 1), buffers))
