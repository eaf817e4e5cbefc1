"""The numbered places of answers, which llama.cpp calls slots: what each evaluated last can be saved, loaded, erased.

Requests do not need their place to find tokens in the cache. A place only gives the last text that was evaluated there
a name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Several
from typing import TypeVar

from localllm.cache import CacheFull, Sequence
from localllm.cache.prefix import PrefixCache, same
from localllm.engine import Engine

T = TypeVar("T")


class Places:
    """The places of a scheduler. Only its thread uses them."""

    def __init__(self, count: int, engine: Engine, prefixes: PrefixCache) -> None:
        self._count, self._engine, self._prefixes = count, engine, prefixes
        self._last: dict[int, list[int]] = {}  # place -> the tokens evaluated last

    def choose(self, wanted: int, taken: Collection[int]) -> int:
        """Return the place that a request wants, or else the first that is not `taken`."""
        if 0 <= wanted < self._count:
            return wanted
        return next((place for place in range(self._count) if place not in taken), 0)

    def remember(self, place: int, tokens: list[int]) -> None:
        """Record what the last request of a place leaves in the cache."""
        self._last[place] = list(tokens)

    def save(self, place: int, write: Callable[[Sequence], int]) -> tuple[int, int]:
        """Hand what the cache still holds of a place to `write`; return its tokens and what `write` returned."""
        return self.held(self._last.get(place, []), lambda sequence: (sequence.length, write(sequence)))

    def held(self, tokens: Several[int], use: Callable[[Sequence], T]) -> T:
        """Hand a sequence of what the cache holds of `tokens`, from the first, to `use`; return what that returns."""
        found = self._prefixes.find(tokens)
        sequence = self._engine.add() if found.sequence is None else self._engine.fork(found.sequence)
        try:
            self._engine.truncate(sequence, found.length)
            return use(sequence)
        finally:
            sequence.free()

    def load(self, place: int, read: Callable[[], tuple[Sequence, int]]) -> tuple[int, int]:
        """Keep a sequence that `read` returns, as what was evaluated last; return its tokens and the second value.

        Sequences that were not used for the longest time make room. CacheFull if running requests leave too little.
        """
        tokens, size = self.take_up(read)
        self.remember(place, tokens)
        return len(tokens), size

    def take_up(self, read: Callable[[], tuple[Sequence, int]]) -> tuple[list[int], int]:
        """Keep a sequence that `read` returns; return its tokens and the second value. Errors as in `load`."""
        while True:
            try:
                sequence, size = read()
                break
            except CacheFull:
                if not self._prefixes.evict():
                    raise
        tokens = list(sequence.tokens)
        if self._prefixes.find(tokens).length == len(tokens):  # the cache has it, or it is empty
            sequence.free()
        else:
            self._prefixes.keep(sequence)
        return tokens, size

    def erase(self, place: int) -> int:
        """Drop from the cache what a place evaluated last; return its tokens. Longer texts with it stay."""
        tokens = self._last.pop(place, [])
        for sequence in list(self._prefixes):
            if same(sequence.tokens, tokens) == len(sequence.tokens):
                self._prefixes.drop(sequence)
        return len(tokens)
