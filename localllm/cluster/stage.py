"""A stage: an executable over some layers of a cut plan, with their cache. It handles messages in order.

A message that is not for this stage is returned unchanged, to be passed on. An error becomes a message too: the
stage handles the next message, and the front decides what to do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

import localllm
from localllm.backends.base import (
    Backend,
    BackendError,
    CacheTypes,
    DraftingExecutable,
    Executable,
    Limits,
    Memory,
    Progress,
    TopKExecutable,
)
from localllm.base.printable import printable
from localllm.cluster.cut import Cut
from localllm.cluster.errors import ClusterError, MessageError
from localllm.cluster.wire import VERSION, Kind, Message, batch_arrays, batch_of, check_rows, text_array, text_of
from localllm.engine import top_k_of
from localllm.plan import BLOCK, F32, Batch, CacheLayer, Plan, Receive, Rows, Send, Store, Value

Arrays = tuple[NDArray[Any], ...]
_FIELDS = len(fields(Memory))
DESCRIBED = 4  # arrays per stage in the answer to HELLO
BLOCKS_BYTES = 8 << 20  # cache blocks travel in messages of at most this size, or one block
MOST_TOP_K = 256  # top-k that the last stage selects, instead of sending a megabyte of logits
_OVERHEAD = 1 << 20  # bytes of a message for headers and descriptions


@dataclass(frozen=True, slots=True)
class Layout:
    """What all stages must agree on, besides the plan."""

    firsts: tuple[int, ...]  # as in `Cut`
    limits: Limits
    cache: CacheTypes
    keep: tuple[int, ...] = ()  # indices of the values that stay readable after a step

    def digest(self, cut: Cut) -> bytes:
        """Return a hash of the layout, the plan and the program's version. Stages with equal hashes fit together."""
        plan = cut.plan
        parts = plan.operations, plan.values, plan.layers, plan.logits, plan.drafts
        text = repr((VERSION, localllm.__version__, self, parts))
        return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, slots=True)
class Description:
    """A stage as the front sees it."""

    backend: str
    memory: Memory
    block_bytes: tuple[int, ...]
    cache_layout: str
    max_top_k: int

    def arrays(self) -> Arrays:
        numbers = np.array([*astuple(self.memory), self.max_top_k], np.int64)
        sizes = np.array(self.block_bytes, np.int64)
        return numbers, sizes, text_array(self.cache_layout), text_array(self.backend)

    @classmethod
    def of(cls, arrays: Arrays) -> Description:
        """Return the description in `arrays`; raise MessageError for anything else."""
        numbers, sizes, layout, backend = arrays
        if numbers.shape != (_FIELDS + 1,) or sizes.ndim != 1 or {numbers.dtype, sizes.dtype} != {np.dtype(np.int64)}:
            raise MessageError("message: a stage describes itself with other numbers; use the same version everywhere")
        *memory, most = numbers.tolist()
        return cls(text_of(backend), Memory(*memory), tuple(sizes.tolist()), text_of(layout), most)


