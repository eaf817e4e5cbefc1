"""Ownership of KV cache blocks: block tables, reference counts, copy-on-write. This module handles no tensors.

A block holds the keys and values of `block_size` consecutive positions in every layer of its pool. Sequences share
blocks after `fork`; the first to write into a shared block gets a copy. Before each step the backend must carry out
`BlockPool.take_copies()` of every pool.

Sliding-window layers may have a separate pool. Blocks outside the window are kept until other sequences need them, so
that a sequence can be rolled back further.
"""

from __future__ import annotations

import weakref
from collections import Counter, abc

import numpy as np
from numpy.typing import NDArray

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.engine.media import MediaIds, Placed, place, whole

Int32s = NDArray[np.int32]

SLACK = 128  # tokens that can be rolled back even after blocks were freed; half of it for a sequence loaded from a file


class CacheFull(LocalLLMError):
    """The tokens do not fit into the KV cache; nothing has changed. `fit` is the number of tokens that would fit."""

    def __init__(self, wanted: int, fit: int, blocks: int, block_size: int) -> None:
        counts = f"{wanted} more tokens do not fit, {fit} do (the cache holds {blocks * block_size})"
        advice = "shorten or end a conversation, or start with a larger context"
        super().__init__(Notice(f"the context is full: {counts}; {advice} (", Setting("ctx_size"), ")"))
        self.fit = fit


