"""Runs the encoder of pictures or sound on a backend, segment by segment, so that other work can run in between.

A segment is a stage of a plan. On the CPU a stage, too, can be divided into slices of time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from time import perf_counter

import numpy as np

from localllm.backends.base import Backend, BackendError, CacheTypes, Limits, Memory
from localllm.backends.shell import Shell
from localllm.plan import BLOCK, F32, Batch
from localllm.plan.runs import EncoderModel, Encoding, Layout, Part, Run, bands

EXACT = CacheTypes("f32", "f32")
WHOLE = 3600.0  # seconds of a slice that ends with its segment


class Encoder:
    """An encoder whose plans are bound to a backend. One input runs at a time."""

    def __init__(self, backend: Backend, model: EncoderModel) -> None:
        self.model = model
        self._bound: dict[str, Shell] = {}
        try:
            for name, part in model.parts.items():
                executable = backend.bind(part.plan, limits_of(part), EXACT)
                assert isinstance(executable, Shell), f"{backend.name} does not run stages"
                self._bound[name] = executable
        except BaseException:
            self.close()
            raise

    @property
    def width(self) -> int:
        return self.model.width

    @property
    def bytes(self) -> int:
        return sum(executable.memory.bytes for executable in self._bound.values())

    def begin(self, inputs: Sequence[F32], flags: Sequence[int] = ()) -> Running:
        """Return the encoding of an input, to be advanced. Begin the next one after it is done."""
        return Running(self._bound, self.model.encode(inputs, flags))

    def encode(self, inputs: Sequence[F32], flags: Sequence[int] = ()) -> F32:
        """Return the embeddings (tokens, width) of an input."""
        running = self.begin(inputs, flags)
        while not running.advance():
            pass
        return running.result

    def close(self) -> None:
        for executable in self._bound.values():
            executable.close()
        self._bound.clear()


class Running:
    """The encoding of one input."""

    def __init__(self, bound: dict[str, Shell], encoding: Encoding) -> None:
        self._bound, self._encoding = bound, encoding
        self._result: F32 | None = None
        self._stage = 0
        self._within = False  # whether a slice of the stage has run
        self._values: Sequence[F32] = ()
        self._run: Run | None = None
        self._between: Iterator[None] | None = self._continued(None)  # what happens between two runs
        self._error: BaseException | None = None  # which ended it

    @property
    def result(self) -> F32:
        """The embeddings (tokens, width), once `advance` has returned True."""
        assert self._result is not None, "the encoder is not done"
        return self._result

    def advance(self, seconds: float = 0.0) -> bool:
        """Run the next segment, or as much as `seconds` allow, but something. Return whether the embeddings are
        complete. After an error, every further call raises it again.
        """
        if self._error is not None:
            raise self._error
        try:
            return self._proceed(seconds)
        except BaseException as error:
            self._error = error
            raise

    def _proceed(self, seconds: float) -> bool:
        if not seconds:
            self._arrange()
            self._advance(0.0)
            self._arrange()
            return self._result is not None
        until, left = perf_counter() + seconds, seconds
        while self._result is None and left > 0:
            if self._between is None:
                self._advance(left)
            else:
                self._arrange(until)
            left = until - perf_counter()
        return self._result is not None

    def _arrange(self, until: float = inf) -> None:
        """Take results and prepare the next run until this time, at least one piece of it."""
        if self._between is not None:
            for _ in self._between:
                if perf_counter() >= until:
                    return
            self._between = None

    def _advance(self, seconds: float) -> None:
        """Run the next segment, or a slice of it if `seconds` are given."""
        if self._run is None:
            return
        run, step = self._run, self._stage  # `number` is the stage of the plan, `step` its place in the run
        executable, layouts = self._bound[run.part], run.layouts
        number, count = (step, executable.stages) if run.stage is None else (run.stage, 1)
        layout = layouts[min(step, len(layouts) - 1)]
        begins = not step or layout is not layouts[min(step - 1, len(layouts) - 1)]
        if begins and not self._within:
            executable.begin(_batch(layout, executable.limits), number)
        last = step and step == count - 1
        received = run.later if last and run.later else self._values
        whole = not seconds and not self._within
        found = executable.run(received) if whole else executable.run_slice(seconds or WHOLE, received)
        self._within = found is None
        if found is None:
            return
        self._values = found
        self._stage += 1
        if self._stage == count:
            self._between = self._continued(found)

    def _continued(self, results: Sequence[F32] | None) -> Iterator[None]:
        """Copy the results of a run, and continue to the next run, or to the embeddings, in short pieces."""
        copies: list[F32] | None = None
        if results is not None:
            copies = [np.empty(value.shape, np.float32) for value in results]
            for value, into in zip(results, copies, strict=True):
                for band in bands(len(value), into.strides[0]):
                    into[band] = value[band]
                    yield
        try:
            run = next(self._encoding) if copies is None else self._encoding.send(copies)
            while run is None:
                yield
                run = next(self._encoding)
            self._run, self._stage, self._values = run, 0, run.received
        except StopIteration as end:
            self._run, self._values, self._result = None, (), np.ascontiguousarray(end.value, np.float32)


def memory_of(model: EncoderModel, threads: int) -> list[Memory]:
    """Return the memory that each part of an encoder will need on the CPU."""
    from localllm.backends.cpu.budget import plan_memory  # imports the CPU's kernels

    return [plan_memory(part.plan, limits_of(part), threads, EXACT) for part in model.parts.values()]


def limits_of(part: Part) -> Limits:
    """Return the limits of a part; windows shorter than a cache block take one each."""
    rows = -(-part.rows // BLOCK) * BLOCK
    each = min(part.window or rows, rows)
    blocks = -(-rows // each) * -(-each // BLOCK) + 2
    return Limits(rows, 1, blocks, rows + BLOCK)


def _batch(layout: Layout, limits: Limits) -> Batch:
    """Return the batch of a layout; each sequence has its own cache blocks."""
    lengths = np.array(layout.lengths, np.int32)
    rows, needed = int(lengths.sum()), -(-np.maximum(lengths, layout.border) // BLOCK)
    if rows > limits.rows or int(needed.sum()) > limits.blocks:
        raise BackendError(f"encoder: {rows} rows in {len(lengths)} windows, bound for {limits.rows} rows")
    firsts = np.cumsum(needed) - needed
    tables = np.minimum(firsts[:, None] + np.arange(int(needed.max())), limits.blocks - 1).astype(np.int32)
    sequence = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    positions = (np.arange(rows) - np.repeat(np.cumsum(lengths) - lengths, lengths)).astype(np.int32)
    slots = (tables[sequence, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32)
    borders = np.full(len(lengths), layout.border, np.int32) if layout.border else None
    spans = np.maximum(positions, np.minimum(lengths[sequence], layout.span) - 1) if layout.span else None
    tokens, nothing = np.zeros(rows, np.int32), np.zeros(0, np.int32)
    return Batch(
        tokens, positions, slots, sequence, tables, nothing, borders=borders, axes=layout.axes, span_ends=spans
    )
