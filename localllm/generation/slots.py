"""Slots, as in llama.cpp: the last tokens evaluated in a slot can be saved, loaded and erased.

The prefix cache serves requests in any slot. A slot is only a number for the last tokens that were evaluated in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from localllm.engine import CacheFull, CacheSequence, Engine
from localllm.engine.prefix import PrefixCache, same

T = TypeVar("T")


class Slots:
    """The slots of a scheduler. Only the scheduler's thread uses them."""

    def __init__(self, count: int, engine: Engine, prefixes: PrefixCache) -> None:
        self._count, self._engine, self._prefixes = count, engine, prefixes
        self._last: dict[int, list[int]] = {}  # slot -> the tokens evaluated last

    def choose(self, wanted: int, taken: Collection[int]) -> int:
        """Return the slot that a request asks for, or else the first one not in `taken`."""
        if 0 <= wanted < self._count:
            return wanted
        return next((slot for slot in range(self._count) if slot not in taken), 0)

    def remember(self, slot: int, tokens: list[int]) -> None:
        """Record the tokens that the last request in a slot left in the cache."""
        self._last[slot] = list(tokens)

    def save(self, slot: int, write: Callable[[CacheSequence], int]) -> tuple[int, int]:
        """Call `write` with the cached part of a slot's tokens; return its number of tokens and `write`'s result."""
        return self.with_cached(self._last.get(slot, []), lambda sequence: (sequence.length, write(sequence)))

    def with_cached(self, tokens: Sequence[int], use: Callable[[CacheSequence], T]) -> T:
        """Call `use` with a sequence of the longest cached prefix of `tokens`; return its result."""
        found = self._prefixes.find(tokens)
        sequence = self._engine.add() if found.sequence is None else self._engine.fork(found.sequence)
        try:
            self._engine.truncate(sequence, found.length)
            return use(sequence)
        finally:
            sequence.free()

    def load(self, slot: int, read: Callable[[], tuple[CacheSequence, int]]) -> tuple[int, int]:
        """Cache the sequence that `read` returns as a slot's last tokens; return their number and the second value.

        Least recently used sequences are evicted to make room. Raise CacheFull if running requests leave too little.
        """
        tokens, size = self.take_up(read)
        self.remember(slot, tokens)
        return len(tokens), size

    def take_up(self, read: Callable[[], tuple[CacheSequence, int]]) -> tuple[list[int], int]:
        """Cache the sequence that `read` returns; return its tokens and the second value. Errors as in `load`."""
        while True:
            try:
                sequence, size = read()
                break
            except CacheFull:
                if not self._prefixes.evict():
                    raise
        tokens = list(sequence.tokens)
        if self._prefixes.find(tokens).length == len(tokens):  # already cached, or empty
            sequence.free()
        else:
            self._prefixes.keep(sequence)
        return tokens, size

    def erase(self, slot: int) -> int:
        """Drop a slot's last tokens from the cache; return their number. Longer sequences with this prefix stay."""
        tokens = self._last.pop(slot, [])
        for sequence in list(self._prefixes):
            if same(sequence.tokens, tokens) == len(sequence.tokens):
                self._prefixes.drop(sequence)
        return len(tokens)
