"""Runs a bound model for many sequences: a step evaluates tokens of any sequences and returns the requested logits.

    sequence = engine.add()
    [result] = engine.step([SequenceRows(sequence, prompt)])  # result.logits: float32 (1, vocabulary)
    fork = engine.fork(sequence)  # shares the blocks; the first to write gets a copy

On the CPU, results are batch-invariant: the logits of a sequence are bitwise independent of the other sequences in a
step, and of how its tokens are split into steps. On a GPU this holds for up to 16 tokens per sequence and step. The
engine deals with executables and cache blocks only; tokenizers, samplers, conversations and speculation are built on
top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from time import perf_counter
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import DraftingExecutable, Executable, Limits, TopK, TopKExecutable
from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.engine.exclusive import Exclusive
from localllm.engine.paging import BlockPool, CacheFull, CacheSequence, how_many_fit
from localllm.engine.top_k import top_k_indices
from localllm.plan import Batch, DraftHead, Value

F32 = NDArray[np.float32]
Int32s = NDArray[np.int32]
Wanted = Literal["none", "last", "all"] | tuple[int, ...]  # a tuple: token indices in the step, in order

_NO_LOGITS = np.empty((0, 0), np.float32)
_NO_TOP_K = TopK(np.empty((0, 0), np.int32), _NO_LOGITS)


class ContextFull(LocalLLMError):
    """A sequence would exceed the context."""


class StepTooLarge(LocalLLMError):
    """A step exceeds the maximum number of tokens or of logits; nothing has changed."""


class SequenceRows(NamedTuple):
    """The next tokens of a sequence in a step, and the positions whose logits are requested."""

    sequence: CacheSequence
    tokens: Sequence[int]
    wanted: Wanted = "last"
    top_k: int = 0  # number of largest logits to return per requested token; 0: all logits
    normed: bool = False  # whether to also return the hidden states of the requested tokens after the output norm


class Result(NamedTuple):
    """The logits for one `SequenceRows` with n requested tokens. Arrays are views that the next step overwrites."""

    logits: F32  # (n, vocabulary); (0, 0) if only the top-k were requested
    top_k: TopK  # top-k, (n, k) each, largest first, ties by id, NaN first; (0, 0) if not requested
    hidden: F32 = _NO_LOGITS  # hidden states of all tokens (tokens, width), if the plan has a head that reads them
    normed: F32 = _NO_LOGITS  # hidden states after the output norm (n, width); (0, 0) if not requested


class DraftRows(NamedTuple):
    """Tokens that a multi-token-prediction head evaluates, and the hidden states of earlier tokens.

    Head number k, from 0, reads the hidden state at position t with the token at position t + k + 1.
    """

    sequence: CacheSequence
    start: int  # position of the first hidden state, and of its entry in the head's cache layer
    tokens: Sequence[int]
    hidden: F32  # (tokens, width)
    wanted: int  # number of last tokens whose logits and hidden states are requested


class Watches(Protocol):
    """An observer of the engine's steps."""

    def step(self, rows: Sequence[SequenceRows]) -> AbstractContextManager[None]:
        """Return a context manager around a step, entered before the tokens are appended to their sequences."""
        ...


