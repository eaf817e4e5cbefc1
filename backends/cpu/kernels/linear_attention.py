"""Linear attention, as `plan.LinearAttention` defines it.

A task is some heads of one sequence that share a key head. It processes the sequence block by block; `state_heads` and
`channels` emit what a head computes.
"""

from __future__ import annotations

from localllm.backends.cpu.kernels.common import PlanKernel, Step, kernel, tasks
from localllm.backends.cpu.kernels.state_heads import AttendArguments, Attending, RecurrenceHead
from localllm.backends.cpu.simd import Function, Value
from localllm.plan import BLOCK


def linear_attention(kind: Attending, emits: type[RecurrenceHead]) -> PlanKernel[AttendArguments]:
    """Emit `plan.LinearAttention`."""
    of = kind.of
    group = of.heads // of.key_heads

    def body(f: Function, a: AttendArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        # Heads of a task share the products of keys. Four tasks per thread keep all threads busy to the end.
        wanted = step.runs * of.heads // (threads * 4)
        size = f.minimum(f.select(wanted > 1, wanted, f.i64(1)), group)
        parts = (size + (group - 1)) // size
        with tasks(f, a.counter, step.runs * parts * of.key_heads, thread, threads) as task:
            run, key_head, part = task // (parts * of.key_heads), task // parts % of.key_heads, task % parts
            row, last = f.var(f.load_i32(step.run_starts, run)), f.load_i32(step.run_starts, run + 1)
            table = step.tables + f.load_i32(step.sequence, row.get()) * step.table_stride
            with f.while_(lambda: row.get() < last):
                first = row.get()
                position = f.load_i32(step.positions, first)
                at, column = position % BLOCK, position // BLOCK
                block, count = f.load_i32(table, column), f.minimum(last - first, f.i64(BLOCK) - at)
                emits(f, a, kind, key_head, key_head, a.scratch.row(thread)).prepare(first, count, block, at)
                with f.loop(part * size, f.minimum(part * size + size, group)) as number:
                    head = number * of.key_heads + key_head if kind.tiled else key_head * group + number
                    emitter = emits(f, a, kind, head, key_head, a.scratch.row(thread))
                    with f.when(at.equals(0)):
                        with f.when(position.equals(0)):
                            emitter.clear(block)
                        with f.when(position.differs(0)):
                            emitter.advance(f.load_i32(table, column - 1), block)
                    emitter.segment(first, count, block, at)
                row.set(first + count)

    return kernel(f"linear_attention_{kind.name}", AttendArguments, body)
