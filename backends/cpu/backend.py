"""The CPU backend: opens the backend, binds a plan, runs steps."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from localllm.backends.allocation import Buffer
from localllm.backends.base import F16_CACHE, BackendError, CacheTypes, Limits, Progress, Roofs, Routing
from localllm.backends.checks import check_cache
from localllm.backends.cpu import bind, budget, weights
from localllm.backends.cpu.adaptive import AdaptiveThreads
from localllm.backends.cpu.cache import CACHE
from localllm.backends.cpu.cache_blocks import CacheBlocks
from localllm.backends.cpu.isa import Isa, host
from localllm.backends.cpu.jit import Library
from localllm.backends.cpu.kernels import matrix
from localllm.backends.cpu.kernels.executor import Entry
from localllm.backends.cpu.memory import address
from localllm.backends.cpu.pieces import divided
from localllm.backends.cpu.pool import ThreadPool
from localllm.backends.cpu.program import Program
from localllm.backends.cpu.roofs import clocked_products, read_rates
from localllm.backends.cpu.slices import Slices
from localllm.backends.cpu.storage import Storage
from localllm.backends.lookups import Lookups
from localllm.backends.shell import RopeTables, Shell
from localllm.plan import F32, Batch, Experts, Plan, Tensor, Value, Weight
from localllm.plan.runs import bands
from localllm.quant.codecache import default_folder

READ_AT_MOST = 512 << 20  # bytes read by a bandwidth measurement
FEW_ROWS = 32  # threads of larger steps are chosen separately: their operations are longer than time slices
TURNS = 1 << 18  # iterations per timed pass of int8 products, which takes some milliseconds


def default_threads() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


class CpuBackend:
    """An instruction set's kernels and a pool of threads. Several models can be bound to one backend."""

    name = "cpu"

    def __init__(
        self, threads: int | None = None, isa: Isa | None = None, cache: Path | Literal["default"] | None = "default"
    ) -> None:
        if threads is not None and not 1 <= threads <= 1024:
            raise BackendError(f"threads is {threads}; give a number from 1 to 1024")
        self.isa = isa or host()
        self.library = Library(self.isa, default_folder("kernels") if cache == "default" else cache)
        self.pool = ThreadPool(self.library, threads or default_threads())
        self._stop = weakref.finalize(self, self.pool.close)  # closes the pool if the caller forgets to

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


