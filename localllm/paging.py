"""Who owns which block of the key-value cache: block tables, reference counts, copy-on-write. No tensors here.

A block holds the keys and values of `block_size` consecutive positions, in every layer. Sequences share blocks after
`fork`; the first to write into a shared block gets its own copy. Before each step the backend must carry out
`BlockPool.take_copies()`.
"""

from __future__ import annotations

from collections import abc

import numpy as np
from numpy.typing import NDArray

from localllm.errors import LocalLLMError

Int32s = NDArray[np.int32]


class CacheFull(LocalLLMError):
    """The tokens do not fit into the cache; nothing has been changed. `fit` is how many would have."""

    def __init__(self, wanted: int, fit: int, blocks: int, block_size: int) -> None:
        super().__init__(
            f"the context is full: {wanted} more tokens do not fit, {fit} do (the cache holds {blocks * block_size}); "
            "shorten or end a conversation, or start with a larger context (-c)"
        )
        self.fit = fit


class BlockPool:
    """`blocks` cache blocks of `block_size` tokens, and how many sequences use each."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._users = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))  # the last is taken next
        self._copies: dict[int, int] = {}  # target -> source

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def new_sequence(self) -> Sequence:
        """An empty sequence; it takes no block before its first token."""
        return Sequence(self)

    def take_copies(self) -> tuple[Int32s, Int32s]:
        """Blocks to copy, source (n,) -> target (n,), before the next step; they are handed out once.

        All sources count as they are before the first copy: `cache[target] = cache[source]` does it.
        """
        source = np.fromiter(self._copies.values(), np.int32, len(self._copies))
        target = np.fromiter(self._copies, np.int32, len(self._copies))
        self._copies.clear()
        return source, target

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        self._copies.pop(block, None)  # meant for an earlier owner
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
        """A copy of a shared block, for one of its users alone."""
        target = self._take()
        self._copies[target] = self._copies.get(source, source)  # a source still to be copied to is read where it was
        self._release(source)
        return target


class Sequence:
    """One conversation's part of the cache: the tokens at positions 0, 1, ... and the blocks that hold them."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.tokens: list[int] = []
        self.blocks: list[int] = []  # block i holds positions i * block_size and on

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def room(self) -> int:
        """How many more tokens fit as things stand; other sequences draw on the same blocks."""
        size, free = self._pool.block_size, self._pool.free_blocks
        if self._must_copy():
            free -= 1
            if free < 0:
                return 0
        return len(self.blocks) * size - self.length + free * size

    def append(self, tokens: abc.Sequence[int]) -> Int32s:
        """Cache slots (n,) for the next n tokens: physical block * block_size + offset.

        The next step must evaluate them; if it cannot, `truncate` takes them back. Raises CacheFull before anything is
        changed.
        """
        if len(tokens) > self.room:
            raise CacheFull(len(tokens), self.room, self._pool.blocks, self._pool.block_size)
        size, start = self._pool.block_size, self.length
        if len(tokens) and self._must_copy():
            self.blocks[-1] = self._pool._copy(self.blocks[-1])
        self.tokens.extend(tokens)
        while len(self.blocks) * size < self.length:
            self.blocks.append(self._pool._take())
        first = start // size
        positions = np.arange(start - first * size, self.length - first * size)  # counted from block `first`
        return (np.array(self.blocks[first:], np.int32)[positions // size] * size + positions % size).astype(np.int32)

    def truncate(self, length: int) -> None:
        """Forget every token from position `length` on."""
        assert 0 <= length <= self.length, f"cannot truncate {self.length} tokens to {length}"
        del self.tokens[length:]
        keep = -(-length // self._pool.block_size)
        for block in reversed(self.blocks[keep:]):
            self._pool._release(block)
        del self.blocks[keep:]

    def fork(self) -> Sequence:
        """A second sequence with the same tokens, in the same blocks. The tokens must have been evaluated."""
        other = Sequence(self._pool)
        other.tokens, other.blocks = self.tokens.copy(), self.blocks.copy()
        for block in self.blocks:
            self._pool._share(block)
        return other

    def free(self) -> None:
        """Give every block back; the sequence is then empty and may be used anew."""
        self.truncate(0)

    def table(self) -> Int32s:
        """Physical blocks (blocks,), in order of position."""
        return np.array(self.blocks, np.int32)

    def common_prefix(self, tokens: abc.Sequence[int]) -> int:
        """How many of the leading `tokens` are already in the cache."""
        shorter = min(len(tokens), self.length)
        return next((i for i in range(shorter) if self.tokens[i] != tokens[i]), shorter)

    def _must_copy(self) -> bool:
        """Whether the next token goes into a block that another sequence reads too."""
        return self.length % self._pool.block_size != 0 and self._pool._is_shared(self.blocks[-1])