class Engine:
    """The sequences of an executable and its KV cache. Not thread-safe; the lock `alone` makes a second thread wait.

    `limits` must not exceed the executable's: `rows` and `logit_rows` per step, and `positions`, the maximum number
    of tokens in a sequence. `pool` allocates the executable's blocks.

    For an encoder-decoder model, `start` is the token that separates the text from its answer. The first step of a
    sequence contains the whole text and that token. The encoder reads the tokens before it, the decoder all others.

    `normed` is the value with the normed hidden states of the rows with logits, which the executable keeps.
    """

    def __init__(
        self,
        executable: Executable,
        pool: BlockPool,
        limits: Limits,
        start: int | None = None,
        normed: Value | None = None,
    ) -> None:
        self.normed = normed
        self.executable, self.pool, self.limits = executable, pool, limits
        self.start = start
        self.watch: Watches | None = None  # observer of every step
        self.steps = 0  # number of finished steps
        self.alone = Exclusive()  # lock held during every step, and by callers while they read its results
        self.closed = False  # whether the executable is closed, so that no step can run
        self.clock: Callable[[], float] = perf_counter  # to compare the costs of steps; see `localllm.loading.loader`
        self.draft_heads: tuple[DraftHead, ...] = ()  # the values of the plan's multi-token-prediction heads

    # -- sequences -------------------------------------------------------------------------------------------------

    def add(self) -> CacheSequence:
        """Return a new, empty sequence. Its first block is allocated with its first token."""
        return self.pool.new_sequence()

    def fork(self, sequence: CacheSequence) -> CacheSequence:
        """Return a second sequence with the same tokens. It shares the blocks and takes no memory until it grows."""
        return sequence.fork()

    def truncate(self, sequence: CacheSequence, length: int) -> int:
        """Keep the first `length` tokens; none if a sliding-window layer freed blocks they need. Return the length."""
        with self.alone:
            length = sequence.reach(length)
            sequence.truncate(length)
            return length

    def release(self, sequence: CacheSequence) -> None:
        """Empty a sequence and return all its blocks to the pool."""
        sequence.free()

    def opened(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return a prompt as its sequence stores it: for an encoder-decoder model, followed by the
        decoder start token."""
        return prompt if self.start is None or self.start in prompt else [*prompt, self.start]

    @property
    def draft_head(self) -> DraftHead | None:
        """The first multi-token-prediction head, if the plan has one."""
        return self.draft_heads[0] if self.draft_heads else None

    # -- capacity --------------------------------------------------------------------------------------------------

    @property
    def max_top_k(self) -> int:
        """The largest k for top-k on the device; above it, the host searches all logits."""
        return self.executable.max_top_k if isinstance(self.executable, TopKExecutable) else 0

    @property
    def block_tokens(self) -> int:
        """Number of tokens per cache block."""
        return self.pool.block_size

    @property
    def free_blocks(self) -> int:
        """Number of free cache blocks in the pool with the fewest free blocks."""
        return min(pool.takeable for pool in self.pool.pools)

    def room(self, sequence: CacheSequence) -> int:
        """Return how many more tokens a sequence can hold at present. All sequences compete for the free blocks."""
        return max(0, min(self.limits.positions - sequence.length, sequence.room))

    def read_after(self, tokens: int) -> int:
        """Return the bytes of weights and KV cache read when decoding one token after `tokens` tokens."""
        return int(self.executable.memory.read_after(tokens))

    def fits(self, wanted: Sequence[tuple[CacheSequence, int]]) -> bool:
        """Return whether a step with these numbers of tokens per sequence fits into the KV cache.

        Sliding-window layers free blocks between steps, so tokens that do not fit in one step may fit in several.
        """
        if any(sequence.length + more > self.limits.positions for sequence, more in wanted):
            return False
        return how_many_fit(wanted) == len(wanted)

    @contextmanager
    def taking(self, sequence: CacheSequence, tokens: Sequence[int]) -> Iterator[None]:
        """Allocate blocks of an empty sequence for tokens (whole blocks), which the caller fills inside the `with`."""
        with self.alone:
            self.copy_shared()  # copy shared blocks before the caller fills them
            sequence.occupy(tokens)
            if self.start in tokens:
                sequence.border = tokens.index(self.start)
            try:
                yield
            except BaseException:
                sequence.free()
                raise

    # -- stepping --------------------------------------------------------------------------------------------------

    def step(self, rows: Sequence[SequenceRows]) -> list[Result]:
        """Append tokens to sequences and evaluate them in one forward pass. Return one result per entry of `rows`, in
        order.

        A sequence may occur only once in `rows`. On any failure, all sequences are unchanged. Raises ContextFull and
        CacheFull for tokens that do not fit, StepTooLarge for more rows than the limits allow, BackendError for a token
        outside the vocabulary, and LocalLLMError for a closed model. Blocks while another thread is in a step.
        """
        with self.alone:
            if self.closed:
                raise LocalLLMError("the model is closed, so its answers cannot continue; load it again")
            if self.watch is not None:
                with self.watch.step(rows):
                    return self._step(rows)
            return self._step(rows)

    def _step(self, rows: Sequence[SequenceRows]) -> list[Result]:
        starts, counts, wanted = self._checked(rows)
        try:
            batch = self._batch(rows, starts, counts, wanted)
            self.copy_shared()
            results = self._run(rows, batch, wanted)
            if self.draft_heads:
                hidden = np.split(self.executable.value(self.draft_heads[0].hidden), list(accumulate(counts[:-1])))
                results = [each._replace(hidden=own) for each, own in zip(results, hidden, strict=True)]
            for part in rows:
                part.sequence.settle()
            self.steps += 1
            return results
        except BaseException:
            for part, start in zip(rows, starts, strict=True):
                part.sequence.truncate(start)
            raise

    @contextmanager
    def drafting(self, wanted: Sequence[tuple[CacheSequence, int]]) -> Iterator[None]:
        """Allocate blocks for these numbers of drafted tokens per sequence within the `with`. Raises CacheFull."""
        lengths = [sequence.length for sequence, _ in wanted]
        try:
            for sequence, count in wanted:
                sequence.append([0] * count)
            self.copy_shared()
            yield
        finally:
            for (sequence, _), length in zip(wanted, lengths, strict=True):
                sequence.truncate(length)

    def draft(self, parts: Sequence[DraftRows], number: int = 0) -> tuple[F32, F32]:
        """Run a multi-token-prediction head. Return its logits (n, vocabulary) and hidden states (n, width) for the
        requested tokens of all parts, as views that the next call overwrites. A head that feeds the next one returns
        the hidden states of all tokens.
        """
        head, executable = self.draft_heads[number], self.executable
        assert isinstance(executable, DraftingExecutable)
        counts = [len(part.tokens) for part in parts]
        slots = [part.sequence.slots(part.start, part.start + len(part.tokens)) for part in parts]
        tables = [part.sequence.tables() for part in parts]
        windowed = len(tables[0]) > 1
        ends = list(accumulate(counts))
        batch = Batch(
            tokens=_joined([np.array(part.tokens, np.int32) for part in parts]),
            positions=_joined([np.arange(each.start, each.start + len(each.tokens), dtype=np.int32) for each in parts]),
            slots=_joined([one[0] for one in slots]),
            sequence=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
            tables=_stacked([one[0] for one in tables]),
            logit_rows=_joined(
                [np.arange(end - part.wanted, end, dtype=np.int32) for end, part in zip(ends, parts, strict=True)]
            ),
            window_slots=_joined([one[1] for one in slots]) if windowed else None,
            window_tables=_stacked([one[1] for one in tables]) if windowed else None,
        )
        with self.alone:
            executable.draft(batch, np.concatenate([part.hidden for part in parts]), number)
            return executable.value(head.logits), executable.value(head.following)

    def copy_shared(self) -> None:
        """Copy the shared blocks that forks are about to write (copy-on-write). `step` calls this itself."""
        for pool in self.pool.pools:
            if pool.has_copies:
                source, target = pool.take_copies()
                try:
                    self.executable.copy_blocks(source, target, pool is not self.pool)
                except BaseException:
                    pool.put_back(source, target)
                    raise

    def _checked(self, rows: Sequence[SequenceRows]) -> tuple[list[int], list[int], list[int]]:
        """Return, per entry of `rows`, the start position, token count and number of requested logits; or raise an
        error.
        """
        limits = self.limits
        starts: list[int] = []
        counts: list[int] = []
        wanted: list[int] = []
        for sequence, tokens, which, *_ in rows:
            count = len(tokens)
            assert sequence.pool is self.pool, "the sequence belongs to another engine"
            start = len(sequence.tokens)
            if self.start is not None:
                self._check_text(sequence, tokens, which)
            if start + count > limits.positions:
                held = f"{start} are in use and {count} more do not fit; start with a larger context"
                full = f"the context of {limits.positions} tokens is full: {held} ("
                raise ContextFull(Notice(full, Setting("ctx_size"), ")"))
            starts.append(start)
            counts.append(count)
            wanted.append(len(which) if isinstance(which, tuple) else count if which == "all" else int(which == "last"))
        total = sum(counts)
        if not total or 0 in counts:
            raise LocalLLMError("a step needs at least one token of each of its sequences; leave the others out")
        if total > limits.rows or sum(wanted) > limits.logit_rows:
            raise StepTooLarge(
                f"a step of {total} tokens, {sum(wanted)} of them with logits: this model takes up to {limits.rows} "
                f"and {limits.logit_rows} at a time; evaluate the rest in another step"
            )
        if len(rows) > 1:  # for a single sequence, `append` checks the free space
            sequences = [part.sequence for part in rows]
            assert len(set(map(id, sequences))) == len(rows), "a sequence occurs twice in a step"
            fit = how_many_fit(list(zip(sequences, counts, strict=True)))
            if fit < len(rows):
                raise CacheFull(total, sum(counts[:fit]), self.pool.blocks, self.pool.block_size)
        return starts, counts, wanted

    def _check_text(self, sequence: CacheSequence, tokens: Sequence[int], which: Wanted) -> None:
        """Raise LocalLLMError unless a new sequence gets its whole text, with no logits requested for the text."""
        if sequence.tokens:
            return
        border = tokens.index(self.start) if self.start in tokens else 0
        if not border:
            raise LocalLLMError(
                "a model with an encoder answers a text, and cannot score or continue one (its text comes in one step, "
                f"with token {self.start} behind it); use `localllm run` or model.generate"
            )
        if which == "all" or (isinstance(which, tuple) and any(row < border for row in which)):
            raise LocalLLMError("a model with an encoder has no logits of the text that it answers, only of its answer")

    def _batch(self, rows: Sequence[SequenceRows], starts: list[int], counts: list[int], wanted: list[int]) -> Batch:
        """Append `rows` to their sequences, and return them as a batch."""
        tokens, positions, slots, logit_rows, tables = [], [], [], [], []
        end = 0
        for number, part in enumerate(rows):
            start, count = starts[number], counts[number]
            end += count
            tokens.append(np.array(part.tokens, np.int32))
            positions.append(np.arange(start, start + count, dtype=np.int32))
            if isinstance(part.wanted, tuple):
                logit_rows.append(np.array(part.wanted, np.int32) + np.int32(end - count))
            else:
                logit_rows.append(np.arange(end - wanted[number], end, dtype=np.int32))
            slots.append(part.sequence.append(part.tokens))
            if self.start is not None and not start:
                part.sequence.border = part.tokens.index(self.start)
            tables.append(part.sequence.tables())
        windowed = len(tables[0]) > 1
        return Batch(
            tokens=_joined(tokens),
            positions=_joined(positions),
            slots=_joined([one[0] for one in slots]),
            sequence=np.repeat(np.arange(len(rows), dtype=np.int32), counts)
            if len(rows) > 1
            else np.zeros(end, np.int32),
            tables=_stacked([one[0] for one in tables]),
            logit_rows=_joined(logit_rows),
            window_slots=_joined([one[1] for one in slots]) if windowed else None,
            window_tables=_stacked([one[1] for one in tables]) if windowed else None,
            borders=np.array([part.sequence.border for part in rows], np.int32) if self.start is not None else None,
            histories=[part.sequence.tokens for part in rows],
        )

    def _run(self, rows: Sequence[SequenceRows], batch: Batch, wanted: list[int]) -> list[Result]:
        """Evaluate the batch. If possible, copy only the top-k logits from the device."""
        executable = self.executable
        if len(rows) == 1 and not rows[0].top_k and not rows[0].normed:  # fast path for decode
            return [Result(executable.step(batch), _NO_TOP_K)]
        most = max(part.top_k for part in rows)
        spans = [slice(stop - count, stop) for stop, count in zip(accumulate(wanted), wanted, strict=True)]
        if most and most <= self.max_top_k and all(p.top_k or not n for p, n in zip(rows, wanted, strict=True)):
            assert isinstance(executable, TopKExecutable)
            ids, logits = executable.step_top_k(batch, most)
            return [
                Result(_NO_LOGITS, TopK(ids[span, : part.top_k], logits[span, : part.top_k]))
                for part, span in zip(rows, spans, strict=True)
            ]
        found = executable.step(batch)
        states = _NO_LOGITS
        if any(part.normed for part in rows):
            assert self.normed is not None, "the executable does not keep hidden states"
            states = executable.value(self.normed)
        return [
            Result(
                _NO_LOGITS if part.top_k else found[span],
                top_k_of(found[span], part.top_k) if part.top_k else _NO_TOP_K,
                normed=states[span] if part.normed else _NO_LOGITS,
            )
            for part, span in zip(rows, spans, strict=True)
        ]


def top_k_of(logits: F32, count: int) -> TopK:
    """Return the top `count` logits of each row (n, vocabulary), as `TopKExecutable.step_top_k` does."""
    ids = np.empty((len(logits), min(count, logits.shape[1])), np.int32)
    for into, row in zip(ids, logits, strict=True):
        none = np.isnan(row)
        into[:] = (np.lexsort((-row, ~none)) if none.any() else top_k_indices(row, count))[:count]
    return TopK(ids, np.take_along_axis(logits, ids, axis=1) + np.float32(0))  # adding 0 converts -0 to +0


def _joined(arrays: Sequence[Int32s]) -> Int32s:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _stacked(tables: Sequence[Int32s]) -> Int32s:
    """Stack tables of different lengths to (sequences, blocks); padding is 0, which is never read."""
    if len(tables) == 1:
        return tables[0][None]
    stacked = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table)] = table
    return stacked
