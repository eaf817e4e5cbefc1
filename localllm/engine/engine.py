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
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from localllm.backends.base import (
    DraftingExecutable,
    Executable,
    Limits,
    PipelinedExecutable,
    RestorableExecutable,
    SlicedExecutable,
    TopK,
    TopKExecutable,
)
from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.engine.exclusive import Exclusive
from localllm.engine.paging import BlockPool, CacheFull, CacheSequence, how_many_fit
from localllm.engine.rows import (
    F32,
    DraftRows,
    Pending,
    Result,
    SequenceRows,
    Wanted,
    batch_of,
    draft_batch,
    with_media,
)
from localllm.plan import DraftHead, Value

CLOSED = "the model is closed, so its answers cannot continue; load it again"


class ContextFull(LocalLLMError):
    """A sequence would exceed the context."""


class StepTooLarge(LocalLLMError):
    """A step exceeds the maximum number of tokens or of logits; nothing has changed."""


class CacheLost(LocalLLMError):
    """The cached tokens of a sequence were lost with a part of the executable."""


class Watches(Protocol):
    """An observer of the engine's steps."""

    def step(self, rows: Sequence[SequenceRows]) -> AbstractContextManager[None]:
        """Return a context manager around a step, entered before the tokens are appended to their sequences."""
        ...


