"""The CPU backend: open it, bind a plan, step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import F16_CACHE, BackendError, CacheTypes, Limits, Progress, Routing
from localllm.backends.checks import check_cache
from localllm.backends.cpu import bind, budget, rope, weights
from localllm.backends.cpu.buffers import Buffer
from localllm.backends.cpu.cache import CACHE
from localllm.backends.cpu.cache_blocks import CacheBlocks
from localllm.backends.cpu.inputs import Inputs
from localllm.backends.cpu.isa import Isa, host
from localllm.backends.cpu.jit import Library
from localllm.backends.cpu.kernels import attention, bandwidth, matrix
from localllm.backends.cpu.kernels.common import Step
from localllm.backends.cpu.kernels.executor import Entry
from localllm.backends.cpu.memory import Arena, address, int_block
from localllm.backends.cpu.pool import Pool
from localllm.backends.cpu.program import Program, Slot
from localllm.backends.cpu.sharing import Sharing
from localllm.backends.shell import RopeTables, Shell
from localllm.plan import F32, Batch, Experts, Plan, Rope, Tensor, Value
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


class CpuExecutable(Shell):
    """A plan bound to memory. One step at a time."""

    _cache: CacheBlocks

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
        self._pool, self._library = backend.pool, backend.library
        self._backend = backend  # keeps its threads alive
        matrices = plan.matrices.values()
        program = bind.program(plan, limits, backend.pool.threads, cache, keep)
        kernels = [*program.kernels.values(), *(matrix.repack(f) for f in {w.format for w in matrices})]
        report = progress or (lambda what, done, total: None)
        backend.library.load(kernels, lambda done, total, name: report("compiling kernels", done, total))
        self._weights, panels = weights.load(
            matrices, backend.library, backend.pool.threads, lambda done, total: report("loading weights", done, total)
        )
        self._scratch = program.buffers.commit()
        self._set_cache(CacheBlocks(plan, limits, cache))
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self._rope_tables: dict[Rope, Arena] = {}
        uses = budget.attention_uses(plan, cache)
        self._sharing = {use: Sharing(*use, limits, backend.pool.threads) for use in uses}
        self._partials = Arena(max((s.partial_bytes for s in self._sharing.values()), default=0), "attention")
        self._inputs = Inputs(limits)
        step = address(self._inputs.step)
        stride, unpacked = budget.attention_stride(uses), budget.tile_stride(panels, backend.pool.threads)
        self._attention_scratch = Arena(stride * backend.pool.threads, "attention")
        self._tile_scratch = Arena(unpacked * backend.pool.threads, "unpacked weights")

        names: dict[str, int] = {
            "tiles": self._tile_scratch.address,
            "tiles_stride": unpacked,
            "step": step,
            "window_step": address(self._inputs.window_step),
            "rows:batch": step + 8 * Step.ROWS,
            "rows:logits": step + 8 * Step.LOGIT_ROWS,
            "scratch": self._attention_scratch.address,
            "scratch_stride": stride,
            "partials": self._partials.address,
            **self._cache.addresses,
        }
        for name, p in panels.items():
            names |= {
                f"weights:{name}": p.address,
                f"blocks:{name}": p.blocks,
                f"panels:{name}": p.panels,
                f"panel_bytes:{name}": p.panel_bytes,
                f"chunk:{name}": p.chunk(backend.pool.threads),
                f"tile_chunk:{name}": p.tile_chunk(backend.pool.threads),
                f"expert_bytes:{name}": p.expert_bytes,
            }
        for name, weight, lanes in budget.vector_uses(plan):
            self._vectors[name] = weights.vector(weight, lanes)
        for name, weight, width in budget.expert_biases(plan):
            self._vectors[name] = weights.expert_vectors(weight, width)
        names |= {name: address(values) for name, values in self._vectors.items()}
        self._lists = {name: np.zeros(size, np.uint8) for name, size in program.lists.items()}
        names |= {name: address(memory) for name, memory in self._lists.items()}

        self._counters = np.zeros((len(program.calls), backend.pool.threads, 8), np.int64)
        self._blocks: list[NDArray[np.int64]] = []
        self.entries = np.zeros((len(program.calls), Entry.SIZE), np.int64)
        self.labels = [call.label for call in program.calls]
        for number, call in enumerate(program.calls):
            names["counter"] = address(self._counters[number])
            block = int_block(
                call.size, {slot: self._resolve(value, names, program) for slot, value in call.slots.items()}
            )
            self._blocks.append(block)
            self.entries[number] = (backend.library.address(call.kernel), address(block), call.barrier, 0, 0)
        self._panels = panels
        allocated = {"batch": limits.rows, "logits": limits.logit_rows}

        def rows_of(value: Value, buffer: Buffer) -> F32:
            return self._rows(program, buffer, allocated[value.rows], value.width)

        self._kept = {value.index: rows_of(value, program.kept[value.index]) for value in keep}
        self._logits = rows_of(plan.logits, program.logits) if program.logits is not None else None
        self._stages = [stage.located(rows_of) for stage in program.stages]
        self._routings = {
            op.out.index: self._routing(program, op, allocated[op.out.rows])
            for op in plan.operations
            if isinstance(op, Experts) and op.out.index in program.routings
        }
        self._ropes = RopeTables(self._rope_tables, limits.positions, self._fill_rope)
        self.memory = budget.memory(plan, program, limits, backend.pool.threads, cache, backend.isa)

    def _rows(self, program: Program, buffer: Buffer, rows: int, width: int) -> F32:
        """A buffer's float32 rows (rows, width)."""
        memory = self._scratch.view(program.buffers.address(buffer), rows * buffer.stride)
        return memory.view(np.float32).reshape(rows, -1)[:, :width]

    def _routing(self, program: Program, op: Experts, rows: int) -> Routing:
        """Views with the maximum size."""
        choices, hidden = program.routings[op.out.index]
        ffn = op.down.weight.shape[2]
        return Routing(
            self._lists[choices].view(np.int32).reshape(rows, op.used),
            self._rows(program, hidden, rows * op.used, ffn).reshape(rows, op.used, ffn),
        )

    def _resolve(self, value: Slot, names: dict[str, int], program: Program) -> int | float:
        match value:
            case str():
                return names[value]
            case Buffer():
                return program.buffers.address(value)
            case ("rope", Rope() as what):
                return self._rope_table(what).address
            case ("work", attention.Shape() as shape, int(window)):
                return address(self._sharing[shape, window].work)
            case (str(name), int(offset)):
                return names[name] + offset
        return value

    # -- stepping --------------------------------------------------------------------------------------------------

    def _take_in(self, batch: Batch) -> None:
        self._inputs.fill(batch)
        last = int(batch.positions.max())
        for sharing in self._sharing.values():
            sharing.fill(batch, last)

    def _run_stage(self, number: int, received: Sequence[F32]) -> list[F32]:
        stage = self._stages[number]
        for (_, into), rows in zip(stage.received, received, strict=True):
            into[: len(rows)] = rows
        entries = self.entries[stage.work]
        if len(entries):  # none if the stage only has additions, which earlier linears perform
            self._pool.run(entries, self._counters[stage.work])
        return [rows[: self._counts[value.rows]] for value, rows in stage.sent]

    def replay(self) -> None:
        """Run the plan on the last batch again: the cost of a step without the Python around it."""
        self._pool.run(self.entries, self._counters)

    def result(self) -> F32:
        assert self._logits is not None, "another place makes the logits"
        return self._logits[: self._counts["logits"]]

    def _fill(self, weight: Tensor) -> None:
        weights.fill([(weight, self._panels[weight.name])], self._library, self._pool.threads)

    def _free(self) -> None:
        self._cache.free()
        self._weights = self._scratch = self._attention_scratch = self._partials = self._tile_scratch = Arena(
            0, "nothing"
        )
        self._rope_tables.clear()
        self._stages = []

    def read_bandwidth(self) -> float:
        """Bytes per second, best of three passes over the weights (at most 512 MiB of them)."""
        self._must_be_open()
        size = min(self._weights.size, READ_AT_MOST)
        if size < bandwidth.LEAST:
            return 0.0
        piece = min(bandwidth.PIECE, size // bandwidth.STEP * bandwidth.STEP)
        pieces = size // piece
        counters, sink = np.zeros((self._pool.threads, 8), np.int64), np.zeros(8 * self._pool.threads, np.int64)
        a = bandwidth.ReadArg
        block = int_block(
            a.SIZE,
            {
                a.START: self._weights.address,
                a.PIECES: pieces,
                a.PIECE: piece,
                a.COUNTER: address(counters),
                a.SINK: address(sink),
            },
        )
        self._library.load([bandwidth.read()])
        entries = np.array([[self._library.address("read"), address(block), 1, 0, 0]], np.int64)
        best = 0.0
        for _ in range(3):
            start = perf_counter()
            self._pool.run(entries, counters)
            best = max(best, pieces * piece / (perf_counter() - start))
        return best

    def profile(self) -> list[tuple[str, int, int]]:
        """(operation, cycles since bind, cycles waiting for other threads) in plan order."""
        clocks = self.entries[:, [Entry.TICKS, Entry.WAITED]].tolist()
        return [(label, ticks, waited) for label, (ticks, waited) in zip(self.labels, clocks, strict=True)]

    # -- rope tables -----------------------------------------------------------------------------------------------

    def _rope_table(self, rope_: Rope) -> Arena:
        if rope_ not in self._rope_tables:
            self._rope_tables[rope_] = Arena(_rope_row(rope_) * self.limits.positions, "the rope table")
        return self._rope_tables[rope_]

    def _fill_rope(self, rope_: Rope, start: int, stop: int) -> None:
        values, arena = rope.table(rope_, start, stop), self._rope_tables[rope_]
        arena.view(arena.address + start * _rope_row(rope_), values.nbytes)[:] = values.reshape(-1).view(np.uint8)


def _rope_row(rope_: Rope) -> int:
    """Bytes of a row of a rope table."""
    return 8 * (rope_.n_rot // 2)