class Stage:
    """Stage `number` of a cut plan, bound to memory."""

    def __init__(self, number: int, cut: Cut, layout: Layout, executable: Executable, backend: str) -> None:
        self.number, self.executable = number, executable
        self.is_last = number == cut.stages - 1
        self.most_bytes = message_bytes(cut, layout, number) if number else 0  # size of the largest message to it
        self._part, self._digest = cut.parts[number], layout.digest(cut)
        self._vocabulary = cut.plan.input_vocabulary  # kernels do not check tokens; only the first stage has the table
        self._takes_media = cut.plan.media > 0
        operations = self._part.operations
        first, last = operations[0], operations[-1]
        self._received = first.values if isinstance(first, Receive) else ()
        self._sent = last.values if isinstance(last, Send) and not self.is_last else ()
        self._drafts = self._part.drafts
        self.returned = returned(self._part) if self.is_last else ()
        self._kept = {v.index: v for op in operations for v in op.outputs if v.index in layout.keep}
        self._device_top_k = executable.max_top_k if isinstance(executable, TopKExecutable) else 0
        top_k = max(self._device_top_k, MOST_TOP_K) if self.is_last else 0
        sizes = executable.block_bytes
        self.description = Description(backend, executable.memory, sizes, executable.cache_layout, top_k)
        self._handlers: dict[Kind, Callable[[Message], Message | None]] = {
            Kind.HELLO: self._hello, Kind.STEP: self._step, Kind.DRAFT: self._draft, Kind.VALUE: self._value,
            Kind.COPY: self._copy, Kind.READ: self._read, Kind.WRITE: self._write, Kind.BANDWIDTH: self._bandwidth,
        }  # fmt: skip

    def handle(self, message: Message) -> Message | None:
        """Handle a message from the previous stage. Return the message for the next one, if any."""
        handler = self._handlers.get(message.kind)
        if handler is None:  # an answer of an earlier stage
            return message
        try:
            return handler(message)
        except Exception as error:  # a stage that stops would take all sequences with it
            return self.failed(message, error)

    def failed(self, message: Message, error: Exception) -> Message:
        """Return the answer to a message that could not be handled."""
        known = isinstance(error, BackendError | ClusterError | MemoryError)
        text = str(error) or type(error).__name__
        text = printable(text if known else f"{type(error).__name__}: {text}", None)
        integers = self.number, int(message.kind)
        return Message(Kind.ERROR, message.number, integers, (text_array(text or "unknown error"),))

    def step(self, batch: Batch, received: Sequence[F32], top_k: int) -> Arrays:
        """Run this stage's layers on a batch and the values that it receives.

        Return the values to send on; in the last stage, the logits (L, vocabulary) or the ids and logits of the top-k,
        and the hidden states that heads for drafting read. Arrays may be views that the next step overwrites.
        """
        pieces = self.executable.pieces(batch)
        if len(pieces) == 1:
            return self._evaluate(batch, received, top_k)
        return tuple(batch.merged(self._kinds(top_k), self._piecewise(batch, pieces, received, top_k)))

    def _piecewise(
        self, batch: Batch, pieces: Sequence[NDArray[np.intp]], received: Sequence[F32], top_k: int
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp], Arrays]]:
        for rows in pieces:
            piece, wanted = batch.piece(rows)
            pairs = zip(self._received, received, strict=True)
            own = [array[rows if value.rows == "batch" else wanted] for value, array in pairs]
            yield rows, wanted, self._evaluate(piece, own, top_k)

    def close(self) -> None:
        """Free the memory."""
        self.executable.close()

    # -- steps -----------------------------------------------------------------------------------------------------

    def _evaluate(self, batch: Batch, received: Sequence[F32], top_k: int) -> Arrays:
        executable = self.executable
        executable.begin(batch)
        sent = executable.run(received)
        if not self.is_last:
            return tuple(sent)
        if top_k and isinstance(executable, TopKExecutable) and top_k <= self._device_top_k:
            results: Arrays = tuple(executable.result_top_k(top_k))
        elif top_k:
            results = tuple(top_k_of(executable.result(), top_k))
        else:
            results = (executable.result(),)
        return (*results, *[executable.value(value) for value in self.returned])

    def _kinds(self, top_k: int) -> list[Rows]:
        """Return, for each array of `step`, whether it has a row per token or per row of logits."""
        return result_kinds(self.returned, top_k) if self.is_last else [value.rows for value in self._sent]

    def _step(self, message: Message) -> Message:
        top_k, parts = _integers(message, 2)
        if self.is_last and not 0 <= top_k <= self.description.max_top_k:
            raise MessageError(f"message: {top_k} largest logits; supported: 0 to {self.description.max_top_k}")
        batch, received = batch_of(message.arrays, parts)
        self._check_tokens(batch)
        counts = {"batch": len(batch.tokens), "logits": len(batch.logit_rows)}
        rows = check_rows(received, [(counts[value.rows], value.width) for value in self._received])
        found = self.step(batch, rows, top_k)
        if self.is_last:
            return Message(Kind.RESULT, message.number, (), found)
        return Message(Kind.STEP, message.number, message.integers, (*batch_arrays(batch), *found))

    def _draft(self, message: Message) -> Message:
        if not self.is_last:
            return message
        head, parts = _integers(message, 2)
        if not 0 <= head < len(self._drafts):
            raise MessageError(f"message: the plan has {len(self._drafts)} heads for drafting, not {head + 1}")
        batch, received = batch_of(message.arrays, parts)
        self._check_tokens(batch)
        (hidden,) = check_rows(received, [(len(batch.tokens), self._drafts[head].hidden.width)])
        return Message(Kind.RESULT, message.number, (), self.draft(batch, hidden, head))

    def draft(self, batch: Batch, hidden: F32, head: int) -> Arrays:
        """Run a head. Return its logits and its hidden states."""
        executable, of = self.executable, self._drafts[head]
        assert isinstance(executable, DraftingExecutable), "every backend drafts where a plan has heads"
        executable.draft(batch, hidden, head)
        return executable.value(of.logits), executable.value(of.following)

    def _check_tokens(self, batch: Batch) -> None:
        tokens = batch.tokens[batch.tokens >= 0] if self._takes_media else batch.tokens
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocabulary:
            raise MessageError(f"message: tokens must be from 0 to {self._vocabulary - 1}")

    # -- the cache, and the rest -----------------------------------------------------------------------------------

    def _hello(self, message: Message) -> Message:
        digest, *others = message.arrays or (np.empty(0, np.uint8),)
        if digest.tobytes() != self._digest:
            raise ClusterError(
                f"stage {self.number} has another model, other sizes or another version of localllm than stage 0; "
                "use the same file, options and version on every machine"
            )
        arrays = (digest, *others, *self.description.arrays())
        kind = Kind.RESULT if self.is_last else Kind.HELLO
        return Message(kind, message.number, message.integers, arrays)

    def _value(self, message: Message) -> Message:
        stage, index = _integers(message, 2)
        if stage != self.number:
            return message
        if index not in self._kept:
            raise MessageError(f"message: value {index} is not kept")
        return Message(Kind.RESULT, message.number, (), (self.executable.value(self._kept[index]),))

    def _copy(self, message: Message) -> Message | None:
        (windowed,) = _integers(message, 1)
        source, target = _arrays(message, np.int32, np.int32)
        self.executable.copy_blocks(source, target, bool(windowed))
        return None if self.is_last else message

    def _read(self, message: Message) -> Message:
        stage, layer = _integers(message, 2)
        if stage != self.number:
            return message
        (numbers,) = _arrays(message, np.int32)
        content = self.executable.read_blocks(self._layer(layer), numbers)
        return Message(Kind.RESULT, message.number, (), (content,))

    def _write(self, message: Message) -> Message:
        stage, layer = _integers(message, 2)
        if stage != self.number:
            return message
        numbers, content = _arrays(message, np.int32, np.uint8)
        self.executable.write_blocks(self._layer(layer), numbers, content)
        return Message(Kind.RESULT, message.number)

    def _layer(self, layer: int) -> int:
        if not 0 <= layer < len(self._part.layers):
            raise MessageError(f"message: stage {self.number} has {len(self._part.layers)} cache layers, not {layer}")
        return layer

    def _bandwidth(self, message: Message) -> Message:
        (stage,) = _integers(message, 1)
        if stage != self.number:
            return message
        return Message(Kind.RESULT, message.number, (), (np.array([self.executable.read_bandwidth()]),))