class BlockPool:
    """A pool of `blocks` cache blocks of `block_size` tokens, with reference counts.

    A token attends to the last `window` tokens including itself (0: all). `windowed` is the pool of sliding-window
    layers in a model that also has full-attention layers.
    """

    def __init__(self, blocks: int, block_size: int, window: int = 0, windowed: BlockPool | None = None) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.window = window
        self.windowed = windowed
        self._users = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))  # a stack of free blocks
        self._copies: dict[int, int] = {}  # pending copies: target block -> source block
        self._tables: weakref.WeakSet[_Table] = weakref.WeakSet()
        self.losses = 0  # how often the content of all blocks was lost
        self.media = MediaIds()

    def lose(self) -> None:
        """Record that the content of all blocks is lost."""
        self.losses += 1

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """This pool and the pool of sliding-window layers, in the order of a sequence's tables."""
        return (self, self.windowed) if self.windowed is not None else (self,)

    def new_sequence(self) -> CacheSequence:
        """Return an empty sequence. Its first block is allocated with its first token."""
        return CacheSequence([_Table(pool) for pool in self.pools])

    @property
    def has_copies(self) -> bool:
        """Whether there are pending copies for `take_copies`."""
        return bool(self._copies)

    def take_copies(self) -> tuple[Int32s, Int32s]:
        """Return the pending block copies, source (n,) -> target (n,), each once.

        Read all sources before writing the first copy; `cache[target] = cache[source]` does so.
        """
        source = np.fromiter(self._copies.values(), np.int32, len(self._copies))
        target = np.fromiter(self._copies, np.int32, len(self._copies))
        self._copies.clear()
        return source, target

    def put_back(self, source: Int32s, target: Int32s) -> None:
        """Requeue copies that `take_copies` returned but that were not carried out."""
        self._copies.update(zip(target.tolist(), source.tolist(), strict=True))

    def first_seen(self, length: int) -> int:
        """Return the first block that the token at position `length` attends to."""
        return max(0, length + 1 - self.window) // self.block_size if self.window else 0

    def first_kept(self, length: int) -> int:
        """Return the first block of a sequence of `length` tokens that is saved to a file."""
        return self.first_seen(max(0, length - SLACK // 2))

    @property
    def has_windows(self) -> bool:
        """Whether some layers keep only a window or a state, so that a sequence cannot be cut to any length."""
        return self.windowed is not None or bool(self.window)

    @property
    def takeable(self) -> int:
        """Number of free blocks, including the blocks that sequences could give up."""
        if not self.window:
            return len(self._free)
        unneeded = Counter(block for table in self._tables for block in table.unneeded)
        return len(self._free) + sum(self._users[block] == count for block, count in unneeded.items())

    def _make_free(self, count: int, first: _Table) -> None:
        """Free unneeded blocks, starting with the table `first`, until `count` blocks are free."""
        if len(self._free) >= count:
            return
        for table in (first, *(table for table in self._tables if table is not first)):
            while len(self._free) < count and table.unneeded:
                table.give_up()

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        self._copies.pop(block, None)  # drop the pending copy of a previous owner
        return block

    def _share(self, block: int) -> None:
        self._users[block] += 1

    def _release(self, block: int) -> None:
        self._users[block] -= 1
        assert self._users[block] >= 0, f"block {block} released twice"
        if self._users[block] == 0:
            self._free.append(block)

    def _is_shared(self, block: int) -> bool:
        return self._users[block] > 1

    def _copy(self, source: int) -> int:
        """Return a copy of a shared block for one owner."""
        target = self._take()
        self._copies[target] = self._copies.get(source, source)  # a pending copy reads the original source
        self._release(source)
        return target


class _Table:
    """The block table of one sequence in one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.start = 0  # number of blocks freed at the start
        self.blocks: list[int] = []  # block i contains the positions from (start + i) * block_size on
        self.length = 0  # number of tokens
        self._newest = 0  # length before the last `append`, until its tokens are evaluated
        pool._tables.add(self)

    @property
    def unneeded(self) -> list[int]:
        """Return the blocks that may be freed, oldest first."""
        return self.blocks[: max(0, self.pool.first_seen(max(0, self._newest - SLACK)) - self.start)]

    def give_up(self) -> None:
        self.pool._release(self.blocks.pop(0))
        self.start += 1

    @property
    def room(self) -> int:
        """Number of tokens that fit at present; other sequences compete for the same blocks."""
        size, free = self.pool.block_size, self.pool.takeable - self._must_copy()
        return (self.start + len(self.blocks) + free) * size - self.length if free >= 0 else 0

    def fits(self, count: int) -> bool:
        """Return whether `count` tokens fit at present; other sequences compete for the same blocks."""
        within = (self.start + len(self.blocks)) * self.pool.block_size - self.length  # free slots in the last block
        return (0 < count <= within and not self._must_copy()) or count <= self.room

    def append(self, count: int) -> Int32s:
        """Append `count` tokens, which must fit, and return their cache slots (count,)."""
        pool, size = self.pool, self.pool.block_size
        if count == 1 and (offset := self.length % size) and pool._users[self.blocks[-1]] == 1:  # fast path for decode
            self._newest = self.length
            self.length += 1
            return np.array([self.blocks[-1] * size + offset], np.int32)
        copy, more = count > 0 and self._must_copy(), self._more(count)
        self._newest = self.length
        pool._make_free(more + copy, self)
        if copy:
            self.blocks[-1] = pool._copy(self.blocks[-1])
        for _ in range(more):
            self.blocks.append(pool._take())
        self.length += count
        return self.slots(self.length - count, self.length)

    def slots(self, start: int, stop: int) -> Int32s:
        """Return the cache slots of positions start to stop; 0 for positions in freed blocks."""
        size, gone = self.pool.block_size, self.start
        return np.array(
            [self.blocks[p // size - gone] * size + p % size if p >= gone * size else 0 for p in range(start, stop)],
            np.int32,
        )

    def settle(self) -> None:
        """Record that all tokens are evaluated, so that blocks outside the window may be freed."""
        self._newest = self.length

    def reaches(self, length: int) -> bool:
        """Return whether all positions that the token at position `length` attends to are cached."""
        return not length or self.pool.first_seen(length) >= self.start

    def truncate(self, length: int) -> None:
        keep = max(0, -(-length // self.pool.block_size) - self.start)
        for block in reversed(self.blocks[keep:]):
            self.pool._release(block)
        del self.blocks[keep:]
        self.length, self._newest = length, min(length, self._newest)
        if not length:
            self.start = 0

    def skip(self, length: int) -> None:
        """Set an empty table to `length` tokens, without blocks for positions outside the window."""
        self.start = self.pool.first_kept(length)
        self.length = self.start * self.pool.block_size

    def share(self, other: _Table) -> None:
        """Share the blocks of another table; this table must be empty."""
        self.start, self.blocks, self.length = other.start, other.blocks.copy(), other.length
        self._newest = other._newest
        for block in self.blocks:
            self.pool._share(block)

    def numbers(self) -> Int32s:
        """Return physical blocks (blocks,) in order of position; freed blocks are 0, which is never read."""
        return np.array([0] * self.start + self.blocks if self.start else self.blocks, np.int32)

    def _more(self, count: int) -> int:
        """Return how many additional blocks `count` tokens take, not counting copies."""
        return -(-(self.length + count) // self.pool.block_size) - self.start - len(self.blocks)

    def _must_copy(self) -> bool:
        """Return whether the next token is written to a shared block, which must be copied first."""
        return self.length % self.pool.block_size != 0 and self.pool._is_shared(self.blocks[-1])


class CacheSequence:
    """The cached tokens of one conversation, at positions 0, 1, ..., and their blocks.

    It has one table for full-attention layers and, if needed, one for sliding-window layers.
    """

    def __init__(self, tables: abc.Sequence[_Table]) -> None:
        self._tables = tables
        self.tokens: list[int] = []
        self.media: list[Placed] = []  # pictures and sound, in order; the last one may be cut
        self.border = 0  # number of tokens read by the encoder; the next token starts the answer
        self._losses = self.pool.losses  # of the pool, when the first token was appended

    @property
    def blocks(self) -> list[int]:
        return self._tables[0].blocks

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def lost(self) -> bool:
        """Whether the content of the blocks was lost. The sequence can then only be emptied."""
        return bool(self.tokens) and self._losses != self.pool.losses

    @property
    def room(self) -> int:
        """Number of tokens that fit at present; other sequences compete for the same blocks."""
        return min(map(_room, self._tables))

    def fits(self, count: int) -> bool:
        """Return whether `count` tokens fit at present; other sequences compete for the same blocks."""
        return all(table.fits(count) for table in self._tables)

    @property
    def pool(self) -> BlockPool:
        """The pool of the first table."""
        return self._tables[0].pool

    def append(self, tokens: abc.Sequence[int]) -> list[Int32s]:
        """Append tokens, and return their cache slots (n,) per table: physical block * block_size + offset.

        The next step must evaluate the tokens; if it fails, `truncate` removes them. Raises CacheFull before any
        change.
        """
        if not self.fits(len(tokens)):
            raise self._full(len(tokens))
        if not self.tokens:
            self._losses = self.pool.losses
        self._extend(tokens)
        return [table.append(len(tokens)) for table in self._tables]

    def _extend(self, tokens: abc.Sequence[int]) -> None:
        if (tokens[0] if len(tokens) == 1 else min(tokens, default=0)) < 0:  # decode needs no `min`
            added = place(tokens, len(self.tokens), self.pool.media)
            self.media += added[1:] if self.media[-1:] == added[:1] else added
        self.tokens.extend(tokens)

    def slots(self, start: int, stop: int) -> list[Int32s]:
        """Return the cache slots of positions start to stop, per table, as `append` does."""
        return [table.slots(start, stop) for table in self._tables]

    def settle(self) -> None:
        """Record that all tokens have been evaluated. Sliding-window blocks needed only by the last step may then be
        freed.
        """
        for table in self._tables:
            table.settle()

    def occupy(self, tokens: abc.Sequence[int]) -> None:
        """Allocate blocks for tokens whose keys and values the caller writes. The sequence must be empty."""
        assert not self.tokens
        for table in self._tables:
            table.skip(len(tokens))
        more = [len(tokens) - table.length for table in self._tables]
        if any(count > table.room for count, table in zip(more, self._tables, strict=True)):
            self.truncate(0)
            raise self._full(len(tokens))
        for count, table in zip(more, self._tables, strict=True):
            table.append(count)
        self._losses = self.pool.losses
        self._extend(tokens)

    def _full(self, wanted: int) -> CacheFull:
        tightest = min(self._tables, key=lambda table: table.room)
        return CacheFull(wanted, self.room, tightest.pool.blocks, tightest.pool.block_size)

    def reach(self, length: int) -> int:
        """Return the length after truncating to `length` tokens: `length`, or 0 if a sliding-window layer has freed
        blocks that these tokens need, or if the blocks' content was lost. A picture whose tokens see each other is not
        cut: the result is then the number of tokens before it.

        If it is 0, all tokens must be evaluated again. A text read by an encoder is kept as a whole, together with the
        token after it, or dropped.
        """
        if self.lost or (self.border and length <= self.border):
            return 0
        if self.media:
            length = whole(self.media, length)
        return length if all(table.reaches(length) for table in self._tables) else 0

    def keeps(self, length: int) -> bool:
        """Return whether all blocks that a file of the first `length` tokens has are here. Blocks in front of a window
        may be freed if the sequence was longer.
        """
        return not self.lost and all(table.start <= table.pool.first_kept(length) for table in self._tables)

    def truncate(self, length: int) -> None:
        """Remove all tokens from position `length` on."""
        assert 0 <= length <= self.length, f"cannot truncate {self.length} tokens to {length}"
        assert self.reach(length) == length, f"blocks needed for {length} tokens were released"
        del self.tokens[length:]
        while self.media and self.media[-1].start >= length:
            self.media.pop()
        if not length:
            self.border = 0
        for table in self._tables:
            table.truncate(length)

    def fork(self) -> CacheSequence:
        """Return a second sequence with the same tokens and blocks. The tokens must have been evaluated."""
        other = CacheSequence([_Table(table.pool) for table in self._tables])
        other.tokens, other.border, other._losses = self.tokens.copy(), self.border, self._losses
        other.media = self.media.copy()
        for mine, theirs in zip(self._tables, other._tables, strict=True):
            theirs.share(mine)
        return other

    def free(self) -> None:
        """Return all blocks to the pool; the sequence is then empty and reusable."""
        self.truncate(0)

    def tables(self) -> list[Int32s]:
        """Return physical blocks (blocks,) in order of position, per table; freed blocks are 0, which is never read."""
        return [table.numbers() for table in self._tables]

    def common_prefix(self, tokens: abc.Sequence[int]) -> int:
        """Return the number of leading `tokens` that are cached together with all positions that they attend to."""
        shorter = min(len(tokens), self.length)
        return self.reach(next((i for i in range(shorter) if self.tokens[i] != tokens[i]), shorter))


def _room(table: _Table) -> int:
    return table.room


def how_many_fit(wanted: abc.Sequence[tuple[CacheSequence, int]]) -> int:
    """Return how many of the leading sequences can append their numbers of tokens in the same step.

    All sequences belong to one pool, and each occurs once.
    """
    fit = len(wanted)
    for tables in zip(*(sequence._tables for sequence, _ in wanted), strict=True):
        left, copied = tables[0].pool.takeable, Counter[int]()
        for number, (table, (_, count)) in enumerate(zip(tables, wanted, strict=True)):
            left -= table._more(count)
            if count and table._must_copy():
                shared = table.blocks[-1]
                copied[shared] += 1
                left -= copied[shared] < table.pool._users[shared]  # the last owner needs no copy
            if left < 0:
                fit = min(fit, number)
                break
    return fit
