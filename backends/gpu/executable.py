"""A plan bound to a device's memory. Its launches are replayed in order for every batch. CUDA and OpenCL share it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.allocation import Buffer
from localllm.backends.base import BackendError, CacheTypes, Limits, Progress, Routing, TopK
from localllm.backends.checks import check_cache
from localllm.backends.gpu import bind, formats, steps
from localllm.backends.gpu.budget import copy_bandwidth, memory_of, must_fit
from localllm.backends.gpu.cachetypes import CACHE
from localllm.backends.gpu.device import Device
from localllm.backends.gpu.kernels import largest
from localllm.backends.gpu.kernels.kernel import FEW_ROWS, Kernel
from localllm.backends.gpu.kernels.largest import KEYS
from localllm.backends.gpu.memory import DeviceMemory
from localllm.backends.gpu.paged import PagedCache
from localllm.backends.gpu.program import KeptRouting, Program
from localllm.backends.gpu.references import Fixed, Reference, RopeTableOf
from localllm.backends.gpu.replay import MOST, Replays
from localllm.backends.lookups import Lookups
from localllm.backends.shell import RopeTables, Shell
from localllm.backends.stages import Stage
from localllm.base.notices import Notice, Setting
from localllm.plan import F32, Batch, Plan, Rope, Tensor, Value, rope_table

NOTHING_SENT = np.empty((0, 0), np.int32)


class GpuExecutable(Shell):
    """A plan bound to one device."""

    def __init__(
        self, device: Device, plan: Plan, limits: Limits, cache: CacheTypes, progress: Progress | None,
        keep: Collection[Value], check: Callable[[Program], None] | None = None,
    ) -> None:  # fmt: skip
        """Bind the plan. `check` raises if the device does not run the program correctly."""
        super().__init__(plan, limits)
        check_cache(cache, CACHE)
        self._device, self._causal, self._lookups = device, plan.causal, Lookups(plan)
        facts = device.facts
        self._program = program = bind.program(plan, limits, cache, keep, facts.compute, facts.local_memory)
        self._buffers = DeviceMemory(device, plan, limits)
        self.replays = Replays(device, MOST * len(program.stages))
        report = progress or (lambda what, done, total: None)
        self.memory = memory_of(program, plan, limits, cache)
        must_fit(device, self.memory)
        try:
            if check is not None:
                check(program)
            compiled = self._compile(program, report)
            self._buffers.allocate(program, cache, report)
            prepare = self._buffers.prepare
            self._launches = [
                tuple([prepare(compiled, one) for one in dispatch.launches(rows)] for rows in steps.ROW_CLASSES)
                for dispatch in program.dispatches
            ]
            self._picks = [prepare(compiled, launch) for launch in program.has_top_k]
        except BaseException:
            self.close()
            raise
        self.max_top_k, self._picked = largest.MOST if program.has_top_k else 0, 0
        self._set_cache(PagedCache(device, plan, cache, self._buffers))
        self._ropes = RopeTables(program.ropes, limits.positions, self._fill_rope)
        self._step = device.staging(steps.step_words(limits, plan))
        of_wanted = steps.wanted_limits(limits) if Fixed.WANTED in program.scratch else None
        self._wanted_limits = of_wanted
        self._wanted = device.staging(steps.step_words(of_wanted, plan) if of_wanted else 0)
        self._again: Callable[[], None] = device.sync
        self._sent: dict[Fixed, NDArray[np.int32]] = {}  # block tables that are already on the device
        self._logits = np.zeros((limits.logit_rows if program.has_top_k else 0, plan.logits.width), np.float32)
        self._keys = device.staging(2 * largest.MOST * limits.logit_rows).view(np.uint32)
        rows = {"batch": limits.rows, "logits": limits.logit_rows}
        self._kept = {v.index: np.zeros((rows[v.rows], v.width), np.float32) for v in keep}
        of_drafts = {value.index for head in plan.drafts for value in (head.logits, head.following)}
        self._kept_of_step = [value for value in keep if value.index not in of_drafts]
        self._routings = {out: _empty_routing(own, rows[own.hidden.rows]) for out, own in program.routings.items()}
        self._piece_counts: dict[str, int] = {}

    def _compile(self, program: Program, report: Progress) -> dict[Kernel, Any]:
        wanted = program.kernels()
        local = max(kernel.local_bytes for kernel in wanted)
        if local > self._device.facts.local_memory:
            facts = self._device.facts
            problem = f"a work-group has {facts.local_memory} bytes of local memory, this model's kernels need {local}"
            raise BackendError(Notice(f"{facts.name}: {problem}; use ", Setting("backend", "cpu")))
        made, device = {}, self._device
        sources, names = [k.source(device.generic) for k in wanted], [k.name for k in wanted]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            translated = pool.map(device.translate, sources, names)
            for done, (kernel, source, _) in enumerate(zip(wanted, sources, translated, strict=True)):
                report("compiling kernels", done, len(wanted))
                made[kernel] = device.compile(source, kernel.name)
        report("compiling kernels", len(wanted), len(wanted))
        return made

    # -- stepping --------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> F32:
        """Run the batch and return its logits float32 (L, vocabulary), a view that the next step overwrites."""
        self._run(batch, 0)
        return self._logits[: len(batch.logit_rows)]

    def step_top_k(self, batch: Batch, count: int) -> TopK:
        """Run the batch and return the `count` largest logits of each row. The other logits stay on the device."""
        count = self._look_for(count)
        self._run(batch, count)
        return largest.decoded(self._keys_of(len(batch.logit_rows), count))

    def _look_for(self, count: int) -> int:
        """Set the top-k search to `count` logits, or to the vocabulary size if smaller. Return the count used."""
        self._must_be_open()
        if not 0 < count <= largest.MOST:
            raise BackendError(f"the {count} largest logits were requested; supported: 1 to {largest.MOST}")
        count = min(count, self._plan.logits.width)
        if count != self._picked:
            self._device.upload(self._buffers[Fixed.PICKED], 0, largest.numbers(self._plan.logits.width, count))
            self._picked = count
        return count

    def _keys_of(self, rows: int, count: int) -> NDArray[np.uint32]:
        """Return host memory for the sort keys of the largest logits: (rows, count, 2)."""
        return self._keys[: 2 * rows * count].reshape(rows, count, 2)

    def _run(self, batch: Batch, picked: int) -> None:
        self._must_be_whole()
        for stage, part in self._turns(batch):
            self._check(part)
            self._upload(part)
            for rows in self.pieces(part):
                wanted = self._send(part, rows)
                self._supply(self._program.stages[stage], rows)
                passes = self._launch(self._program.stages[stage], picked)
                self._read(part, rows, wanted, picked, passes)

    def draft(self, batch: Batch, hidden: F32, head: int = 0) -> None:
        drafts = self._plan.drafts
        assert head < len(drafts), "the plan has no such head"
        self._check(batch, drafting=True)
        self._upload(batch)
        stage = self._program.stages[self._stage_count - len(drafts) + head]
        ((_, buffer),) = stage.received
        for rows in self.pieces(batch):
            wanted = self._send(batch, rows)
            self._device.upload(self._buffers[buffer], 0, np.ascontiguousarray(hidden[rows]))
            self._supply(stage, rows)
            self._launch(stage, 0)
            self._download([drafts[head].logits, drafts[head].following], rows, wanted)

    def _upload(self, batch: Batch) -> None:
        """Upload the data that all pieces of a batch share, and read the rows of its lookups."""
        self._lookups.fetch(batch)
        self._upload_tables(Fixed.TABLES, batch.tables)
        if batch.window_tables is not None:
            self._upload_tables(Fixed.WINDOW_TABLES, batch.window_tables)

    def _upload_tables(self, which: Fixed, tables: NDArray[np.int32]) -> None:
        tables, most = np.ascontiguousarray(tables, np.int32), self._buffers.tables_size
        if tables.nbytes > most:
            raise BackendError(f"batch: tables of {tables.size} blocks, bound for {most // 4}; give only tables in use")
        if tables.size and not np.array_equal(tables, self._sent.get(which, NOTHING_SENT)):
            self._device.upload(self._buffers[which], 0, tables)
            self._sent[which] = tables.copy()

    def _send(self, batch: Batch, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Send some rows of the batch to the device. Return the positions of their logits in `logit_rows`."""
        known = self._causal, self._axes
        wanted, self._piece_counts = steps.fill_step(self._step, batch, rows, self.limits, *known)
        self._device.send(self._buffers[Fixed.STEP], self._step)
        if self._wanted_limits is not None and len(wanted):
            own = replace(batch, logit_rows=batch.logit_rows[wanted]).wanted()
            every = np.arange(len(wanted))
            counts = steps.fill_step(self._wanted, own, every, self._wanted_limits, axes=self._axes)[1]
            self._piece_counts[steps.TILES["logits"]] = counts[steps.TILES["batch"]]
            self._device.send(self._buffers[Fixed.WANTED], self._wanted)
        return wanted

    def _supply(self, stage: Stage[Buffer], rows: NDArray[np.intp]) -> None:
        """Upload the looked-up rows of a stage for some rows of the batch."""
        for value, buffer in stage.looked_up:
            if len(found := self._lookups[value]):
                self._device.upload(self._buffers[buffer], 0, np.ascontiguousarray(found[rows]))

    def _launch(self, stage: Stage[Buffer] | None, picked: int) -> int:
        """Launch a stage for the sent rows, then the top-k search if requested. Return the number of search passes."""
        counts, work = self._piece_counts, stage.work if stage is not None else slice(0, 0)
        reads = largest.passes(self._plan.logits.width, picked) if picked and counts["logits"] else []
        counts = counts | {f"keys {number}": count for number, count in enumerate(reads)}
        sizes = [counts[name] for name in ("batch", "logits", "partitions", steps.TILES["logits"])]
        shape = work.start, work.stop, picked, *sizes
        self._again = partial(self._queue, work, counts, len(reads))
        if counts["batch"] <= FEW_ROWS:
            self._again = partial(self.replays.run, shape, self._again)
        self._again()
        return len(reads)

    def _queue(self, work: slice, counts: dict[str, int], passes: int) -> None:
        """Queue some dispatches, and the first passes of the top-k search."""
        for dispatch, bound in zip(self._program.dispatches[work], self._launches[work], strict=True):
            count = counts[dispatch.rows]
            if count:
                for launch, grid in bound[steps.row_class(count)]:
                    launch(steps.work_groups(grid, counts))
        for launch, grid in self._picks[:passes]:
            launch(steps.work_groups(grid, counts))

    def spoil(self, bits: int) -> None:
        """Overwrite the memory of activations, to check that no kernel reads values from before its step."""
        self._must_be_open()
        self._buffers.spoil(bits)

    def replay(self) -> None:
        """Queue the launches of the last step (or of its last piece) again, for measurements."""
        self._must_be_open()
        self._again()

    # -- results ---------------------------------------------------------------------------------------------------

    def _read(self, batch: Batch, rows: NDArray[np.intp], wanted: NDArray[np.intp], picked: int, passes: int) -> None:
        """Download the results of a piece into the results of the batch: all or the largest logits, and kept values."""
        of = {"batch": rows, "logits": wanted}
        if picked and passes:
            self._gather(KEYS[(passes - 1) % 2], self._keys_of(len(batch.logit_rows), picked), wanted)
        if not picked:
            self._gather(self._program.where[self._plan.logits.index], self._logits, wanted)
        self._download(self._kept_of_step, rows, wanted)
        for out, own in self._program.routings.items():
            found, at = self._routings[out], of[own.hidden.rows]
            self._gather(own.hidden, found.hidden.reshape(len(found.hidden), -1), at)
            self._gather(own.choices, found.choices, at)

    def _download(self, values: Sequence[Value], rows: NDArray[np.intp], wanted: NDArray[np.intp]) -> None:
        """Download kept values of a piece: some rows of the batch, or rows with logits."""
        for value in values:
            at = rows if value.rows == "batch" else wanted
            self._gather(self._program.where[value.index], self._kept[value.index], at)
        if not len(wanted):
            self._device.sync()

    def _gather(self, source: Reference, into: NDArray[Any], rows: NDArray[np.intp]) -> None:
        """Download the first rows of a buffer to the given rows of an array."""
        if not len(rows):
            return
        if rows[-1] - rows[0] + 1 == len(rows):  # adjacent rows, the common case: copied directly
            self._device.download(self._buffers[source], 0, into[rows[0] : rows[-1] + 1])
            return
        found = np.empty((len(rows), *into.shape[1:]), into.dtype)
        self._device.download(self._buffers[source], 0, found)
        into[rows] = found

    def result(self) -> F32:
        assert self._program.has_top_k, "the logits are on another device"
        rows = np.arange(self._counts["logits"])
        self._gather(self._program.where[self._plan.logits.index], self._logits, rows)
        return self._logits[: len(rows)]

    def result_top_k(self, count: int) -> TopK:
        count, rows = self._look_for(count), self._counts["logits"]
        keys, passes = self._keys_of(rows, count), self._launch(None, count) if rows else 0
        if passes:
            self._gather(KEYS[(passes - 1) % 2], keys, np.arange(rows))
        return largest.decoded(keys)

    # -- called by the shell ---------------------------------------------------------------------------------------

    def pieces(self, batch: Batch) -> list[NDArray[np.intp]]:
        return steps.pieces(batch, self._causal)

    def _take_in(self, batch: Batch) -> None:
        self._upload(batch)
        self._send(batch, np.arange(len(batch.tokens)))

    def _run_stage(self, number: int, received: Sequence[F32]) -> list[F32]:
        stage = self._program.stages[number]
        for (_, buffer), rows in zip(stage.received, received, strict=True):
            if len(rows):
                self._device.upload(self._buffers[buffer], 0, np.ascontiguousarray(rows))
        self._supply(stage, np.arange(self._counts["batch"]))
        self._launch(stage, 0)
        found = [np.empty((self._counts[value.rows], value.width), np.float32) for value, _ in stage.sent]
        for (_, buffer), rows in zip(stage.sent, found, strict=True):
            self._gather(buffer, rows, np.arange(len(rows)))
        return found

    def _fill_rope(self, rope: Rope, start: int, stop: int) -> None:
        positions = np.arange(start, stop, dtype=np.int32)
        values = np.concatenate(rope_table(rope, positions), axis=1).astype(np.float32)  # (positions, n_rot)
        table = self._buffers[RopeTableOf(rope)]
        self._device.upload(table, 4 * (len(rope.axes) + start * rope.n_rot), values)
        if rope.axes and not start:
            self._device.upload(table, 0, np.array(rope.axes, np.int32))

    def _fill(self, weight: Tensor) -> None:
        self._buffers.fill(weight)

    def read_bandwidth(self) -> float:
        """Measure the bandwidth of copying the largest matrix on the device in bytes per second, reads plus writes."""
        self._must_be_open()
        return copy_bandwidth(self._device, max(formats.size_of(w) for w in self._program.matrices.values()))

    def _free(self) -> None:
        self._launches, self._picks = [], []
        self._step = self._wanted = np.empty(0, np.int32)  # release before the device is closed
        self._keys = np.empty(0, np.uint32)
        try:
            self.replays.clear()
        finally:  # a failed device does not finish its queue
            self._buffers.free()


def _empty_routing(own: KeptRouting, rows: int) -> Routing:
    """Allocate the expert routing of the largest batch."""
    used = own.used
    return Routing(np.zeros((rows, used), np.int32), np.zeros((rows, used, own.hidden.stride // used), np.float32))
