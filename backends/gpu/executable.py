"""A plan bound to a device's memory: launches in order, replayed for every batch. Written once for CUDA and OpenCL."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError, CacheTypes, Largest, Limits, Progress, Routing
from localllm.backends.checks import check_cache
from localllm.backends.gpu import bind, formats, largest
from localllm.backends.gpu.budget import copy_bandwidth, memory_of, must_fit
from localllm.backends.gpu.cachetypes import CACHE, part_bytes
from localllm.backends.gpu.device import Device, Grid
from localllm.backends.gpu.kernels import FEW_ROWS, HEADER, PARTITION, Kernel, partitions
from localllm.backends.gpu.paged import PARTS, PagedCache
from localllm.backends.gpu.program import KEYS, NOTHING, PICKED, Argument, Buffer, Dimension, Launch, Program
from localllm.backends.gpu.replay import MOST, Replays, bucket
from localllm.backends.gpu.steps import ROW_CLASSES, dimension, pieces, row_class, step_words, tiles
from localllm.backends.shell import RopeTables, Shell
from localllm.backends.stages import Stage
from localllm.plan import BLOCK, F32, Batch, Plan, Rope, Tensor, Value, Weight, rope_table
from localllm.quant import dequantize

Bound = tuple[Callable[[Grid], None], tuple[Dimension, Dimension, Dimension]]


class GpuExecutable(Shell):
    """A bound plan on one device."""

    def __init__(
        self, device: Device, plan: Plan, limits: Limits, cache: CacheTypes, progress: Progress | None,
        keep: Collection[Value],
    ) -> None:  # fmt: skip
        super().__init__(plan, limits)
        check_cache(cache, CACHE)
        self._device = device
        self._program = program = bind.program(plan, limits, cache, keep, device.facts.compute)
        self._buffers: dict[str | int, Any] = {}
        self.replays = Replays(device, MOST * len(program.stages))
        report = progress or (lambda what, done, total: None)
        self.memory = memory_of(program, plan, limits, cache)
        must_fit(device, self.memory)
        try:
            compiled = self._compile(program, report)
            self._allocate(program, cache, report)
        except BaseException:
            self.close()
            raise
        self._launches = [
            tuple([self._prepare(compiled[one.kernel], one) for one in dispatch.launches(rows)] for rows in ROW_CLASSES)
            for dispatch in program.dispatches
        ]
        self._picks = [self._prepare(compiled[launch.kernel], launch) for launch in program.picks]
        self.most_picked, self._picked = largest.MOST if program.picks else 0, 0
        self._set_cache(PagedCache(device, plan, cache, self._buffers))
        self._ropes = RopeTables(program.ropes, limits.positions, self._fill_rope)
        self._step = device.staging(step_words(limits))
        self._again: Callable[[], None] = device.sync
        self._sent: dict[str, NDArray[np.int32]] = {}  # tables that the device has
        self._logits = np.zeros((limits.logit_rows if program.picks else 0, plan.logits.width), np.float32)
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
        self._piece_counts: dict[str, int] = {}

    # -- binding ---------------------------------------------------------------------------------------------------

    def _compile(self, program: Program, report: Progress) -> dict[Kernel, Any]:
        wanted = program.kernels()
        local = max(kernel.local_bytes for kernel in wanted)
        if local > self._device.facts.local_memory:
            raise BackendError(
                f"{self._device.facts.name}: a work-group has {self._device.facts.local_memory} bytes of local memory, "
                f"this model's kernels need {local}; use --backend cpu"
            )
        made, device = {}, self._device
        sources, names = [k.source(device.generic) for k in wanted], [k.name for k in wanted]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            translated = pool.map(device.translate, sources, names)
            for done, (kernel, source, _) in enumerate(zip(wanted, sources, translated, strict=True)):
                report("compiling kernels", done, len(wanted))
                made[kernel] = device.compile(source, kernel.name)
        report("compiling kernels", len(wanted), len(wanted))
        return made

    def _allocate(self, program: Program, cache: CacheTypes, report: Progress) -> None:
        limits, alloc = self.limits, self._device.alloc
        rows = {"batch": limits.rows, "logits": limits.logit_rows}
        for buffer in program.buffers:
            self._buffers[buffer.number] = alloc(4 * buffer.stride * rows[buffer.rows], "the activations")
        for name, size in {**program.lists, NOTHING: 64, "step": 4 * step_words(limits)}.items():
            self._buffers[name] = alloc(size, "the activations")
        self._tables_size = 4 * max(limits.blocks, -(-limits.positions // BLOCK)) * limits.rows
        for name in ("tables", "window tables"):
            self._buffers[name] = alloc(self._tables_size, "block tables")
        for number, layer in enumerate(self._plan.layers):
            for part, size in zip(PARTS, part_bytes(layer, cache), strict=True):
                what = "the cache (-c makes it smaller)"
                self._buffers[f"{part}:{number}"] = alloc(limits.blocks_of(layer) * size, what)
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

    def _fill(self, weight: Tensor) -> list[int]:
        """Upload a matrix; the bytes of each piece."""
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
        count = self._look_for(count)
        self._run(batch, count)
        return largest.decoded(self._keys_of(len(batch.logit_rows), count))

    def _look_for(self, count: int) -> int:
        """Let the search be for `count` from now on, or for all logits if there are fewer; returns the number."""
        self._must_be_open()
        if not 0 < count <= largest.MOST:
            raise BackendError(f"the {count} largest logits were asked for; from 1 to {largest.MOST} can be")
        count = min(count, self._plan.logits.width)
        if count != self._picked:
            self._device.upload(self._buffers[PICKED], 0, largest.numbers(self._plan.logits.width, count))
            self._picked = count
        return count

    def _keys_of(self, rows: int, count: int) -> NDArray[np.uint32]:
        """Where the keys of the largest logits go: (rows, count, 2)."""
        return self._keys[: 2 * rows * count].reshape(rows, count, 2)

    def _run(self, batch: Batch, picked: int) -> None:
        self._must_be_whole()
        self._check(batch)
        self._upload(batch)
        for rows in pieces(batch):
            wanted = self._send(batch, rows)
            passes = self._launch(self._program.stages[0], picked)
            self._read(batch, rows, wanted, picked, passes)

    def _upload(self, batch: Batch) -> None:
        """Upload what all pieces of a batch have in common."""
        self._upload_tables("tables", batch.tables)
        if batch.window_tables is not None:
            self._upload_tables("window tables", batch.window_tables)

    def _send(self, batch: Batch, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Some rows of the batch to the device; which of its rows of logits are of them."""
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
            found = tiles(batch.sequence[rows])
            counts["tiles"] = len(found)
            step[HEADER + 4 * limit : HEADER + 4 * limit + found.size] = found.reshape(-1)
        at = HEADER + 7 * limit
        step[at : at + len(wanted)] = place[batch.logit_rows[wanted]]
        self._device.send(self._buffers["step"], step)
        self._piece_counts = counts
        return wanted

    def _launch(self, stage: Stage[Buffer] | None, picked: int) -> int:
        """Launch a stage for the rows that were sent, then the search for the largest logits; returns its passes."""
        counts, work = self._piece_counts, stage.work if stage is not None else slice(0, 0)
        reads = largest.passes(self._plan.logits.width, picked) if picked and counts["logits"] else []
        counts = counts | {f"keys {number}": count for number, count in enumerate(reads)}
        shape = work.start, work.stop, counts["batch"], counts["logits"], counts["partitions"], picked
        self._again = partial(self._queue, work, counts, len(reads))
        if counts["batch"] <= FEW_ROWS:
            self._again = partial(self.replays.run, shape, self._again)
        self._again()
        return len(reads)

    def _queue(self, work: slice, counts: dict[str, int], passes: int) -> None:
        """Queue some dispatches, and some passes of the search for the largest logits."""
        for dispatch, bound in zip(self._program.dispatches[work], self._launches[work], strict=True):
            count = counts[dispatch.rows]
            if count:
                for launch, grid in bound[row_class(count)]:
                    launch(tuple(dimension(d, counts) for d in grid))  # type: ignore[arg-type]
        for launch, grid in self._picks[:passes]:
            launch(tuple(dimension(d, counts) for d in grid))  # type: ignore[arg-type]

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

    def _fill_rope(self, rope: Rope, start: int, stop: int) -> None:
        positions = np.arange(start, stop, dtype=np.int32)
        values = np.concatenate(rope_table(rope, positions), axis=1).astype(np.float32)  # (positions, n_rot)
        self._device.upload(self._buffers[_rope_name(rope)], 4 * start * rope.n_rot, values)

    def replay(self) -> None:
        """Queue the launches of the last step, or of its last piece, once more: what a measurement of them needs."""
        self._must_be_open()
        self._again()

    # -- one stage at a time ---------------------------------------------------------------------------------------

    def pieces(self, batch: Batch) -> list[NDArray[np.intp]]:
        return pieces(batch)

    def _take_in(self, batch: Batch) -> None:
        self._upload(batch)
        self._send(batch, np.arange(len(batch.tokens)))

    def _run_stage(self, number: int, received: Sequence[F32]) -> list[F32]:
        stage = self._program.stages[number]
        for (_, buffer), rows in zip(stage.received, received, strict=True):
            if len(rows):
                self._device.upload(self._buffers[buffer.number], 0, np.ascontiguousarray(rows))
        self._launch(stage, 0)
        found = [np.empty((self._counts[value.rows], value.width), np.float32) for value, _ in stage.sent]
        for (_, buffer), rows in zip(stage.sent, found, strict=True):
            self._gather(buffer.number, rows, np.arange(len(rows)))
        return found

    def result(self) -> F32:
        rows = np.arange(self._counts["logits"])
        self._gather(self._program.where[self._plan.logits.index].number, self._logits, rows)
        return self._logits[: len(rows)]

    def result_largest(self, count: int) -> Largest:
        count, rows = self._look_for(count), self._counts["logits"]
        keys, passes = self._keys_of(rows, count), self._launch(None, count) if rows else 0
        if passes:
            self._gather(KEYS[(passes - 1) % 2], keys, np.arange(rows))
        return largest.decoded(keys)

    # -- the rest of the interface ---------------------------------------------------------------------------------

    def read_bandwidth(self) -> float:
        """Bytes per second of copying the largest matrix within the device's memory; reads and writes both count."""
        self._must_be_open()
        return copy_bandwidth(self._device, max(formats.size_of(w) for w in self._program.matrices.values()))

    def _free(self) -> None:
        self._launches = []
        if self._buffers:
            self.replays.clear()
        self._step, self._keys = np.empty(0, np.int32), np.empty(0, np.uint32)  # before their device is closed
        for buffer in self._buffers.values():
            self._device.free(buffer)
        self._buffers.clear()


NOTHING_SENT = np.empty((0, 0), np.int32)


def _name(argument: Argument) -> str | int:
    if isinstance(argument, Buffer):
        return argument.number
    return _rope_name(argument) if isinstance(argument, Rope) else argument


def _rope_name(rope: Rope) -> str:
    return f"rope:{rope!r}"


def _numbers(weight: Weight) -> F32:
    """A tensor of plain numbers as float32."""
    rows = int(np.prod(weight.shape[:-1], dtype=np.int64))
    return np.ascontiguousarray(
        dequantize(weight.read(0, rows), weight.format).reshape(rows, -1)[:, : weight.shape[-1]]
    )
