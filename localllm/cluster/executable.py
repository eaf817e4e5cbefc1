"""A plan over several stages behind the interface of one executable, which `Engine` runs like any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from threading import RLock
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError, TopK
from localllm.backends.hybrid.executable import joint_bandwidth, sum_of
from localllm.cluster.cut import Cut
from localllm.cluster.errors import ClusterError, MessageError, StageLost
from localllm.cluster.exchange import Exchange
from localllm.cluster.ring import Ring
from localllm.cluster.stage import BLOCKS_BYTES, DESCRIBED, Arrays, Description, Layout, Stage, result_kinds, returned
from localllm.cluster.wire import Kind, batch_arrays, batch_parts
from localllm.engine import top_k_of
from localllm.plan import F32, Batch, Rows, Tensor, Value

MICRO_ROWS = 64  # minimum rows of a micro-batch: fewer use the processor worse than an idle stage does
MICRO_BATCHES = 4  # micro-batches per stage; more shorten the time in which the pipe fills and empties
MOST_MICRO_BATCHES = 32  # of a step: the messages of `depth` steps must fit in the queues of the connections
ONE_PROCESS = "can be measured or replaced only where all layers run in one process; load the model without stages"


@dataclass(slots=True)
class _Piece:
    """A micro-batch in flight: all rows of its step, or some."""

    batch: Batch
    rows: NDArray[np.intp]  # of the step
    wanted: NDArray[np.intp]  # positions of its logits in the step's
    running: int | Arrays  # number of the request, or the result
    values: dict[int, int | NDArray[Any]] = field(default_factory=dict)  # by value: number of the request, or the value


@dataclass(slots=True)
class Running:
    """A step in flight."""

    batch: Batch
    top_k: int
    exchange: Exchange  # a later ring does not know the step
    pieces: list[_Piece] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)  # that each piece fetches


class SplitExecutable:
    """Owns the first stage and the ring of the others. Only one thread at a time may use it.

    Every stage handles steps, copies and drafts in the order in which the front sent them, as one process does.
    """

    def __init__(
        self, cut: Cut, layout: Layout, first: Stage, ring: Ring, reconnect: Callable[[], Ring] | None = None
    ) -> None:
        """`reconnect` returns a new ring after a stage was lost, and restarts what died."""
        self._cut, self._first, self.limits = cut, first, layout.limits
        self._exchange, self._reconnect = Exchange(ring), reconnect
        self._digest = np.frombuffer(layout.digest(cut), np.uint8)
        self._changing = RLock()  # held while the ring is replaced, and by `close`
        self._closed = False
        self._values: dict[int, NDArray[Any]] = {}  # values of the last step or draft that came with its result
        self._begun: Batch | None = None
        self._logits: F32 = np.empty((0, cut.plan.logits.width), np.float32)
        self._returned = returned(cut.plan)
        self.depth = cut.stages
        self.stages = self._describe(self._exchange)
        self.memory = sum_of([stage.memory for stage in self.stages])
        self.block_bytes = tuple([self.stages[stage].block_bytes[number] for stage, number in cut.layers])
        self.cache_layout = self._layout()
        self.max_top_k = self.stages[-1].max_top_k
        # Rows of a step may be evaluated in several batches: on the CPU this does not change their bits.
        fetched = set(layout.keep) - {
            v.index for head in cut.plan.drafts for v in (head.hidden, head.logits, head.following)
        }
        fetched -= {cut.plan.normed.index} if cut.plan.normed is not None else set()  # each micro-batch fetches it
        self._divides = cut.plan.causal and not fetched and all(stage.backend == "cpu" for stage in self.stages)

    def _describe(self, exchange: Exchange) -> list[Description]:
        """Check that all stages fit together, and return their descriptions."""
        if self._cut.stages == 1:
            return [self._first.description]
        _, *arrays = exchange.ask(Kind.HELLO, (), (self._digest, *self._first.description.arrays()))
        if len(arrays) != DESCRIBED * self._cut.stages:
            raise MessageError(f"message: {self._cut.stages} stages should answer, found {len(arrays) // DESCRIBED}")
        found = [Description.of(tuple(arrays[at : at + DESCRIBED])) for at in range(0, len(arrays), DESCRIBED)]
        if any(len(d.block_bytes) != len(part.layers) for d, part in zip(found, self._cut.parts, strict=True)):
            raise MessageError("message: a stage has another number of cache layers")
        return found

    def _layout(self) -> str:
        runs = [(self.stages[s].cache_layout, list(group)) for s, group in groupby(s for s, _ in self._cut.layers)]
        names = {name for name, _ in runs}
        if len(names) <= 1:  # blocks fit an executable of one process
            return names.pop() if names else self.stages[0].cache_layout
        return ", ".join(f"{len(group)} of {name}" for name, group in runs)

    def restore(self) -> None:
        """Connect to the stages again, after one was lost: the caches are empty then. Raises StageLost."""
        with self._changing:
            if self._closed or self._reconnect is None:
                raise StageLost("the stages are not connected again; load the model again")
            self._exchange.close()
            exchange = Exchange(self._reconnect())
            try:
                if self._describe(exchange) != self.stages:
                    raise ClusterError("a stage came back as another one; load the model again")
            except BaseException:
                exchange.close()
                raise
            self._exchange = exchange

    # -- stepping --------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> F32:
        """Run the batch and return its logits, float32 (L, vocabulary)."""
        found = self.collect(self.submit(batch))
        assert not isinstance(found, TopK)
        return found

    def step_top_k(self, batch: Batch, count: int) -> TopK:
        """Run the batch and return the `count` largest logits of each row."""
        found = self.collect(self.submit(batch, count))
        assert isinstance(found, TopK)
        return found

    def submit(self, batch: Batch, top_k: int = 0, values: Sequence[Value] = ()) -> Running:
        """Run the first stage, and send its values on, one micro-batch after the other."""
        fetched = [value for value in dict.fromkeys(values) if value not in self._returned]
        step = Running(batch, top_k, self._exchange, values=fetched)
        try:
            for rows in self._micro_batches(batch):
                part, wanted = batch.piece(rows)
                piece = _Piece(part, rows, wanted, self._submit(part, top_k))
                step.pieces.append(piece)
                for value in step.values:  # the next micro-batch overwrites the values
                    piece.values[value.index] = self._fetch(value)
        except BaseException:
            self.abandon(step)
            raise
        return step

    def _submit(self, batch: Batch, top_k: int) -> int | Arrays:
        """Run the first stage on a micro-batch. Return the request's number, or the result if it is the last."""
        found = self._first.step(batch, (), top_k)
        if self._first.is_last:
            return found
        return self._exchange.send(Kind.STEP, (top_k, batch_parts(batch)), (*batch_arrays(batch), *found))

    def _fetch(self, value: Value) -> int | NDArray[Any]:
        """Return a value of the newest step, or the number of the request for it."""
        stage = self._cut.stage_of(value)
        if not stage:
            return self._first.executable.value(value).copy()
        return self._exchange.send(Kind.VALUE, (stage, value.index))

    def collect(self, step: Running) -> F32 | TopK:
        """Return the logits of a step, or the largest ones."""
        of = result_kinds(self._returned, step.top_k)
        try:
            if len(step.pieces) == 1:
                found = self._answer(step, step.pieces[0], of)
            else:
                results = ((piece.rows, piece.wanted, self._answer(step, piece, of)) for piece in step.pieces)
                found = tuple(step.batch.merged(of, results))
            extra = found[len(found) - len(self._returned) :]
            values = {value.index: array for value, array in zip(self._returned, extra, strict=True)}
            for value in step.values:
                values[value.index] = self._fetched(step, value)
        except BaseException:
            self.abandon(step)
            raise
        self._values = values
        return TopK(*found[:2]) if step.top_k else found[0]

    def _answer(self, step: Running, piece: _Piece, of: Sequence[Rows]) -> Arrays:
        """Return the result of a micro-batch."""
        found = step.exchange.answer(piece.running) if isinstance(piece.running, int) else piece.running
        logits = self._cut.plan.logits.width
        widths = [min(step.top_k, logits)] * 2 if step.top_k else [logits]
        widths += [value.width for value in self._returned]
        wanted = [(_count(piece.batch, rows), width) for rows, width in zip(of, widths, strict=True)]
        dtypes: list[np.dtype[Any]] = [np.dtype(np.float32)] * len(wanted)
        if step.top_k:
            dtypes[0] = np.dtype(np.int32)
        if [array.shape for array in found] != wanted or [array.dtype for array in found] != dtypes:
            raise MessageError("message: a result has other arrays, shapes or types than its step needs")
        if step.top_k and found[0].size and not 0 <= found[0].min() <= found[0].max() < logits:
            raise MessageError("message: a result has tokens that the vocabulary does not have")
        return found

    def _fetched(self, step: Running, value: Value) -> NDArray[Any]:
        """Return a value of a whole step."""
        found = []
        for piece in step.pieces:
            running = piece.values[value.index]
            array = step.exchange.answer(running)[0] if isinstance(running, int) else running
            if array.shape != (_count(piece.batch, value.rows), value.width) or array.dtype != np.float32:
                raise MessageError(f"message: {value.name} has another shape or type than its step needs")
            found.append((piece.rows, piece.wanted, (array,)))
        return found[0][2][0] if len(found) == 1 else step.batch.merged([value.rows], found)[0]

    def abandon(self, step: Running) -> None:
        """Skip the answers of a step."""
        for piece in step.pieces:
            for running in (piece.running, *piece.values.values()):
                if isinstance(running, int):
                    step.exchange.forget(running)

    def _micro_batches(self, batch: Batch) -> list[NDArray[np.intp]]:
        """Return the rows of each micro-batch: one, unless the batch is long enough to keep several stages busy.

        A batch with spans stays whole, because their rows see each other.
        """
        divides = self._divides and batch.span_ends is None
        rows, stages = len(batch.tokens), self._cut.stages
        count = min(rows // MICRO_ROWS, MICRO_BATCHES * stages, MOST_MICRO_BATCHES) if stages > 1 and divides else 1
        return np.array_split(np.arange(rows), max(count, 1))

    def draft(self, batch: Batch, hidden: F32, head: int = 0) -> None:
        """Run a head for drafting, in the last stage."""
        if self._first.is_last:
            found = self._first.draft(batch, hidden, head)
        else:
            integers = head, batch_parts(batch)
            found = self._exchange.ask(Kind.DRAFT, integers, (*batch_arrays(batch), hidden))
        of = self._cut.plan.drafts[head]
        self._values = {of.logits.index: found[0], of.following.index: found[1]}

    def pieces(self, batch: Batch) -> list[NDArray[np.intp]]:
        return [np.arange(len(batch.tokens))]

    def begin(self, batch: Batch) -> None:
        self._begun = batch

    def run(self, received: Sequence[F32] = ()) -> list[F32]:
        """Run the batch of `begin` through all stages."""
        assert not received, "the plan is whole: it receives nothing"
        assert self._begun is not None, "begin loads the batch"
        self._logits = self.step(self._begun)
        return []

    def result(self) -> F32:
        return self._logits

    def result_top_k(self, count: int) -> TopK:
        return top_k_of(self._logits, count)

    # -- the rest of the interface ---------------------------------------------------------------------------------

    def value(self, value: Value) -> F32:
        found = self._values.get(value.index)
        if found is not None:
            return found
        stage = self._cut.stage_of(value)
        if not stage:
            return self._first.executable.value(value)
        (found,) = self._exchange.ask(Kind.VALUE, (stage, value.index))
        return found

    def routing(self, out: Value) -> NoReturn:
        raise BackendError(f"the experts of tokens {ONE_PROCESS}")

    def replace(self, weight: Tensor) -> NoReturn:
        raise BackendError(f"weights {ONE_PROCESS}")

    def copy_blocks(self, source: np.ndarray, target: np.ndarray, windowed: bool = False) -> None:
        self._first.executable.copy_blocks(source, target, windowed)  # checks the numbers, so the others cannot fail
        if not self._first.is_last:
            self._exchange.send(Kind.COPY, (int(windowed),), (_int32(source), _int32(target)))

    def read_blocks(self, layer: int, numbers: np.ndarray) -> np.ndarray:
        stage, number = self._cut.layers[layer]
        if not stage:
            return self._first.executable.read_blocks(number, numbers)
        parts = self._portions(layer, numbers)
        found = [self._exchange.ask(Kind.READ, (stage, number), (_int32(part),))[0] for part in parts]
        return np.concatenate(found) if found else np.empty((0, self.block_bytes[layer]), np.uint8)

    def write_blocks(self, layer: int, numbers: np.ndarray, content: np.ndarray) -> None:
        """Write blocks that `read_blocks` returned; a portion with infinity or NaN raises BackendError."""
        stage, number = self._cut.layers[layer]
        if not stage:
            self._first.executable.write_blocks(number, numbers, content)
            return
        at = 0
        for part in self._portions(layer, numbers):
            arrays = _int32(part), np.ascontiguousarray(content[at : at + len(part)])
            self._exchange.ask(Kind.WRITE, (stage, number), arrays)
            at += len(part)

    def _portions(self, layer: int, numbers: np.ndarray) -> list[np.ndarray]:
        """Return block numbers in portions that fit in a message."""
        size = max(1, BLOCKS_BYTES // self.block_bytes[layer])
        return [numbers[at : at + size] for at in range(0, len(numbers), size)]

    def read_bandwidth(self) -> float:
        """Return the bandwidth over all stages in bytes per second. The stages read one after the other."""
        rates = [self._first.executable.read_bandwidth()]
        for stage in range(1, self._cut.stages):
            (rate,) = self._exchange.ask(Kind.BANDWIDTH, (stage,))
            rates.append(float(rate[0]))
        weights = [stage.memory.weights_per_token for stage in self.stages]
        return joint_bandwidth(list(zip(weights, rates, strict=True)))

    def close(self) -> None:
        with self._changing:
            self._closed = True
            self._exchange.close()
            self._first.close()


def _count(batch: Batch, rows: Rows) -> int:
    return len(batch.tokens) if rows == "batch" else len(batch.logit_rows)


def _int32(numbers: NDArray[Any]) -> NDArray[np.int32]:
    return np.ascontiguousarray(numbers, np.int32)
