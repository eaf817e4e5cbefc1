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
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backends.base import Executable, Largest, Limits, Picks
from backends.plan import Batch
from localllm.errors import LocalLLMError
from localllm.paging import BlockPool, CacheFull, Sequence, how_many_fit
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

    logits: F32  # (n, vocabulary); (0, 0) if only the largest were asked for, or none
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
        """Whether these sequences can each get their number of tokens together, in one step or several."""
        return self._too_long(wanted) is None and how_many_fit(wanted) == len(wanted)

    # -- stepping --------------------------------------------------------------------------------------------------

    def step(self, rows: Several[Rows]) -> list[Result]:
        """Append tokens to sequences and evaluate them in one pass; a result for each of `rows`, in order.

        A sequence may stand in one of `rows` only. If anything fails all sequences are as they were before. Raises
        ContextFull and CacheFull for tokens that do not fit, StepTooLarge for more rows than the limits allow, and
        BackendError for a token outside the vocabulary.
        """
        self._check(rows)
        starts = [part.sequence.length for part in rows]
        try:
            batch = self._batch(rows, starts)
            self.copy_shared()
            return self._run(rows, batch)
        except BaseException:
            for part, start in zip(rows, starts, strict=True):
                part.sequence.truncate(start)
            raise

    def copy_shared(self) -> None:
        """Make the copies of shared blocks that forks need before blocks are written; `step` does it by itself."""
        for pool in self.pool.pools:
            source, target = pool.take_copies()
            if source.size:
                try:
                    self.executable.copy_blocks(source, target, pool is not self.pool)
                except BaseException:
                    pool.put_back(source, target)
                    raise

    def _check(self, rows: Several[Rows]) -> None:
        """Refuse a step before anything is changed."""
        count = wanted = 0
        for part in rows:
            assert part.sequence.pool is self.pool, "a sequence of another engine"
            if not len(part.tokens):
                raise LocalLLMError("a sequence stands in a step without tokens; give it at least one, or leave it out")
            count += len(part.tokens)
            wanted += _wanted_rows(part)
        if not count:
            raise LocalLLMError("a step needs at least one token")
        if count > self.limits.rows or wanted > self.limits.logit_rows:
            raise StepTooLarge(
                f"a step of {count} tokens, {wanted} of them with logits: this model takes up to {self.limits.rows} "
                f"and {self.limits.logit_rows} at a time; evaluate the rest in another step"
            )
        lengths = [(part.sequence, len(part.tokens)) for part in rows]
        if (long := self._too_long(lengths)) is not None:
            sequence, more = long
            raise ContextFull(
                f"the context of {self.limits.positions} tokens is full: {sequence.length} are held and {more} more "
                "do not fit; start with a larger context (-c)"
            )
        if len(rows) > 1:  # one is looked at by `append`
            assert len({id(part.sequence) for part in rows}) == len(rows), "a sequence stands twice in a step"
            fit = how_many_fit(lengths)
            if fit < len(rows):
                tokens = sum(more for _, more in lengths[:fit])
                raise CacheFull(count, tokens, self.pool.blocks, self.pool.block_size)

    def _too_long(self, wanted: Several[tuple[Sequence, int]]) -> tuple[Sequence, int] | None:
        """The first of these whose sequence would exceed the context."""
        return next((one for one in wanted if one[0].length + one[1] > self.limits.positions), None)

    def _batch(self, rows: Several[Rows], starts: list[int]) -> Batch:
        tokens = [np.array(part.tokens, np.int32) for part in rows]
        slots = [part.sequence.append(part.tokens) for part in rows]
        tables = [part.sequence.tables() for part in rows]
        counts = [len(part.tokens) for part in rows]
        ends = np.cumsum(counts).tolist()
        windowed = len(tables[0]) > 1
        return Batch(
            tokens=_joined(tokens),
            positions=_joined([np.arange(a, a + n, dtype=np.int32) for a, n in zip(starts, counts, strict=True)]),
            slots=_joined([one[0] for one in slots]),
            sequence=np.repeat(np.arange(len(rows), dtype=np.int32), counts),
            tables=_stacked([one[0] for one in tables]),
            logit_rows=_joined(
                [np.arange(end - _wanted_rows(part), end, dtype=np.int32) for part, end in zip(rows, ends, strict=True)]
            ),
            window_slots=_joined([one[1] for one in slots]) if windowed else None,
            window_tables=_stacked([one[1] for one in tables]) if windowed else None,
        )

    def _run(self, rows: Several[Rows], batch: Batch) -> list[Result]:
        """Evaluate the batch; only the largest logits leave the device if nobody asks for more."""
        executable, most = self.executable, max(part.largest for part in rows)
        stops = np.cumsum([_wanted_rows(part) for part in rows]).tolist()
        spans = [(part, slice(stop - _wanted_rows(part), stop)) for part, stop in zip(rows, stops, strict=True)]
        few = all(part.largest or part.wanted == "none" for part in rows)
        if most and few and isinstance(executable, Picks) and most <= executable.most_picked:
            ids, logits = executable.step_largest(batch, most)
            return [
                Result(_NO_LOGITS, Largest(ids[span, : part.largest], logits[span, : part.largest]))
                for part, span in spans
            ]
        found = executable.step(batch)
        return [
            Result(_NO_LOGITS, largest_of(found[span], part.largest))
            if part.largest
            else Result(found[span], _NO_LARGEST)
            for part, span in spans
        ]


def largest_of(logits: F32, count: int) -> Largest:
    """The `count` largest of each row (n, vocabulary), as `Picks.step_largest` gives them."""
    ids = np.empty((len(logits), min(count, logits.shape[1])), np.int32)
    for into, row in zip(ids, logits, strict=True):
        none = np.isnan(row)
        into[:] = (np.lexsort((-row, ~none)) if none.any() else largest(row, count))[:count]
    return Largest(ids, np.take_along_axis(logits, ids, axis=1) + np.float32(0))  # a negative zero becomes zero


def _wanted_rows(part: Rows) -> int:
    return len(part.tokens) if part.wanted == "all" else int(part.wanted == "last")


def _joined(arrays: list[Int32s]) -> Int32s:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _stacked(tables: list[Int32s]) -> Int32s:
    """Tables of different lengths as (sequences, blocks); 0, which nobody reads, behind the shorter ones."""
    if len(tables) == 1:
        return tables[0][None]
    stacked = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table)] = table
    return stacked