def returned(plan: Plan) -> tuple[Value, ...]:
    """Return the values that the last stage returns with every step: what the first head for drafting reads."""
    return (plan.drafts[0].hidden,) if plan.drafts else ()


def result_kinds(returned: Sequence[Value], top_k: int) -> list[Rows]:
    """Return, for each array of a result, whether it has a row per token or per row of logits."""
    logits: Rows = "logits"
    return [logits] * (2 if top_k else 1) + [value.rows for value in returned]


def message_bytes(cut: Cut, layout: Layout, number: int) -> int:
    """Return the size of the largest message to stage `number`; to the front, if `number` is the number of stages."""
    limits, plan = layout.limits, cut.plan
    tables = limits.rows * -(-limits.positions // BLOCK) * (2 if limits.window_blocks else 1)
    batch = 4 * ((5 + plan.axes + plan.spans) * limits.rows + limits.logit_rows + tables)
    counts = {"batch": limits.rows, "logits": limits.logit_rows}
    last = cut.parts[number - 1].operations[-1]
    crossing = list(last.values) if isinstance(last, Send) and number < cut.stages else []
    kept = [value for value in plan.values if value.index in layout.keep]
    results = [plan.logits, *[v for head in plan.drafts for v in (head.hidden, head.logits, head.following)]]
    values = max(4 * sum(counts[v.rows] * v.width for v in group) for group in (crossing, results, kept))
    block = max(map(_block_bytes, plan.layers), default=0)
    return _OVERHEAD + batch + max(values, BLOCKS_BYTES, block)


def _block_bytes(layer: Store) -> int:
    """Return an upper limit of the bytes of a cache block, for any cache type."""
    if isinstance(layer, CacheLayer):
        return 4 * BLOCK * layer.kv_heads * (layer.head_dim + layer.value_dim + 2 * BLOCK)
    return 4 * (BLOCK * layer.row + layer.state)


def bind_stage(number: int, cut: Cut, layout: Layout, backend: Backend, progress: Progress | None = None) -> Stage:
    """Bind stage `number`: its weights are read from the file, and its cache is allocated."""
    part = cut.parts[number]
    keep = [value for op in part.operations for value in op.outputs if value.index in layout.keep]
    executable = backend.bind(part, layout.limits, layout.cache, progress, keep)
    return Stage(number, cut, layout, executable, backend.name)


def _integers(message: Message, count: int) -> tuple[int, ...]:
    if len(message.integers) != count:
        raise MessageError(f"message: {message.kind.name} needs {count} integers, found {len(message.integers)}")
    return message.integers


def _arrays(message: Message, *dtypes: type[Any]) -> Arrays:
    if [array.dtype for array in message.arrays] != [np.dtype(dtype) for dtype in dtypes]:
        raise MessageError(f"message: {message.kind.name} needs arrays of {', '.join(d.__name__ for d in dtypes)}")
    return message.arrays
