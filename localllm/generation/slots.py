"""Slots, as in llama.cpp: the tokens last evaluated in a slot can be saved, loaded and erased.

The prefix cache serves requests in any slot. A slot is only a number under which the scheduler remembers the tokens
that were last evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from localllm.engine import CacheFull, CacheSequence, Engine, Placed
from localllm.engine.prefix import PrefixCache, same

T = TypeVar("T")


class Slots:
    """The slots of a scheduler. Only the scheduler's thread uses them."""

    def __init__(self, count: int, engine: Engine, prefixes: PrefixCache) -> None:
        self._count, self._engine, self._prefixes = count, engine, prefixes
        self._last: dict[int, list[int]] = {}  # slot -> tokens last evaluated in it
        self._media: dict[int, Sequence[Placed]] = {}  # slot -> their media, so that their ids stay theirs

    def choose(self, wanted: int, taken: Collection[int]) -> int:
        """Return the slot that the request asks for, or the first slot not in `taken`."""
        if 0 <= wanted < self._count:
            return wanted
        return next((slot for slot in range(self._count) if slot not in taken), 0)

    def remember(self, slot: int, tokens: list[int], media: Sequence[Placed] = ()) -> None:
        """Record the tokens in the cache after the last request in a slot, and the media among them."""
        self._last[slot], self._media[slot] = list(tokens), tuple(media)

    def forget(self) -> None:
        """Forget all slots, because the content of the cache was lost."""
        self._last.clear()
        self._media.clear()

    def save(self, slot: int, write: Callable[[CacheSequence], int]) -> tuple[int, int]:
        """Call `write` with the cached prefix of a slot's tokens; return the prefix length and `write`'s result."""
        return self.with_cached(self._last.get(slot, []), lambda sequence: (sequence.length, write(sequence)))

    def cached(self, tokens: Sequence[int]) -> int:
        """Return the length of the longest cached prefix of `tokens`."""
        return self._prefixes.find(tokens).length

    def with_cached(self, tokens: Sequence[int], use: Callable[[CacheSequence], T]) -> T:
        """Call `use` with a sequence of the longest cached prefix of `tokens` that can be saved; return the result of
        `use`.
        """
        found = self._prefixes.find(tokens, for_file=True)
        sequence = self._engine.add() if found.sequence is None else self._engine.fork(found.sequence)
        try:
            self._engine.truncate(sequence, found.length)
            return use(sequence)
        finally:
            sequence.free()

    def load(self, slot: int, read: Callable[[], tuple[CacheSequence, int]]) -> tuple[int, int]:
        """Cache the sequence that `read` returns as a slot's last tokens; return its length and `read`'s second value.

        Evict the least recently used sequences to make room. Raise CacheFull if running requests leave too few blocks.
        """
        tokens, media, size = self._taken_up(read)
        self.remember(slot, tokens, media)
        return len(tokens), size

    def take_up(self, read: Callable[[], tuple[CacheSequence, int]]) -> tuple[list[int], int]:
        """Cache the sequence that `read` returns; return its tokens and `read`'s second value. Raises the errors of
        `load`.
        """
        tokens, _, size = self._taken_up(read)
        return tokens, size

    def _taken_up(self, read: Callable[[], tuple[CacheSequence, int]]) -> tuple[list[int], list[Placed], int]:
        while True:
            try:
                sequence, size = read()
                break
            except CacheFull:
                if not self._prefixes.evict():
                    raise
        tokens, media = list(sequence.tokens), sequence.media.copy()
        if self._prefixes.find(tokens).length == len(tokens):  # already cached, or empty
            sequence.free()
        else:
            self._prefixes.keep_in_place(sequence)
        return tokens, media, size

    def erase(self, slot: int) -> int:
        """Remove a slot's last tokens from the cache and return their number. Longer sequences with this prefix stay
        cached.
        """
        tokens, _ = self._last.pop(slot, []), self._media.pop(slot, None)
        for sequence in list(self._prefixes):
            if same(sequence.tokens, tokens) == len(sequence.tokens):
                self._prefixes.drop(sequence)
        return len(tokens)