class CpuExecutable(Shell):
    """A plan bound to memory, which runs one step at a time."""

    _cache: CacheBlocks
    _shares = False  # whether weights and cache belong to another executable

    def __init__(
        self,
        backend: CpuBackend,
        plan: Plan,
        limits: Limits,
        cache: CacheTypes,
        progress: Progress | None,
        keep: Collection[Value],
    ) -> None:
        super().__init__(plan, limits)
        self.pool, self._library = backend.pool, backend.library
        self._backend = backend  # keeps the backend's threads alive
        threads, isa = backend.pool.threads, backend.isa
        program = bind.program(plan, limits, threads, isa, cache, keep)
        kernels = [*program.kernels.values(), *(matrix.repack(f) for f in {w.format for w in plan.matrices.values()})]
        report = progress or (lambda what, done, total: None)
        backend.library.load(kernels, lambda done, total, name: report("compiling kernels", done, total))
        loading = partial(report, "loading weights")
        self._storage = Storage(program, plan, limits, threads, cache, backend.library, loading)
        self._set_cache(self._storage.cache)
        self._ropes = RopeTables(self._storage.ropes, limits.positions, self._storage.fill_rope)
        self._program, self._keep = program, keep
        self._place()
        self.memory = budget.memory(plan, program, limits, threads, cache)

    def _place(self) -> None:
        """Point the kernels to the storage."""
        program, storage, limits = self._program, self._storage, self.limits
        self._lookups = Lookups(self._plan)
        self._arguments = [
            call.arguments.pack(partial(storage.locate, call=number)) for number, call in enumerate(program.calls)
        ]
        entries = [
            Entry.whole(self._library.address(call.kernel), address(arguments), call.barrier)
            for call, arguments in zip(program.calls, self._arguments, strict=True)
        ]  # fmt: skip
        self.entries = np.array(entries, np.int64).reshape(-1, Entry.size)
        self.labels = [call.label for call in program.calls]
        self.operations = tuple(program.operations)
        self.barriers = tuple([call.barrier for call in program.calls])
        allocated = {"batch": limits.rows, "logits": limits.logit_rows}

        def rows_of(value: Value, buffer: Buffer) -> F32:
            return storage.rows(buffer, allocated[value.rows], value.width)

        self._kept = {value.index: rows_of(value, program.kept[value.index]) for value in self._keep}
        self._logits = rows_of(self._plan.logits, program.logits) if program.logits is not None else None
        self._stages = [stage.located(rows_of) for stage in program.stages]
        threads = self.pool.threads
        self.thread_counts = AdaptiveThreads(threads), AdaptiveThreads(threads)  # for steps of few rows, and of many
        self._work = [(self.entries[s.work], storage.counters[s.work]) for s in program.stages]
        self._slices: Slices | None = None  # of a stage that was begun in slices
        self._receiving: Iterator[None] | None = None  # the same, while it receives its input
        self._routings = {
            op.out.index: self._routing(program, op, allocated[op.out.rows])
            for op in self._plan.operations
            if isinstance(op, Experts) and op.out.index in program.routings
        }

    def interruptible(self) -> CpuExecutable:
        other = copy(self)
        other._storage = self._storage.interruptible(self._program, self._plan, self.limits, self.pool.threads)
        other._shares, other.memory = True, replace(self.memory, weights=0, cache=0)
        other._place()
        return other

    def _routing(self, program: Program, op: Experts, rows: int) -> Routing:
        """Return views of the memory that holds the expert routing, sized for the largest batch."""
        choices, hidden = program.routings[op.out.index]
        ffn = op.down.weight.shape[2]
        return Routing(
            self._storage.list(choices).view(np.int32).reshape(rows, op.used),
            self._storage.rows(hidden, rows * op.used, ffn).reshape(rows, op.used, ffn),
        )

    # -- stepping --------------------------------------------------------------------------------------------------

    def _take_in(self, batch: Batch) -> None:
        self._slices = self._receiving = None
        self._lookups.fetch(batch)
        batches = self._storage.inputs.fill(batch)
        for work, sharing in self._storage.sharing.items():
            sharing.fill(batches[work.rows], self._last_position)

    def _run_stage(self, number: int, received: Sequence[F32]) -> list[F32]:
        for _ in self._receive(number, received):
            pass
        entries, counters = self._work[number]
        if len(entries):  # no entries if all additions of the stage are fused into earlier linears
            self._run(number, entries, counters)
        return self._sent(number)

    def _run_slice(self, number: int, seconds: float, received: Sequence[F32]) -> list[F32] | None:
        until, rows = perf_counter() + seconds, self._counts["batch"]
        chosen = self.thread_counts[rows > FEW_ROWS]
        if self._slices is None:
            self._receiving = self._receiving or self._receive(number, received)
            for _ in self._receiving:
                if perf_counter() >= until:
                    return None
            self._receiving = None
            self._slices = self._sliced(number, chosen.threads)
        if not self._slices.run(until - perf_counter()):
            return None
        done, self._slices = self._slices, None
        if done.seconds:
            chosen.observe((number, rows, "slices"), done.seconds, done.late / done.seconds)
        return self._sent(number)

    def _sliced(self, number: int, threads: int) -> Slices:
        """Divide the work of a stage into pieces for slices."""
        work = self._program.stages[number].work
        calls, arguments = self._program.calls[work], self._arguments[work]
        pieces = divided(calls, self.entries[work], arguments, self._counts, threads)
        return Slices(self.pool, pieces, self._storage.counters[work], threads)

    def _receive(self, number: int, received: Sequence[F32]) -> Iterator[None]:
        """Copy the input of a stage to its buffers. Yield between bands of rows."""
        stage = self._stages[number]
        looked_up = [self._lookups[value] for value, _ in stage.looked_up]
        for (_, into), rows in zip((*stage.received, *stage.looked_up), (*received, *looked_up), strict=True):
            for band in bands(len(rows), rows.shape[1] * rows.itemsize):
                into[band] = rows[band]
                if band.stop < len(rows):
                    yield

    def _sent(self, number: int) -> list[F32]:
        return [rows[: self._counts[value.rows]] for value, rows in self._stages[number].sent]

    def _run(self, number: int, entries: NDArray[np.int64], counters: NDArray[np.int64]) -> None:
        """Run a stage's entries on the number of threads that is fastest now."""
        pool = self.pool
        rows = self._counts["batch"]
        chosen = self.thread_counts[rows > FEW_ROWS]
        seconds, late = pool.run(entries, counters, chosen.threads)
        chosen.observe((number, rows), seconds, late)

    def replay(self) -> None:
        """Run the plan on the last batch again, to time a step without Python overhead."""
        self.pool.run(self.entries, self._storage.counters)

    def result(self) -> F32:
        assert self._logits is not None, "the logits are on another device"
        return self._logits[: self._counts["logits"]]

    def _fill(self, weight: Tensor) -> None:
        weights.fill([(weight, self._storage.panels[weight.name])], self._library, self.pool.threads)

    def _free(self) -> None:
        self._storage.free_working_memory() if self._shares else self._storage.free()
        self._stages, self._work = [], []

    def read_bandwidth(self) -> float:
        """Return the bandwidth of reading the weights (at most 512 MiB) in bytes per second: the best of three."""
        self._must_be_open()
        weights = self._storage.weights
        rates = read_rates(self._library, self.pool, weights.address, min(weights.size, READ_AT_MOST), 3)
        return max(rates, default=0.0)

    def profile(self) -> list[tuple[str, int, int]]:
        """Return (operation, cycles since bind, cycles waiting for other threads) for each operation, in plan order."""
        clocks = self.clocks().tolist()
        return [(label, ticks, waited) for label, (ticks, waited) in zip(self.labels, clocks, strict=True)]

    def clocks(self) -> NDArray[np.int64]:
        return self.entries[:, [Entry.ticks, Entry.waited]]

    def stored(self, weight: Weight) -> int:
        return self._storage.panels[weight.name].bytes

    def roofs(self) -> Roofs:
        products = clocked_products(self._library, self.pool, TURNS, 5)
        return Roofs(self.read_bandwidth(), max(products)[0], max(cycles for _, cycles in products))
