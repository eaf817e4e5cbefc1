"""The CPU backend: open it, bind a plan, step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.backends.allocation import Buffer
from localllm.backends.base import F16_CACHE, BackendError, CacheTypes, Limits, Progress, Routing
from localllm.backends.checks import (
    check_blocks,
    check_cache,
    check_content,
    check_copy,
    check_limits,
    check_replacement,
    not_finite,
)
from localllm.backends.cpu import bind, budget, rope, weights
from localllm.backends.cpu.cache import CACHE, FOUR
from localllm.backends.cpu.isa import Isa, host
from localllm.backends.cpu.jit import Library
from localllm.backends.cpu.kernels import bandwidth, matrix
from localllm.backends.cpu.kernels.common import Step
from localllm.backends.cpu.kernels.executor import Entry
from localllm.backends.cpu.memory import address
from localllm.backends.cpu.pool import Pool
from localllm.backends.cpu.program import Program
from localllm.backends.cpu.simd import LANES
from localllm.backends.cpu.storage import Storage
from localllm.plan import F32, Batch, Experts, Plan, Tensor, Value
from localllm.quant.codecache import default_folder

READ_AT_MOST = 512 << 20  # bytes read by a bandwidth measurement
ROPE_STEP = 1024  # positions by which rope tables grow


def default_threads() -> int:
    """Number of processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


class CpuBackend:
    """Kernels for one instruction set and a pool of threads; several models can be bound to it."""

    name = "cpu"

    def __init__(
        self, threads: int | None = None, isa: Isa | None = None, cache: Path | Literal["default"] | None = "default"
    ) -> None:
        if threads is not None and not 1 <= threads <= 1024:
            raise BackendError(f"threads is {threads}; give a number from 1 to 1024")
        self.isa = isa or host()
        self.library = Library(self.isa, default_folder("kernels") if cache == "default" else cache)
        self.pool = Pool(self.library, threads or default_threads())
        self._stop = weakref.finalize(self, self.pool.close)  # also if the caller forgets to close

    def describe(self) -> str:
        return f"cpu: {self.isa.cpu}, {self.isa.name}, {self.pool.threads} thread{'s' * (self.pool.threads > 1)}"

    def bind(
        self,
        plan: Plan,
        limits: Limits,
        cache: CacheTypes = F16_CACHE,
        progress: Progress | None = None,
        keep: Collection[Value] = (),
    ) -> CpuExecutable:
        check_cache(cache, CACHE)
        return CpuExecutable(self, plan, limits, cache, progress, keep)

    def close(self) -> None:
        self._stop()


