"""From a plan to a program: rewrite it, emit every operation's calls, and place barriers where data requires them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from localllm.backends.allocation import deaths
from localllm.backends.base import F16_CACHE, BackendError, CacheTypes, Limits
from localllm.backends.cpu.buffers import Buffers
from localllm.backends.cpu.emit import EMITTERS, REWRITES
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.lowering import Lowering
from localllm.backends.cpu.program import PartCalls, Program, place_barriers
from localllm.plan import Operation, Part, Plan, Value
from localllm.plan.rewrites.fusion import fuse


def program(
    plan: Plan, limits: Limits, threads: int, isa: Isa, cache: CacheTypes = F16_CACHE, keep: Collection[Value] = ()
) -> Program:
    """Calls, buffers and kernels of a plan; BackendError if the CPU cannot run it."""
    plan = fuse(plan, REWRITES, keep)
    low = Lowering(plan, limits, threads, cache, keep, isa)
    steps = ([*(op.inputs for op in plan.operations[part.start : part.stop]), part.leaves] for part in plan.parts)
    dying = iter(deaths([read for of_part in steps for read in of_part], [*keep, plan.logits]))
    parts = [_part(low, part, dying) for part in plan.parts]
    place_barriers(low.calls, parts)
    kept = {value.index: low.floats(value) for value in keep}
    buffers, logits = Buffers(low.values.buffers, limits), low.floats(plan.logits)
    return Program(low.calls, low.kernels, low.panels, low.scratch, buffers, logits, kept, low.routings, parts)


def _part(low: Lowering, part: Part, dying: Iterator[tuple[Value, ...]]) -> PartCalls:
    """Emit the operations of a part; `dying` gives the values that die with each, and as the part is left."""
    enters, first = tuple([(value, low.make(value)) for value in part.enters]), len(low.calls)
    for op in low.plan.operations[part.start : part.stop]:
        with low.values.operation(next(dying)):
            _emit(low, op)
    with low.values.operation(next(dying)):
        leaves = tuple([(value, low.floats(value)) for value in part.leaves])
    return PartCalls(slice(first, len(low.calls)), enters, leaves)


def _emit(low: Lowering, op: Operation) -> None:
    emitter = EMITTERS.get(type(op))
    if emitter is None:
        name = type(op).__name__.lower()
        raise BackendError(f"the cpu backend has no kernels for {name} yet; --backend reference runs it, slowly")
    emitter(low, op)
