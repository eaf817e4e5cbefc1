"""A plan bound to a device's memory: launches in order, replayed for every batch. Written once for CUDA and OpenCL.

A batch goes in pieces: runs of more than FEW_ROWS rows of one sequence are prefill and go together through the tiles;
all others go FEW_ROWS at a time through kernels whose sums have one order, so that decoding gives the same bits
whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.base import BackendError, CacheTypes, Largest, Limits, Memory, Progress, Routing, cache_reads
from backends.checks import (
    check_batch,
    check_blocks,
    check_cache,
    check_content,
    check_copy,
    check_limits,
    check_replacement,
    not_finite,
)  # fmt: skip
from backends.gpu import bind, formats, largest
from backends.gpu.bind import KEYS, NOTHING, PICKED, Argument, Buffer, Dimension, Launch, Program
from backends.gpu.device import Device, Grid
from backends.gpu.kernels import FEW_ROWS, HEADER, PARTITION, TILE_ROWS, Kernel, partitions
from backends.gpu.replay import Replays, bucket
from backends.plan import BLOCK, F32, Batch, Embed, Experts, Plan, Rope, Value, Weight, rope_table
from quant import dequantize

CACHE_TYPES = ("f16",)
ROPE_STEP = 1024  # positions by which the rope tables grow

Bound = tuple[Callable[[Grid], None], tuple[Dimension, Dimension, Dimension]]


class GpuExecutable:
    """A bound plan on one device."""

    def __init__(
        self, device: Device, plan: Plan, limits: Limits, cache: CacheTypes, progress: Progress | None,
        keep: Collection[Value],
    ) -> None:  # fmt: skip
        check_limits(limits)
        check_cache(cache, CACHE_TYPES)
        self.limits, self._plan, self._device = limits, plan, device
        self._program = program = bind.program(plan, limits, keep)
        self._buffers: dict[str | int, Any] = {}
        self._closed = False
        report = progress or (lambda what, done, total: None)
        self.memory = memory_of(program, plan, limits)
        _must_fit(device, self.memory)
        try:
            compiled = self._compile(program, report)
            self._allocate(program, report)
        except BaseException:
            self.close()
            raise
        self._launches = [
            tuple([self._prepare(compiled[one.kernel], one) for one in stage.launches(rows)] for rows in _ROW_CLASSES)
            for stage in program.stages
        ]
        self._picks = [self._prepare(compiled[launch.kernel], launch) for launch in program.picks]
        self.most_picked, self._picked = largest.MOST, 0
        self.cache_layout = f"gpu f16 {BLOCK}"  # (heads, BLOCK, head_dim) of keys, then of values
        self.block_bytes = bind.block_bytes(plan)
        self._rope_filled = 0
        self._step = device.staging(_step_words(limits))
        self.replays = Replays(device)
        self._sent: dict[str, NDArray[np.int32]] = {}  # tables that the device has
        self._counts = {"batch": 0, "logits": 0}
        self._logits = np.zeros((limits.logit_rows, plan.logits.width), np.float32)
        self._keys = device.staging(2 * largest.MOST * limits.logit_rows).view(np.uint32)
        rows = {"batch": limits.rows, "logits": limits.logit_rows}
        self._kept = {v.index: np.zeros((rows[v.rows], v.width), np.float32) for v in keep}
        self._routings = {
            out: Routing(
                np.zeros((rows[hidden.rows], used), np.int32),
                np.zeros((rows[hidden.rows], used, hidden.stride // used), np.float32),
            )
            for out, (_, hidden, used) in program.routings.items()
        }
        self._vocabulary_in = next(op.table.shape[0] for op in plan.operations if isinstance(op, Embed))

    # -- binding ---------------------------------------------------------------------------------------------------

    def _compile(self, program: Program, report: Progress) -> dict[Kernel, Any]:
        wanted = program.kernels()
        local = max(kernel.local_bytes for kernel in wanted)
        if local > self._device.facts.local_memory:
            raise BackendError(
                f"{self._device.facts.name}: a work-group has {self._device.facts.local_memory} bytes of local memory, "
                f"this model's kernels need {local}; use --backend cpu"
            )
        made = {}
        for done, kernel in enumerate(wanted):
            report("compiling kernels", done, len(wanted))
            made[kernel] = self._device.compile(kernel.source(self._device.generic), kernel.name)
        report("compiling kernels", len(wanted), len(wanted))
        return made

    def _allocate(self, program: Program, report: Progress) -> None:
        limits, alloc = self.limits, self._device.alloc
        rows = {"batch": limits.rows, "logits": limits.logit_rows}
        for buffer in program.buffers:
            self._buffers[buffer.number] = alloc(4 * buffer.stride * rows[buffer.rows], "the activations")
        for name, size in {**program.lists, NOTHING: 64, "step": 4 * _step_words(limits)}.items():
            self._buffers[name] = alloc(size, "the activations")
        self._tables_size = 4 * max(limits.blocks, -(-limits.positions // BLOCK)) * limits.rows
        for name in ("tables", "window tables"):
            self._buffers[name] = alloc(self._tables_size, "block tables")
        for layer, size in enumerate(bind.cache_bytes(self._plan, limits)):
            for part in ("keys", "values"):
                self._buffers[f"{part}:{layer}"] = alloc(size // 2, "the cache (-c makes it smaller)")
        for rope in program.ropes:
            self._buffers[_rope_name(rope)] = alloc(4 * limits.positions * rope.n_rot, "the rope tables")
        for weight in program.vectors.values():
            values = _numbers(weight)
            self._buffers[f"vector:{weight.name}"] = buffer = alloc(values.nbytes, "the weights")
            self._device.upload(buffer, 0, values)
        total = sum(formats.size_of(weight) for weight in program.matrices.values())
        done = 0
        for weight in program.matrices.values():
            self._buffers[f"weights:{weight.name}"] = alloc(formats.size_of(weight), "the weights")
            for size in self._fill(weight):
                done += size
                report("loading weights", min(done, total), total)
        report("loading weights", total, total)

    def _fill(self, weight: Weight) -> list[int]:
        sizes = []
        for offset, data in formats.pieces(weight):
            self._device.upload(self._buffers[f"weights:{weight.name}"], offset, data)
            sizes.append(data.nbytes)
        return sizes

    def _prepare(self, compiled: Any, launch: Launch) -> Bound:
        arguments = [self._buffers[_name(argument)] for argument in launch.arguments]
        kernel = launch.kernel
        if self._device.generic:
            arguments.insert(0, self._shape(kernel))
        return self._device.prepare(compiled, kernel.size, kernel.local_bytes, arguments), launch.grid

    def _shape(self, kernel: Kernel) -> Any:
        """The buffer of what a generic kernel is given first."""
        numbers = kernel.numbers()
        name = f"shape:{numbers.tolist()}"
        if name not in self._buffers:
            self._buffers[name] = self._device.alloc(numbers.nbytes, "the shapes")
            self._device.upload(self._buffers[name], 0, numbers)
        return self._buffers[name]

    # -- stepping --------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> F32:
        """Logits float32 (L, vocabulary); a view that the next step overwrites."""
        self._run(batch, 0)
        return self._logits[: len(batch.logit_rows)]

    def step_largest(self, batch: Batch, count: int) -> Largest:
        """The `count` largest logits of each row; all others stay on the device."""
        if not 0 < count <= largest.MOST:
            raise BackendError(f"the {count} largest logits were asked for; from 1 to {largest.MOST} can be")
        count = min(count, self._plan.logits.width)
        self._run(batch, count)
        return largest.decoded(self._keys_of(len(batch.logit_rows), count))

    def _keys_of(self, rows: int, count: int) -> NDArray[np.uint32]:
        """Where the keys of the largest logits go: (rows, count, 2)."""
        return self._keys[: 2 * rows * count].reshape(rows, count, 2)

    def _run(self, batch: Batch, picked: int) -> None:
        self._must_be_open()
        check_batch(batch, self.limits, self._vocabulary_in, self._plan.window)
        last = int(batch.positions.max())
        if last >= self._rope_filled:
            self._grow_ropes(last + 1)
        self._upload_tables("tables", batch.tables)
        if batch.window_tables is not None:
            self._upload_tables("window tables", batch.window_tables)
        self._counts = {"batch": len(batch.tokens), "logits": len(batch.logit_rows)}
        if picked and picked != self._picked:
            self._device.upload(self._buffers[PICKED], 0, largest.numbers(self._plan.logits.width, picked))
            self._picked = picked
        for rows in _pieces(batch):
            self._piece(batch, rows, picked)

    def _piece(self, batch: Batch, rows: NDArray[np.intp], picked: int) -> None:
        """Some rows of the batch, and those of its logits that are of them: all, or the largest `picked`."""
        place = np.full(len(batch.tokens), -1, np.int32)
        place[rows] = np.arange(len(rows))
        wanted = np.flatnonzero(place[batch.logit_rows] >= 0)
        limit, step = self.limits.rows, self._step
        step[:3] = len(rows), len(wanted), batch.tables.shape[1]
        if batch.window_slots is not None and batch.window_tables is not None:
            step[3] = batch.window_tables.shape[1]
            step[HEADER + 6 * limit : HEADER + 6 * limit + len(rows)] = batch.window_slots[rows]
        for i, array in enumerate((batch.tokens, batch.positions, batch.slots, batch.sequence)):
            step[HEADER + i * limit : HEADER + i * limit + len(rows)] = array[rows]
        counts = {"batch": len(rows), "logits": len(wanted), "tiles": 0}
        counts["partitions"] = int(batch.positions[rows].max()) // PARTITION + 1
        if len(rows) <= FEW_ROWS:
            counts["partitions"] = min(bucket(counts["partitions"]), partitions(self.limits))
        else:
            tiles = _tiles(batch.sequence[rows])
            counts["tiles"] = len(tiles)
            step[HEADER + 4 * limit : HEADER + 4 * limit + tiles.size] = tiles.reshape(-1)
        at = HEADER + 7 * limit
        step[at : at + len(wanted)] = place[batch.logit_rows[wanted]]
        self._device.send(self._buffers["step"], step)
        reads = largest.passes(self._plan.logits.width, picked) if picked and len(wanted) else []
        counts |= {f"keys {number}": count for number, count in enumerate(reads)}
        if len(rows) <= FEW_ROWS:
            shape = len(rows), len(wanted), counts["partitions"], picked
            self.replays.run(shape, lambda: self._queue(counts, len(reads)))
        else:
            self._queue(counts, len(reads))
        self._read(batch, rows, wanted, picked, len(reads))

    def _queue(self, counts: dict[str, int], passes: int) -> None:
        """Launch every stage, and so many passes of the search for the largest logits."""
        for stage, bound in zip(self._program.stages, self._launches, strict=True):
            count = counts[stage.rows]
            if count:
                for launch, grid in bound[_row_class(count)]:
                    launch(tuple(_dimension(d, counts) for d in grid))  # type: ignore[arg-type]
        for launch, grid in self._picks[:passes]:
            launch(tuple(_dimension(d, counts) for d in grid))  # type: ignore[arg-type]

    def _read(self, batch: Batch, rows: NDArray[np.intp], wanted: NDArray[np.intp], picked: int, passes: int) -> None:
        """Logits or the largest of them, and what was to be kept, to where they stand in the whole batch."""
        of = {"batch": rows, "logits": wanted}
        if picked and passes:
            self._gather(KEYS[(passes - 1) % 2], self._keys_of(len(batch.logit_rows), picked), wanted)
        kept = [(value, self._kept[value.index]) for value in self._plan.values if value.index in self._kept]
        for value, into in [*([] if picked else [(self._plan.logits, self._logits)]), *kept]:
            self._gather(self._program.where[value.index].number, into, of[value.rows])
        for out, (choices, hidden, used) in self._program.routings.items():
            found = self._routings[out]
            self._gather(hidden.number, found.hidden.reshape(len(found.hidden), -1), of[hidden.rows])
            numbers = np.empty((len(of[hidden.rows]), used), np.int32)
            if numbers.size:
                self._device.download(self._buffers[choices], 0, numbers)
                found.choices[of[hidden.rows]] = numbers
        if not len(wanted):
            self._device.sync()

    def _gather(self, name: str | int, into: NDArray[Any], rows: NDArray[np.intp]) -> None:
        """The first rows of a buffer to `rows` of an array."""
        if not len(rows):
            return
        if rows[-1] - rows[0] + 1 == len(rows):  # neighbours, as almost always: straight to their place
            self._device.download(self._buffers[name], 0, into[rows[0] : rows[-1] + 1])
            return
        found = np.empty((len(rows), *into.shape[1:]), into.dtype)
        self._device.download(self._buffers[name], 0, found)
        into[rows] = found

    def _upload_tables(self, name: str, tables: NDArray[np.int32]) -> None:
        tables = np.ascontiguousarray(tables, np.int32)
        if tables.nbytes > self._tables_size:
            raise BackendError(
                f"batch: tables of {tables.size} blocks, bound for {self._tables_size // 4}; give only tables in use"
            )
        if tables.size and not np.array_equal(tables, self._sent.get(name, NOTHING_SENT)):
            self._device.upload(self._buffers[name], 0, tables)
            self._sent[name] = tables.copy()

    def _grow_ropes(self, needed: int) -> None:
        """Fill tables up to a position of the batch; most chats never need a long context's full table."""
        stop = min(-(-needed // ROPE_STEP) * ROPE_STEP, self.limits.positions)
        positions = np.arange(self._rope_filled, stop, dtype=np.int32)
        for rope in self._program.ropes:
            values = np.concatenate(rope_table(rope, positions), axis=1).astype(np.float32)  # (positions, n_rot)
            self._device.upload(self._buffers[_rope_name(rope)], 4 * self._rope_filled * rope.n_rot, values)
        self._rope_filled = stop

    # -- what else an executable does ---------------------------------------------------------------------------------

    def value(self, value: Value) -> F32:
        self._must_be_open()
        return self._kept[value.index][: self._counts[value.rows]]

    def routing(self, out: Value) -> Routing:
        self._must_be_open()
        found, count = self._routings[out.index], self._counts[out.rows]
        return Routing(found.choices[:count], found.hidden[:count])

    def replace(self, weight: Weight) -> None:
        self._must_be_open()
        check_replacement(weight, self._program.matrices)
        self._fill(weight)

    def copy_blocks(self, source: np.ndarray, target: np.ndarray, windowed: bool = False) -> None:
        self._must_be_open()
        check_copy(source, target, self.limits.window_blocks if windowed else self.limits.blocks)
        for number, (layer, size) in enumerate(zip(self._plan.layers, self.block_bytes, strict=True)):
            if bind.has_own_blocks(layer, self.limits) == windowed:
                for part in ("keys", "values"):
                    buffer = self._buffers[f"{part}:{number}"]
                    for s, t in zip(source.tolist(), target.tolist(), strict=True):
                        if s != t:
                            self._device.copy(buffer, s * size // 2, buffer, t * size // 2, size // 2)

    def read_blocks(self, layer: int, numbers: np.ndarray) -> np.ndarray:
        self._must_be_open()
        check_blocks("read_blocks: numbers", numbers, self.limits.blocks_of(self._plan.layers[layer]))
        half = self.block_bytes[layer] // 2
        found = np.empty((len(numbers), 2, half), np.uint8)
        for i, number in enumerate(numbers.tolist()):
            for j, part in enumerate(("keys", "values")):
                self._device.download(self._buffers[f"{part}:{layer}"], number * half, found[i, j])
        return found.reshape(len(numbers), -1)

    def write_blocks(self, layer: int, numbers: np.ndarray, content: np.ndarray) -> None:
        self._must_be_open()
        check_blocks("write_blocks: numbers", numbers, self.limits.blocks_of(self._plan.layers[layer]))
        check_content(content, len(numbers), self.block_bytes[layer])
        parts = np.ascontiguousarray(content).reshape(len(numbers), 2, -1)
        if ((parts.view(np.uint16) & 0x7C00) == 0x7C00).any():
            raise not_finite()
        half = self.block_bytes[layer] // 2
        for i, number in enumerate(numbers.tolist()):
            for j, part in enumerate(("keys", "values")):
                self._device.upload(self._buffers[f"{part}:{layer}"], number * half, parts[i, j])

    def read_bandwidth(self) -> float:
        """Bytes a second of copying the largest matrix within the device's memory, reads and writes counted."""
        self._must_be_open()
        return copy_bandwidth(self._device, max(formats.size_of(w) for w in self._program.matrices.values()))

    def close(self) -> None:
        """Give the memory back. Logits that were returned stay readable."""
        self._closed = True
        self._launches = []
        if self._buffers:
            self.replays.clear()
        self._step, self._keys = np.empty(0, np.int32), np.empty(0, np.uint32)  # before their device is closed
        for buffer in self._buffers.values():
            self._device.free(buffer)
        self._buffers = {}

    def _must_be_open(self) -> None:
        if self._closed:
            raise BackendError("this executable is closed; bind the plan again")


NOTHING_SENT = np.empty((0, 0), np.int32)
_ROW_CLASSES = (1, 2, FEW_ROWS + 1)  # a row, few, many


def _row_class(count: int) -> int:
    return 0 if count == 1 else 1 if count <= FEW_ROWS else 2


def _dimension(dimension: Dimension, counts: dict[str, int]) -> int:
    if isinstance(dimension, int):
        return dimension
    count, each, times = dimension
    return -(-counts[count] // each) * times


def _name(argument: Argument) -> str | int:
    if isinstance(argument, Buffer):
        return argument.number
    return _rope_name(argument) if isinstance(argument, Rope) else argument


def _rope_name(rope: Rope) -> str:
    return f"rope:{rope!r}"


def _step_words(limits: Limits) -> int:
    """Header, four numbers a row, tiles (two each, at most one a row), slots of windows, and rows of logits."""
    return HEADER + 7 * limits.rows + limits.logit_rows


def _pieces(batch: Batch) -> list[NDArray[np.intp]]:
    """Rows of the batch by piece, in order: long runs of a sequence together, the others FEW_ROWS at a time."""
    count = len(batch.tokens)
    if count <= FEW_ROWS:
        return [np.arange(count)]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(batch.sequence)) + 1, [count]])
    long = np.repeat(np.diff(starts) > FEW_ROWS, np.diff(starts))
    many, few = np.flatnonzero(long), np.flatnonzero(~long)
    return [*([many] if len(many) else []), *(few[i : i + FEW_ROWS] for i in range(0, len(few), FEW_ROWS))]


def _tiles(sequence: NDArray[np.int32]) -> NDArray[np.int32]:
    """(first row, rows) of tiles of one sequence each, at most TILE_ROWS rows."""
    starts = [0, *(np.flatnonzero(np.diff(sequence)) + 1).tolist(), len(sequence)]
    found = [
        (at, min(TILE_ROWS, stop - at)) for start, stop in pairwise(starts) for at in range(start, stop, TILE_ROWS)
    ]
    return np.array(found, np.int32)


def _numbers(weight: Weight) -> F32:
    """A tensor of plain numbers as float32."""
    rows = int(np.prod(weight.shape[:-1], dtype=np.int64))
    return np.ascontiguousarray(
        dequantize(weight.read(0, rows), weight.format).reshape(rows, -1)[:, : weight.shape[-1]]
    )


def memory_of(program: Program, plan: Plan, limits: Limits) -> Memory:
    """What a program takes on a device, before anything is allocated."""
    matrices = sum(formats.size_of(weight) for weight in program.matrices.values())
    vectors = sum(4 * int(np.prod(weight.shape)) for weight in program.vectors.values())
    cache = sum(bind.cache_bytes(plan, limits))
    ropes = sum(4 * limits.positions * rope.n_rot for rope in program.ropes)
    read = {w.name: float(formats.size_of(w)) for w in program.matrices.values()}
    for op in plan.operations:
        if isinstance(op, Experts):
            for stack in (op.gate, op.up, op.down):
                read[stack.weight.name] *= op.used / op.router.width
    tables = {op.table.name: op.table for op in plan.operations if isinstance(op, Embed)}
    linear = {op.weight.name for op in plan.operations if not isinstance(op, Embed) and hasattr(op, "weight")}
    for name, table in tables.items():  # a row of it, unless it is the output matrix too
        if name not in linear:
            read[name] = formats.size_of(table) / table.shape[0]
    return Memory(
        weights=matrices + vectors,
        cache=cache,
        scratch=program.scratch(limits) + ropes,
        weights_per_token=int(sum(read.values())) + vectors,
        **cache_reads(plan.layers, bind.block_bytes(plan)),
    )


def _must_fit(device: Device, memory: Memory) -> None:
    needed, free = memory.weights + memory.cache + memory.scratch, device.facts.free
    if needed > free:
        sizes = f"weights {memory.weights / 2**30:.2f}, cache {memory.cache / 2**30:.2f}"
        raise BackendError(
            f"{device.facts.name}: {needed / 2**30:.2f} GiB are needed ({sizes}), {free / 2**30:.2f} are free; "
            "use fewer layers on it (-ngl N), a smaller context (-c N) or a smaller model"
        )


def copy_bandwidth(device: Device, size: int) -> float:
    """Bytes a second, read and written, of a copy within the device's memory; the best of some."""
    size = max(1 << 20, min(size, 256 << 20))
    buffers = [device.alloc(size, "a measurement of bandwidth") for _ in range(2)]
    try:
        best, start = 0.0, perf_counter()
        for _ in range(5):
            seconds = device.seconds(lambda: device.copy(buffers[0], 0, buffers[1], 0, size))
            best = max(best, 2 * size / max(seconds, 1e-9))
            if perf_counter() - start > 0.2:
                break
    finally:
        for buffer in buffers:
            device.free(buffer)
    return best
