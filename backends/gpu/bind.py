"""Turns a plan into a program: rewrites the plan, and emits the launches of every operation."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from localllm.backends.allocation import Buffer, deaths
from localllm.backends.base import BackendError, CacheTypes, Limits
from localllm.backends.gpu.device import LEAST_LOCAL
from localllm.backends.gpu.emit import EMITTERS, REWRITES
from localllm.backends.gpu.emit.boundaries import reserve
from localllm.backends.gpu.kernels import largest
from localllm.backends.gpu.kernels.largest import KEYS, SORTED
from localllm.backends.gpu.lowering import FLOATS, Lowering
from localllm.backends.gpu.program import Program
from localllm.backends.gpu.references import Fixed
from localllm.backends.stages import Stage
from localllm.base.notices import Notice, Setting
from localllm.plan import Operation, Plan, Value
from localllm.plan.rewrites.fusion import fuse


def program(
    plan: Plan, limits: Limits, cache: CacheTypes, keep: Collection[Value] = (), compute: str = "",
    local_memory: int = LEAST_LOCAL,
) -> Program:  # fmt: skip
    """Return the launches, buffers and kernels of a plan, for a compute type and a local memory size in bytes.

    Raises BackendError if the plan cannot run.
    """
    plan = fuse(plan, REWRITES, keep)
    low = Lowering(plan, limits, cache, keep, compute, local_memory)
    dying = deaths([op.inputs for op in plan.operations], [*keep, plan.logits])
    made = low.program
    made.stages = [_stage(low, plan, numbers, dying) for numbers in plan.stages]
    made.buffers = low.values.buffers
    made.where = {value.index: low.floats(value) for value in keep}
    if logits := low.values.find(plan.logits, FLOATS):  # None if another device of a split plan computes the logits
        made.where[plan.logits.index] = logits
        _search(low, logits)
    return made


def _stage(low: Lowering, plan: Plan, numbers: range, dying: Sequence[Collection[Value]]) -> Stage[Buffer]:
    """Emit the operations with these indices.

    `dying` lists, for each operation, the values that it is the last to read.
    """
    first, low.received, low.sent = len(low.program.dispatches), [], []
    reserve(low, plan.operations[numbers.start : numbers.stop])
    for number in numbers:
        with low.values.operation(dying[number]):
            _emit(low, plan.operations[number])
    work = slice(first, len(low.program.dispatches))
    return Stage(work, tuple(low.received), tuple(low.sent), tuple(low.looked_up))


def _emit(low: Lowering, op: Operation) -> None:
    emitter = EMITTERS.get(type(op))
    if emitter is None:
        problem = f"no kernels for {type(op).__name__.lower()} on graphics cards yet"
        raise BackendError(Notice(problem, "; use ", Setting("backend", "cpu")))
    emitter(low, op)


def _search(low: Lowering, logits: Buffer) -> None:
    """Add the passes of the top-k search over the logits."""
    made = low.program
    made.scratch[Fixed.PICKED] = 4 * largest.NUMBERS
    for number, count in enumerate(largest.passes(logits.stride, largest.MOST)):
        own, before = KEYS[number % 2], KEYS[(number + 1) % 2]
        size = 8 * -(-count // SORTED) * largest.MOST * low.limits.logit_rows
        made.scratch[own] = max(size, made.scratch.get(own, 0))
        kernel = largest.TopKLogits(PASS=number, SORTED=SORTED, STRIDE=logits.stride)
        grid = (f"keys {number}", SORTED, 1), ("logits", 1, 1), 1
        given = before if number else Fixed.NOTHING
        launch = kernel.launch(grid, logits=logits, numbers=Fixed.PICKED, in_=given, out=own)
        made.has_top_k.append(launch)
