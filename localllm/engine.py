"""Runs a bound model for many sequences: a step takes rows of any of them and returns the logits they ask for.

    sequence = engine.add()
    [result] = engine.step([Rows(sequence, prompt)])  # result.logits: float32 (1, vocabulary)
    fork = engine.fork(sequence)  # shares the blocks; the first to write gets a copy

On the CPU a sequence gets the same bits whatever else a step holds and however its tokens are cut into steps; on a card
this holds for rows of up to 16 tokens a sequence. The engine knows executables and cache blocks. Tokenizers, samplers,
conversations and speculation are its users.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Executable, Largest, Limits, Picks
from localllm.cache import BlockPool, CacheFull, Sequence, how_many_fit
from localllm.errors import LocalLLMError
from localllm.notice import Notice, Setting
from localllm.plan import Batch
from localllm.sampling.select import largest

F32 = NDArray[np.float32]
Int32s = NDArray[np.int32]
Wanted = Literal["none", "last", "all"]

_NO_LOGITS = np.empty((0, 0), np.float32)
_NO_LARGEST = Largest(np.empty((0, 0), np.int32), _NO_LOGITS)


class ContextFull(LocalLLMError):
    """A sequence would have more tokens than the context."""


class StepTooLarge(LocalLLMError):
    """A step with more rows, or more rows of logits, than the limits allow; nothing has been changed."""


class Rows(NamedTuple):
    """The next tokens of one sequence in a step, and which of their rows want logits."""

    sequence: Sequence
    tokens: Several[int]
    wanted: Wanted = "last"
    largest: int = 0  # only so many of the largest logits of each wanted row; 0: all logits


class Result(NamedTuple):
    """What a step returns for one `Rows` with n wanted rows; views that the next step overwrites."""

    logits: F32  # (n, vocabulary); (0, 0) if only the largest were asked for
    largest: Largest  # (n, largest) each, largest first, equal ones by id, NaN before all; (0, 0) if not asked for


class Engine:
    """The sequences of one executable and its cache. Not for use by several threads at once.

    `limits` are those of the executable or less: `rows` and `logit_rows` of one step, and `positions`, the tokens that
    one sequence may have. `pool` deals out the executable's blocks.
    """

    def __init__(self, executable: Executable, pool: BlockPool, limits: Limits) -> None:
        self.executable, self.pool, self.limits = executable, pool, limits

    # -- sequences -------------------------------------------------------------------------------------------------

    def add(self) -> Sequence:
        """A new, empty sequence; it takes no block before its first token."""
        return self.pool.new_sequence()

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens. It shares the blocks, so it costs no memory before it goes on."""
        return sequence.fork()

    def truncate(self, sequence: Sequence, length: int) -> int:
        """Keep the first `length` tokens, or none if layers with a window no longer hold what they see: how many."""
        length = sequence.reach(length)
        sequence.truncate(length)
        return length

    def release(self, sequence: Sequence) -> None:
        """Give all blocks of a sequence back; it is empty then."""
        sequence.free()

    # -- capacity --------------------------------------------------------------------------------------------------

    @property
    def most_largest(self) -> int:
        """How many of the largest logits the device finds by itself; more are found on the host, from all logits."""
        return self.executable.most_picked if isinstance(self.executable, Picks) else 0

    @property
    def block_tokens(self) -> int:
        """Tokens of a cache block."""
        return self.pool.block_size

    @property
    def free_blocks(self) -> int:
        """Cache blocks that can be taken, in the pool that has fewest."""
        return min(pool.takeable for pool in self.pool.pools)

    def room(self, sequence: Sequence) -> int:
        """How many more tokens a sequence can get as things stand; others draw on the same blocks."""
        return max(0, min(self.limits.positions - sequence.length, sequence.room))

    def fits(self, wanted: Several[tuple[Sequence, int]]) -> bool:
        """Whether these sequences can each get their number of tokens in one step, its limits aside.

        Layers with a window give blocks up between steps, so tokens in several steps may fit when in one they do not.
        """
        if any(sequence.length + more > self.limits.positions for sequence, more in wanted):
            return False
        return how_many_fit(wanted) == len(wanted)

    # -- stepping --------------------------------------------------------------------------------------------------

    def step(self, rows: Several[Rows]) -> list[Result]:
        """Append tokens to sequences and evaluate them in one pass; a result for each of `rows`, in order.

        A sequence may stand in one of `rows` only. If anything fails all sequences are as they were before. Raises
        ContextFull and CacheFull for tokens that do not fit, StepTooLarge for more rows than the limits allow, and
        BackendError for a token outside the vocabulary.
        """
        starts, counts, wanted = self._checked(rows)
        try:
            batch = self._batch(rows, starts, counts, wanted)
            self.copy_shared()
            return self._run(rows, batch, wanted)
        except BaseException:
            for part, start in zip(rows, starts, strict=True):
                part.sequence.truncate(start)
            raise

    def copy_shared(self) -> None:
        """Make the copies of shared blocks that forks need before blocks are written; `step` does it by itself."""
        for pool in self.pool.pools:
            if pool.has_copies:
                source, target = pool.take_copies()
                try:
                    self.executable.copy_blocks(source, target, pool is not self.pool)
                except BaseException:
                    pool.put_back(source, target)
                    raise

    def _checked(self, rows: Several[Rows]) -> tuple[list[int], list[int], list[int]]:
        """Of each of `rows` its first position, its tokens and how many want logits; what does not fit is refused."""
        limits = self.limits
        starts: list[int] = []
        counts: list[int] = []
        wanted: list[int] = []
        for sequence, tokens, which, _ in rows:
            count = len(tokens)
            assert sequence.pool is self.pool, "a sequence of another engine"
            start = len(sequence.tokens)
            if start + count > limits.positions:
                held = f"{start} are held and {count} more do not fit; start with a larger context"
                full = f"the context of {limits.positions} tokens is full: {held} ("
                raise ContextFull(Notice(full, Setting("ctx_size"), ")"))
            starts.append(start)
            counts.append(count)
            wanted.append(count if which == "all" else int(which == "last"))
        total = sum(counts)
        if not total or 0 in counts:
            raise LocalLLMError("a step needs at least one token of each of its sequences; leave the others out")
        if total > limits.rows or sum(wanted) > limits.logit_rows:
            raise StepTooLarge(
                f"a step of {total} tokens, {sum(wanted)} of them with logits: this model takes up to {limits.rows} "
                f"and {limits.logit_rows} at a time; evaluate the rest in another step"
            )
        if len(rows) > 1:  # one is looked at by `append`
            sequences = [part.sequence for part in rows]
            assert len(set(map(id, sequences))) == len(rows), "a sequence stands twice in a step"
            fit = how_many_fit(list(zip(sequences, counts, strict=True)))
            if fit < len(rows):
                raise CacheFull(total, sum(counts[:fit]), self.pool.blocks, self.pool.block_size)
        return starts, counts, wanted

    def _batch(self, rows: Several[Rows], starts: list[int], counts: list[int], wanted: list[int]) -> Batch:
        """The batch of `rows`, which it appends to their sequences."""
        tokens, positions, slots, logit_rows, tables = [], [], [], [], []
        end = 0
        for number, part in enumerate(rows):
            start, count = starts[number], counts[number]
            end += count
            tokens.append(np.array(part.tokens, np.int32))
            positions.append(np.arange(start, start + count, dtype=np.int32))
            logit_rows.append(np.arange(end - wanted[number], end, dtype=np.int32))
            slots.append(part.sequence.append(part.tokens))
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
        )

    def _run(self, rows: Several[Rows], batch: Batch, wanted: list[int]) -> list[Result]:
        """Evaluate the batch; only the largest logits leave the device if nobody asks for more."""
        executable = self.executable
        if len(rows) == 1 and not rows[0].largest:  # decoding: a step between tokens is worth its microseconds
            return [Result(executable.step(batch), _NO_LARGEST)]
        most = max(part.largest for part in rows)
        spans = [slice(stop - count, stop) for stop, count in zip(accumulate(wanted), wanted, strict=True)]
        if most and most <= self.most_largest and all(p.largest or not n for p, n in zip(rows, wanted, strict=True)):
            assert isinstance(executable, Picks)
            ids, logits = executable.step_largest(batch, most)
            return [
                Result(_NO_LOGITS, Largest(ids[span, : part.largest], logits[span, : part.largest]))
                for part, span in zip(rows, spans, strict=True)
            ]
        found = executable.step(batch)
        return [
            Result(_NO_LOGITS, largest_of(found[span], part.largest))
            if part.largest
            else Result(found[span], _NO_LARGEST)
            for part, span in zip(rows, spans, strict=True)
        ]


def largest_of(logits: F32, count: int) -> Largest:
    """The `count` largest of each row (n, vocabulary), as `Picks.step_largest` gives them."""
    ids = np.empty((len(logits), min(count, logits.shape[1])), np.int32)
    for into, row in zip(ids, logits, strict=True):
        none = np.isnan(row)
        into[:] = (np.lexsort((-row, ~none)) if none.any() else largest(row, count))[:count]
    return Largest(ids, np.take_along_axis(logits, ids, axis=1) + np.float32(0))  # a negative zero becomes zero


def _joined(arrays: Several[Int32s]) -> Int32s:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _stacked(tables: Several[Int32s]) -> Int32s:
    """Tables of different lengths as (sequences, blocks); 0, which nobody reads, behind the shorter ones."""
    if len(tables) == 1:
        return tables[0][None]
    stacked = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table)] = table
    return stacked
