"""The CPU backend as the program sees it: open, bind a plan, step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backends.base import F16_CACHE, BackendError, CacheTypes, Limits, Memory, Progress, Routing
from backends.checks import (
    check_batch,
    check_blocks,
    check_cache,
    check_content,
    check_copy,
    check_limits,
    check_replacement,
    not_finite,
)
from backends.cpu import bind, rope, weights
from backends.cpu.buffers import Buffer
from backends.cpu.cache import CACHE, CacheRow
from backends.cpu.isa import Isa, host
from backends.cpu.jit import Library, default_cache
from backends.cpu.kernels import attention, bandwidth, matrix
from backends.cpu.kernels.common import Step
from backends.cpu.kernels.executor import Entry
from backends.cpu.memory import Arena, address, aligned, int_block
from backends.cpu.panels import panel_count
from backends.cpu.pool import Pool
from backends.cpu.program import Program, Slot
from backends.cpu.sharing import Sharing
from backends.cpu.simd import LANES
from backends.plan import BLOCK, F32, Attention, Batch, Embed, Experts, Linear, Norm, Plan, Rope, Value, Weight

READ_AT_MOST = 512 << 20  # bytes that a measurement of bandwidth reads
ROPE_STEP = 1024  # positions by which the rope tables grow


def default_threads() -> int:
    """Processors this process may run on."""
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
        self.library = Library(self.isa, default_cache() if cache == "default" else cache)
        self.pool = Pool(self.library, threads or default_threads())
        self._stop = weakref.finalize(self, self.pool.close)  # also for who forgets to close

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
        self._backend = backend  # its threads live as long as this
        self._closed = False
        check_limits(limits)
        matrices = _matrices(plan)
        for weight in matrices:
            weights.check(weight)
        program = bind.program(plan, limits, backend.pool.threads, cache, keep)
        kernels = [*program.kernels.values(), *(matrix.repack(f) for f in {w.format for w in matrices})]
        report = progress or (lambda what, done, total: None)
        backend.library.load(kernels, lambda done, total, name: report("compiling kernels", done, total))
        self._weights, panels = weights.load(
            matrices, backend.library, backend.pool.threads, lambda done, total: report("loading weights", done, total)
        )
        self._scratch = program.buffers.commit()
        self._types = CACHE[cache.keys], CACHE[cache.values]
        self._cache, cache_addresses, cache_bytes = _cache(plan, limits, self._types)
        self.cache_layout = f"cpu {cache.keys} {cache.values} {LANES}"  # as backends.cpu.cache has it
        sizes = [part.shape[1] for part in self._cache]
        self.block_bytes = tuple(k + v for k, v in zip(sizes[::2], sizes[1::2], strict=True))
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self._ropes: dict[Rope, tuple[Arena, int]] = {}
        self._rope_filled = 0
        uses = {
            (bind.attention_shape(plan, op, cache), op.window) for op in plan.operations if isinstance(op, Attention)
        }
        self._sharing = {use: Sharing(*use, limits, backend.pool.threads) for use in uses}
        self._partials = Arena(max((s.partial_bytes for s in self._sharing.values()), default=0), "attention")
        self._step = np.zeros(Step.SIZE, np.int64)
        self._inputs = _Inputs(limits)
        stride = max((attention.scratch_bytes(shape) for shape, _ in uses), default=64)
        self._attention_scratch = Arena(aligned(stride) * backend.pool.threads, "attention")

        unpacked = max((p.tile_chunk(backend.pool.threads) * p.tile_bytes for p in panels.values()), default=0)
        self._tile_scratch = Arena(aligned(unpacked) * backend.pool.threads, "unpacked weights")

        names: dict[str, int] = {
            "tiles": self._tile_scratch.address,
            "tiles_stride": aligned(unpacked),
            "step": address(self._step),
            "rows:batch": address(self._step) + 8 * Step.ROWS,
            "rows:logits": address(self._step) + 8 * Step.LOGIT_ROWS,
            "scratch": self._attention_scratch.address,
            "scratch_stride": aligned(stride),
            "partials": self._partials.address,
            **cache_addresses,
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
        for name, weight, lanes in _vector_uses(plan):
            self._vectors[name] = weights.vector(weight, lanes)
        self._vectors |= _expert_biases(plan)
        names |= {name: address(values) for name, values in self._vectors.items()}
        self._lists = {name: np.zeros(size, np.uint8) for name, size in program.lists.items()}
        names |= {name: address(memory) for name, memory in self._lists.items()}

        self._counters = np.zeros((len(program.calls), 8), np.int64)
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
        self._logits = self._rows(program, program.logits, limits.logit_rows, plan.logits.width)
        allocated = {"batch": limits.rows, "logits": limits.logit_rows}
        self._kept = {
            value.index: self._rows(program, program.kept[value.index], allocated[value.rows], value.width)
            for value in keep
        }
        self._routings = {
            op.out.index: self._routing(program, op, allocated[op.out.rows])
            for op in plan.operations
            if isinstance(op, Experts) and op.out.index in program.routings
        }
        self.memory = Memory(
            weights=sum(p.bytes for p in panels.values()) + sum(v.nbytes for v in self._vectors.values()),
            cache=cache_bytes,
            scratch=self._scratch.size + self._attention_scratch.size + self._partials.size + self._tile_scratch.size,
            weights_per_token=_weights_per_token(plan, panels),
            cache_per_token=cache_bytes // (limits.blocks * BLOCK),
        )
        self._vocabulary_in = _embedding_rows(plan)

    def _rows(self, program: Program, buffer: Buffer, rows: int, width: int) -> F32:
        """A buffer's float32 rows (rows, width)."""
        memory = self._scratch.view(program.buffers.address(buffer), rows * buffer.stride)
        return memory.view(np.float32).reshape(rows, -1)[:, :width]

    def _routing(self, program: Program, op: Experts, rows: int) -> Routing:
        """Views of all there is room for."""
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

    def step(self, batch: Batch) -> F32:
        """Logits float32 (L, vocabulary); a view that the next step overwrites."""
        self._must_be_open()
        self._inputs.fill(self._step, batch, self._vocabulary_in, self.limits)
        last = int(batch.positions.max())
        if last >= self._rope_filled:
            self._grow_ropes(last + 1)
        for sharing in self._sharing.values():
            sharing.fill(batch)
        self.replay()
        return self._logits[: len(batch.logit_rows)]

    def replay(self) -> None:
        """Run the plan on the last batch again: what a step costs without the Python around it."""
        self._pool.run(self.entries, self._counters)

    def value(self, value: Value) -> F32:
        """What the last step left in a value that was to be kept; a view that the next step overwrites."""
        self._must_be_open()
        return self._kept[value.index][: self._count(value)]

    def routing(self, out: Value) -> Routing:
        """How the last step came to the kept result of experts; views as of `value`."""
        self._must_be_open()
        all_rows, count = self._routings[out.index], self._count(out)
        return Routing(all_rows.choices[:count], all_rows.hidden[:count])

    def _count(self, value: Value) -> int:
        return int(self._step[Step.ROWS if value.rows == "batch" else Step.LOGIT_ROWS])

    def replace(self, weight: Weight) -> None:
        """Other numbers for a bound matrix of the same name, format and shape."""
        self._must_be_open()
        check_replacement(weight, {matrix.name: matrix for matrix in _matrices(self._plan)})
        weights.fill([(weight, self._panels[weight.name])], self._library, self._pool.threads)

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        self._must_be_open()
        check_copy(source, target, self.limits)
        for keys_or_values in self._cache:
            keys_or_values[target] = keys_or_values[source]

    def read_blocks(self, layer: int, numbers: np.ndarray) -> np.ndarray:
        self._must_be_open()
        check_blocks("read_blocks: numbers", numbers, self.limits)
        keys, values = self._cache[2 * layer : 2 * layer + 2]
        return np.concatenate([keys[numbers], values[numbers]], axis=1)

    def write_blocks(self, layer: int, numbers: np.ndarray, content: np.ndarray) -> None:
        self._must_be_open()
        check_blocks("write_blocks: numbers", numbers, self.limits)
        check_content(content, len(numbers), self.block_bytes[layer])
        keys, values = self._cache[2 * layer : 2 * layer + 2]
        new = content[:, : keys.shape[1]], content[:, keys.shape[1] :]
        # Infinity or NaN weighed by zero would still spoil a sum.
        if not (self._types[0].finite_keys(new[0]) and self._types[1].finite_values(new[1])):
            raise not_finite()
        keys[numbers], values[numbers] = new

    def close(self) -> None:
        """Give the memory back. Logits that were returned stay readable."""
        self._closed = True
        self._cache = []
        self._weights = self._scratch = self._attention_scratch = self._partials = self._tile_scratch = Arena(
            0, "nothing"
        )
        self._ropes.clear()
        self._kept, self._routings = {}, {}

    def _must_be_open(self) -> None:
        if self._closed:
            raise BackendError("this executable is closed; bind the plan again")

    def read_bandwidth(self) -> float:
        """Bytes a second, best of three passes over the weights (of at most 512 MiB of them)."""
        self._must_be_open()
        pieces = min(self._weights.size, READ_AT_MOST) // bandwidth.PIECE
        if not pieces:
            return 0.0
        counters, sink = np.zeros((1, 8), np.int64), np.zeros(8 * self._pool.threads, np.int64)
        a = bandwidth.ReadArg
        block = int_block(
            a.SIZE,
            {a.START: self._weights.address, a.PIECES: pieces, a.COUNTER: address(counters), a.SINK: address(sink)},
        )
        self._library.load([bandwidth.read()])
        entries = np.array([[self._library.address("read"), address(block), 1, 0, 0]], np.int64)
        best = 0.0
        for _ in range(3):
            start = perf_counter()
            self._pool.run(entries, counters)
            best = max(best, pieces * bandwidth.PIECE / (perf_counter() - start))
        return best

    def profile(self) -> list[tuple[str, int, int]]:
        """(operation, cycles spent since bind, those of them spent waiting for other threads) in order of the plan."""
        clocks = self.entries[:, [Entry.TICKS, Entry.WAITED]].tolist()
        return [(label, ticks, waited) for label, (ticks, waited) in zip(self.labels, clocks, strict=True)]

    # -- rope tables -----------------------------------------------------------------------------------------------

    def _rope_table(self, rope_: Rope) -> Arena:
        if rope_ not in self._ropes:
            row = 8 * (rope_.n_rot // 2)
            self._ropes[rope_] = (Arena(row * self.limits.positions, "the rope table"), row)
        return self._ropes[rope_][0]

    def _grow_ropes(self, needed: int) -> None:
        """Fill tables up to a position of the batch; most chats never need a long context's full table."""
        stop = min(-(-needed // ROPE_STEP) * ROPE_STEP, self.limits.positions)
        for rope_, (arena, row) in self._ropes.items():
            values = rope.table(rope_, self._rope_filled, stop)
            at = arena.address + self._rope_filled * row
            arena.view(at, values.nbytes)[:] = values.reshape(-1).view(np.uint8)
        self._rope_filled = stop


class _Inputs:
    """The batch's arrays at addresses that never change."""

    def __init__(self, limits: Limits) -> None:
        self.rows = np.zeros((4, limits.rows), np.int32)
        self.logit_rows = np.zeros(limits.logit_rows, np.int32)

    def fill(self, step: NDArray[np.int64], batch: Batch, vocabulary: int, limits: Limits) -> None:
        count, wanted = len(batch.tokens), len(batch.logit_rows)
        check_batch(batch, limits, vocabulary)
        for target, source in zip(self.rows, (batch.tokens, batch.positions, batch.slots, batch.sequence), strict=True):
            target[:count] = source
        self.logit_rows[:wanted] = batch.logit_rows
        self.tables = np.ascontiguousarray(batch.tables, np.int32)
        step[Step.ROWS], step[Step.LOGIT_ROWS] = count, wanted
        for slot, array in zip((Step.TOKENS, Step.POSITIONS, Step.SLOTS, Step.SEQUENCE), self.rows, strict=True):
            step[slot] = address(array)
        step[Step.LOGIT_INDEX] = address(self.logit_rows)
        step[Step.TABLES], step[Step.TABLE_STRIDE] = address(self.tables), self.tables.shape[1] * 4


def _matrices(plan: Plan) -> list[Weight]:
    found: dict[str, Weight] = {}
    for op in plan.operations:
        if isinstance(op, Embed):
            found[op.table.name] = op.table
        elif isinstance(op, Linear):
            found[op.weight.name] = op.weight
        elif isinstance(op, Experts):
            found |= {stack.weight.name: stack.weight for stack in (op.gate, op.up, op.down)}
    return list(found.values())


def _vector_uses(plan: Plan) -> list[tuple[str, Weight, int]]:
    """(address name, tensor, lanes to pad to): a linear's bias is as long as its panels."""
    found: dict[str, tuple[str, Weight, int]] = {}
    for op in plan.operations:
        if isinstance(op, Norm):
            for weight in (op.weight, op.bias):
                if weight is not None:
                    found[f"vector:{weight.name}"] = (f"vector:{weight.name}", weight, LANES)
        elif isinstance(op, Experts):
            for weight in (op.choice_bias, op.gate.scale, op.up.scale, op.down.scale):
                if weight is not None:
                    found[f"vector:{weight.name}"] = (f"vector:{weight.name}", weight, LANES)
        elif isinstance(op, Attention) and op.sinks is not None:
            found[f"vector:{op.sinks.name}"] = (f"vector:{op.sinks.name}", op.sinks, LANES)
        elif isinstance(op, Linear) and op.bias is not None:
            found[f"panel_vector:{op.bias.name}"] = (f"panel_vector:{op.bias.name}", op.bias, 2 * LANES)
    return list(found.values())


def _expert_biases(plan: Plan) -> dict[str, NDArray[np.float32]]:
    """Biases of expert matrices by address name, each expert's as long as its panels."""
    found = {}
    for op in plan.operations:
        if isinstance(op, Experts):
            for stack in (op.gate, op.up, op.down):
                if stack.bias is not None:
                    width = panel_count(stack.weight.shape[1]) * LANES
                    found[f"experts_vector:{stack.bias.name}"] = weights.expert_vectors(stack.bias, width)
    return found


def _weights_per_token(plan: Plan, panels: dict[str, weights.Panels]) -> int:
    """Bytes of every matrix of a product, and of the chosen experts' alone."""
    total = 0
    for op in plan.operations:
        if isinstance(op, Linear):
            total += panels[op.weight.name].bytes
        elif isinstance(op, Experts):
            stacks = (op.gate, op.up, op.down)
            total += sum(panels[stack.weight.name].expert_bytes * op.used for stack in stacks)
    return total


def _embedding_rows(plan: Plan) -> int:
    return min((op.table.shape[0] for op in plan.operations if isinstance(op, Embed)), default=1)


def _cache(
    plan: Plan, limits: Limits, types: tuple[CacheRow, CacheRow]
) -> tuple[list[NDArray[np.uint8]], dict[str, int], int]:
    """Per layer keys, then values: uint8 (blocks, bytes of a block), their addresses by name, bytes in all."""
    sizes = []
    for layer in plan.layers:
        heads, width = layer.kv_heads, layer.head_dim
        sizes.append((heads * types[0].key_bytes(width), heads * types[1].value_bytes(width)))
    total = sum(aligned(k * limits.blocks) + aligned(v * limits.blocks) for k, v in sizes)
    arena = Arena(total, "the cache")
    arrays, addresses = [], {}
    for number, pair in enumerate(sizes):
        for what, size in zip("kv", pair, strict=True):
            at = arena.take(size * limits.blocks)
            addresses[f"{what}_cache:{number}"] = at
            arrays.append(arena.view(at, size * limits.blocks).reshape(limits.blocks, size))
    return arrays, addresses, total