class CpuExecutable:
    """A plan bound to memory. One step at a time."""

    def __init__(
        self,
        backend: CpuBackend,
        plan: Plan,
        limits: Limits,
        cache: CacheTypes,
        progress: Progress | None,
        keep: Collection[Value],
    ) -> None:
        self.limits, self._plan, self._pool, self._library = limits, plan, backend.pool, backend.library
        self._backend = backend  # keeps its threads alive
        self._closed = False
        check_limits(limits)
        threads, isa = backend.pool.threads, backend.isa
        program = bind.program(plan, limits, threads, isa, cache, keep)
        kernels = [*program.kernels.values(), *(matrix.repack(f) for f in {w.format for w in plan.matrices.values()})]
        report = progress or (lambda what, done, total: None)
        backend.library.load(kernels, lambda done, total, name: report("compiling kernels", done, total))
        loading = partial(report, "loading weights")
        self._storage = Storage(program, plan, limits, threads, cache, backend.library, loading)
        self._types = CACHE[cache.keys], CACHE[cache.values]
        self.cache_layout = f"cpu {cache.keys} {cache.values} {LANES}x{FOUR}"  # as defined by backends.cpu.cache
        sizes = [part.shape[1] for part in self._storage.cache]
        self.block_bytes = tuple(k + v for k, v in zip(sizes[::2], sizes[1::2], strict=True))
        self._rope_filled = 0
        self._arguments = [
            call.arguments.pack(partial(self._storage.locate, call=number)) for number, call in enumerate(program.calls)
        ]
        self.entries = np.array(
            [
                Entry(
                    kernel=backend.library.address(call.kernel), arguments=address(arguments),
                    barrier=int(call.barrier), ticks=0, waited=0,
                ).pack()
                for call, arguments in zip(program.calls, self._arguments, strict=True)
            ],
            np.int64,
        )  # fmt: skip
        self.labels = [call.label for call in program.calls]
        self._logits = self._storage.rows(program.logits, limits.logit_rows, plan.logits.width)
        allocated = {"batch": limits.rows, "logits": limits.logit_rows}

        def rows_of(value: Value, buffer: Buffer) -> F32:
            return self._storage.rows(buffer, allocated[value.rows], value.width)

        self._kept = {value.index: rows_of(value, program.kept[value.index]) for value in keep}
        self._parts = [
            _Part(
                part.calls,
                [rows_of(value, buffer) for value, buffer in part.enters],
                [(value, rows_of(value, buffer)) for value, buffer in part.leaves],
            )
            for part in program.parts
        ]
        self._routings = {
            op.out.index: self._routing(program, op, allocated[op.out.rows])
            for op in plan.operations
            if isinstance(op, Experts) and op.out.index in program.routings
        }
        self.memory = budget.memory(plan, program, limits, threads, cache)
        self._vocabulary_in = plan.input_vocabulary

    def _routing(self, program: Program, op: Experts, rows: int) -> Routing:
        """Views with the maximum size."""
        choices, hidden = program.routings[op.out.index]
        ffn = op.down.weight.shape[2]
        return Routing(
            self._storage.list(choices).view(np.int32).reshape(rows, op.used),
            self._storage.rows(hidden, rows * op.used, ffn).reshape(rows, op.used, ffn),
        )

    # -- stepping --------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> F32:
        """Logits float32 (L, vocabulary); a view that the next step overwrites."""
        self.begin(batch)
        self.replay()
        return self.result()

    def replay(self) -> None:
        """Run the plan on the last batch again: the cost of a step without the Python around it."""
        self._pool.run(self.entries, self._storage.counters)

    def pieces(self, batch: Batch) -> list[NDArray[np.intp]]:
        return [np.arange(len(batch.tokens))]

    def begin(self, batch: Batch) -> None:
        """Take in the next batch to run."""
        self._must_be_open()
        self._storage.inputs.fill(batch, self._vocabulary_in)
        last = int(batch.positions.max())
        if last >= self._rope_filled:
            self._grow_ropes(last + 1)
        for sharing in self._storage.sharing.values():
            sharing.fill(batch, last)

    def run(self, part: int, entering: Sequence[F32]) -> list[F32]:
        own = self._parts[part]
        for into, rows in zip(own.enters, entering, strict=True):
            into[: len(rows)] = rows
        entries = self.entries[own.calls]
        if len(entries):  # None if only additions remained, which earlier linears perform
            self._pool.run(entries, self._storage.counters[own.calls])
        return [rows[: self._count(value)] for value, rows in own.leaves]

    def result(self) -> F32:
        return self._logits[: int(self._storage.inputs.step[Step.logit_rows])]

    def value(self, value: Value) -> F32:
        """The content of a kept value after the last step; a view that the next step overwrites."""
        self._must_be_open()
        return self._kept[value.index][: self._count(value)]

    def routing(self, out: Value) -> Routing:
        """The routing of the last step for a kept result of experts; views as for `value`."""
        self._must_be_open()
        all_rows, count = self._routings[out.index], self._count(out)
        return Routing(all_rows.choices[:count], all_rows.hidden[:count])

    def _count(self, value: Value) -> int:
        return int(self._storage.inputs.step[Step.rows if value.rows == "batch" else Step.logit_rows])

    def replace(self, weight: Tensor) -> None:
        """Other numbers for a bound matrix of the same name, format and shape."""
        self._must_be_open()
        check_replacement(weight, self._plan.matrices)
        weights.fill([(weight, self._storage.panels[weight.name])], self._library, self._pool.threads)

    def copy_blocks(self, source: np.ndarray, target: np.ndarray, windowed: bool = False) -> None:
        self._must_be_open()
        check_copy(source, target, self.limits.window_blocks if windowed else self.limits.blocks)
        for number, keys_or_values in enumerate(self._storage.cache):
            own = self._plan.layers[number // 2].window > 0 and self.limits.window_blocks > 0
            if own == windowed:
                keys_or_values[target] = keys_or_values[source]

    def read_blocks(self, layer: int, numbers: np.ndarray) -> np.ndarray:
        self._must_be_open()
        check_blocks("read_blocks: numbers", numbers, self.limits.blocks_of(self._plan.layers[layer]))
        keys, values = self._storage.cache[2 * layer : 2 * layer + 2]
        return np.concatenate([keys[numbers], values[numbers]], axis=1)

    def write_blocks(self, layer: int, numbers: np.ndarray, content: np.ndarray) -> None:
        self._must_be_open()
        check_blocks("write_blocks: numbers", numbers, self.limits.blocks_of(self._plan.layers[layer]))
        check_content(content, len(numbers), self.block_bytes[layer])
        keys, values = self._storage.cache[2 * layer : 2 * layer + 2]
        new = content[:, : keys.shape[1]], content[:, keys.shape[1] :]
        # Infinity or NaN with weight zero would still spoil a sum.
        if not (self._types[0].finite_keys(new[0]) and self._types[1].finite_values(new[1])):
            raise not_finite()
        keys[numbers], values[numbers] = new

    def close(self) -> None:
        """Free the memory. Returned logits stay readable."""
        self._closed = True
        self._storage.free()
        self._kept, self._routings, self._parts = {}, {}, []

    def _must_be_open(self) -> None:
        if self._closed:
            raise BackendError("this executable is closed; bind the plan again")

    def read_bandwidth(self) -> float:
        """Bytes per second, best of three passes over the weights (at most 512 MiB of them)."""
        self._must_be_open()
        size = min(self._storage.weights.size, READ_AT_MOST)
        if size < bandwidth.LEAST:
            return 0.0
        piece = min(bandwidth.PIECE, size // bandwidth.STEP * bandwidth.STEP)
        pieces = size // piece
        counters, sink = np.zeros((self._pool.threads, 8), np.int64), np.zeros(8 * self._pool.threads, np.int64)
        arguments = bandwidth.ReadArguments(
            start=self._storage.weights.address, pieces=pieces, piece=piece, counter=address(counters),
            sink=address(sink),
        ).pack()  # fmt: skip
        self._library.load([bandwidth.read()])
        read = Entry(kernel=self._library.address("read"), arguments=address(arguments), barrier=1, ticks=0, waited=0)
        entries = read.pack()[None]
        best = 0.0
        for _ in range(3):
            start = perf_counter()
            self._pool.run(entries, counters)
            best = max(best, pieces * piece / (perf_counter() - start))
        return best

    def profile(self) -> list[tuple[str, int, int]]:
        """(operation, cycles since bind, cycles waiting for other threads) in plan order."""
        clocks = self.entries[:, [Entry.ticks, Entry.waited]].tolist()
        return [(label, ticks, waited) for label, (ticks, waited) in zip(self.labels, clocks, strict=True)]

    # -- rope tables -----------------------------------------------------------------------------------------------

    def _grow_ropes(self, needed: int) -> None:
        """Fill tables up to a position of the batch; most chats never need the full table of a long context."""
        stop = min(-(-needed // ROPE_STEP) * ROPE_STEP, self.limits.positions)
        for rope_, (arena, row) in self._storage.ropes.items():
            values = rope.table(rope_, self._rope_filled, stop)
            at = arena.address + self._rope_filled * row
            arena.view(at, values.nbytes)[:] = values.reshape(-1).view(np.uint8)
        self._rope_filled = stop


class _Part(NamedTuple):
    """Entries of a part, and the rows of values that cross its edges."""

    calls: slice
    enters: list[F32]
    leaves: list[tuple[Value, F32]]
