"""Turns a plan into a program: rewrites the plan, emits the kernel calls of every operation, and places barriers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from localllm.backends.allocation import Buffer, deaths
from localllm.backends.base import F16_CACHE, BackendError, CacheTypes, Limits
from localllm.backends.cpu.buffers import Buffers
from localllm.backends.cpu.emit import EMITTERS, REWRITES
from localllm.backends.cpu.emit.boundaries import reserve
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.lowering import Lowering
from localllm.backends.cpu.program import Program, place_barriers
from localllm.backends.stages import Stage
from localllm.base.notices import Notice, Setting
from localllm.plan import Operation, Plan, Value
from localllm.plan.rewrites.fusion import fuse


def program(
    plan: Plan, limits: Limits, threads: int, isa: Isa, cache: CacheTypes = F16_CACHE, keep: Collection[Value] = ()
) -> Program:
    """Return the calls, buffers and kernels of a plan. Raises BackendError if the CPU cannot run the plan."""
    plan = fuse(plan, REWRITES, keep)
    low = Lowering(plan, limits, threads, cache, keep, isa)
    dying = deaths([op.inputs for op in plan.operations], [*keep, plan.logits])
    stages = [_stage(low, numbers, dying) for numbers in plan.stages]
    place_barriers(low.calls, stages)
    kept = {value.index: low.floats(value) for value in keep}
    buffers, logits = Buffers(low.values.buffers, limits), low.values.find(plan.logits, None)
    return Program(
        low.calls, low.operations, low.kernels, low.panels, low.scratch, buffers, logits, kept, low.routings, stages
    )


def _stage(low: Lowering, numbers: range, dying: Sequence[Collection[Value]]) -> Stage[Buffer]:
    """Emit the operations with these indices.

    `dying` lists, for each operation, the values that it is the last to read.
    """
    first, low.received, low.sent = len(low.calls), [], []
    reserve(low, low.plan.operations[numbers.start : numbers.stop])
    for number in numbers:
        with low.values.operation(dying[number]):
            _emit(low, low.plan.operations[number])
    return Stage(slice(first, len(low.calls)), tuple(low.received), tuple(low.sent), tuple(low.looked_up))


def _emit(low: Lowering, op: Operation) -> None:
    emitter = EMITTERS.get(type(op))
    if emitter is None:
        problem = f"the cpu backend has no kernels for {type(op).__name__.lower()} yet"
        raise BackendError(Notice(problem, "; ", Setting("backend", "reference"), " runs it, slowly"))
    emitter(low, op)
    low.operations += [op] * (len(low.calls) - len(low.operations))