class MediaFacts(NamedTuple):
    """What a plan takes besides tokens: media embeddings of this width (0: none), positions on several axes, spans."""

    width: int = 0
    axes: int = 0
    spans: bool = False


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
        self._pipelined = executable if isinstance(executable, PipelinedExecutable) else None
        self.depth = self._pipelined.depth if self._pipelined is not None else 1  # steps that may be in flight
        self.start = start
        self.watch: Watches | None = None  # observer of every step
        self.steps = 0  # number of finished steps
        self.alone = Exclusive()  # lock held during every step, and by callers while they read its results
        self.closed = False  # whether the executable is closed, so that no step can run
        self.clock: Callable[[], float] = perf_counter  # to compare the costs of steps; see `localllm.loading.loader`
        self.draft_heads: tuple[DraftHead, ...] = ()  # the values of the plan's multi-token-prediction heads
        self.media = MediaFacts()  # what the plan takes besides tokens
        self.interruptible: SlicedExecutable | None = None  # runs a long step in slices; None: every step runs whole

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
        """Allocate blocks of an empty sequence for tokens, which the caller fills inside the `with`."""
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
        return self.collect(self.submit(rows))

    def submit(self, rows: Sequence[SequenceRows]) -> Pending:
        """Begin a step, which `collect` ends. Up to `depth` steps may be in flight; if that is 1, `collect` does all.

        Steps, copies of blocks and drafts are executed in the order of the calls, so other sequences may be forked,
        truncated and released meanwhile. The sequences in `rows` must not be used before `collect`.
        """
        pending = Pending(rows)
        if self.depth > 1:
            with self.alone:
                self._begin(pending)
        return pending

    @property
    def slices(self) -> bool:
        """Whether long steps run in slices, so that others do not wait for them. An observer sees whole steps."""
        return self.interruptible is not None and self.watch is None

    def begin_sliced(self, rows: Sequence[SequenceRows]) -> Pending:
        """Begin a step that `advance` runs in slices of time, one such step at a time.

        Other steps may run between two slices. The sequences in `rows` must not be used before the step ends.
        """
        assert self.interruptible is not None, "the executable runs every step whole"
        pending = Pending(rows, slices=self.interruptible)
        with self.alone:
            self._begin(pending)
            assert pending.batch is not None
            try:
                self.interruptible.begin(pending.batch)
            except BaseException:
                pending.undo()
                raise
        return pending

    def advance(self, pending: Pending, seconds: float) -> list[Result] | None:
        """Run a step of `begin_sliced` for about this time. Return its results, or None if it is not done. If it
        failed, remove its tokens and raise the error.
        """
        with self.alone:
            assert pending.slices is not None
            try:
                if self.closed:
                    raise LocalLLMError(CLOSED)
                if pending.slices.run_slice(seconds) is None:
                    return None
            except BaseException:
                pending.undo()
                raise
            return self._ended(pending)

    def collect(self, pending: Pending) -> list[Result]:
        """Wait for a step, and return its results. If it failed, remove its tokens and raise the error."""
        with self.alone:
            if self.depth == 1:
                self._begin(pending)
            return self._ended(pending)

    def _ended(self, pending: Pending) -> list[Result]:
        """Return the results of a step, for which this waits if necessary. If it failed, remove its tokens."""
        try:
            results = self._results(pending)
            for part in pending.rows:
                part.sequence.settle()
            self.steps += 1
        except BaseException:
            pending.undo()
            raise
        if pending.watching is not None:
            pending.watching.__exit__(None, None, None)
        return results

    def abandon(self, pending: Pending) -> None:
        """Give up a step, and remove its tokens. Never blocks for long."""
        with self.alone:
            if self._pipelined is not None and pending.handle is not None:
                self._pipelined.abandon(pending.handle)
            pending.undo()

    def _begin(self, pending: Pending) -> None:
        """Append the tokens to their sequences, and start to evaluate them if several steps may be in flight."""
        if self.closed:
            raise LocalLLMError(CLOSED)
        rows = pending.rows
        if self.watch is not None:
            pending.watching = self.watch.step(rows)
            pending.watching.__enter__()
        try:
            starts, counts, wanted = self._checked(rows)
            pending.starts, pending.counts, pending.wanted = starts, counts, wanted
            pending.batch = batch_of(rows, starts, counts, wanted, self.start)
            if self.media.width and any(part.sequence.media for part in rows):
                self._check_media(rows, starts)
                with_media(pending.batch, rows, starts, self.media.axes, self.media.spans)
            self.copy_shared()
            pending.top_k = self._device_top_k(rows, wanted)
            if self._pipelined is not None and pending.slices is None:
                pending.handle = self._pipelined.submit(pending.batch, pending.top_k, self._values(rows))
        except BaseException:
            pending.undo()
            raise

    def _device_top_k(self, rows: Sequence[SequenceRows], wanted: list[int]) -> int:
        """Return the number of largest logits to select on the device; 0 if some rows need all logits."""
        if len(rows) == 1 and not rows[0].top_k:  # fast path for decode
            return 0
        most = max(part.top_k for part in rows)
        selects = most and most <= self.max_top_k
        return most if selects and all(p.top_k or not n for p, n in zip(rows, wanted, strict=True)) else 0

    def _values(self, rows: Sequence[SequenceRows]) -> list[Value]:
        """Return the values to read after a step."""
        values = [head.hidden for head in self.draft_heads[:1]]
        if any(part.normed for part in rows):
            assert self.normed is not None, "the executable does not keep hidden states"
            values.append(self.normed)
        return values

    def _results(self, pending: Pending) -> list[Result]:
        """Evaluate a step, or wait for it."""
        executable, batch = pending.slices or self.executable, pending.batch
        assert batch is not None
        found: F32 | TopK
        if pending.slices is not None:
            found = executable.result()
        elif self._pipelined is not None:
            found = self._pipelined.collect(pending.handle)
        elif pending.top_k:
            assert isinstance(executable, TopKExecutable)
            found = executable.step_top_k(batch, pending.top_k)
        else:
            found = executable.step(batch)
        results = pending.results(found, partial(self._states, executable))
        if self.draft_heads:
            hidden = np.split(executable.value(self.draft_heads[0].hidden), list(accumulate(pending.counts[:-1])))
            results = [each._replace(hidden=own) for each, own in zip(results, hidden, strict=True)]
        return results

    def _states(self, executable: Executable) -> F32:
        """Return the hidden states after the output norm, of the rows with logits."""
        assert self.normed is not None, "the executable does not keep hidden states"
        return executable.value(self.normed)

    # -- a lost executable -----------------------------------------------------------------------------------------

    @property
    def restorable(self) -> bool:
        """Whether the executable can be restored after `ExecutableLost`."""
        return isinstance(self.executable, RestorableExecutable)

    def lose(self) -> None:
        """Treat the tokens of all sequences as lost: they can only be released, or truncated to 0."""
        with self.alone:
            self.pool.lose()

    def restore(self) -> None:
        """Restore a lost executable, with an empty cache. May run in another thread than the steps."""
        assert isinstance(self.executable, RestorableExecutable)
        self.executable.restore()

    # -- drafts, and copies ----------------------------------------------------------------------------------------

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
        batch = draft_batch(parts, self.media.axes)
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
        limits, lossy = self.limits, self.pool.losses > 0
        starts: list[int] = []
        counts: list[int] = []
        wanted: list[int] = []
        for sequence, tokens, which, *_ in rows:
            count = len(tokens)
            assert sequence.pool is self.pool, "the sequence belongs to another engine"
            start = len(sequence.tokens)
            if self.start is not None:
                self._check_text(sequence, tokens, which)
            if lossy and start and sequence.lost:
                raise CacheLost("the cached tokens were lost with a part of the model; evaluate the text again")
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

    def _check_media(self, rows: Sequence[SequenceRows], starts: Sequence[int]) -> None:
        """Raise LocalLLMError unless every media token of a step has its embeddings, and no picture whose tokens see
        each other is cut.
        """
        for part, start in zip(rows, starts, strict=True):
            count, found = sum(token < 0 for token in part.tokens), 0 if part.media is None else len(part.media)
            if count != found:
                raise LocalLLMError(f"a step has {count} tokens of pictures or sound, but embeddings for {found}")
            if count and self.media.spans:
                cut = [each for each in part.sequence.media if not each.media.causal and each.stop > start]
                if any(each.start < start or each.stop > part.sequence.length for each in cut):
                    raise LocalLLMError("a step cuts a picture whose tokens see each other; evaluate it in one step")

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
