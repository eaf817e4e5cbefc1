"""The prefix cache keeps finished sequences, so that later prompts with the same prefix need not evaluate it again.

Cached sequences share blocks with running sequences by reference counting. A prompt is looked up by the hashes of its
blocks. The tokens are then compared, so a hash collision only costs time. When blocks run out, the least recently used
sequence is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from localllm.engine.paging import CacheSequence

MOST = 256  # maximum cached sequences; the pool limits their blocks, this limits the search time
_TRIED = 16  # maximum candidates to compare token by token


class PrefixMatch(NamedTuple):
    """A cached sequence that shares the first `length` tokens with a prompt. `alike` is the number of equal tokens.

    `alike` exceeds `length` if sliding-window or recurrent layers no longer hold the state needed for all equal tokens.
    """

    sequence: CacheSequence | None
    length: int
    alike: int


class PrefixCache:
    """The cached sequences of one engine, least recently used first."""

    def __init__(self, block_tokens: int, leaving: Callable[[CacheSequence], None] | None = None) -> None:
        """`leaving` is called with an evicted sequence before its blocks are freed."""
        self._size, self._leaving = block_tokens, leaving
        self._kept: OrderedDict[CacheSequence, tuple[int, ...]] = (
            OrderedDict()
        )  # sequence -> hashes of its whole blocks
        self._by_hash: dict[int, list[CacheSequence]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[CacheSequence]:
        return iter(self._kept)

    def find(self, tokens: Sequence[int], for_file: bool = False) -> PrefixMatch:
        """Return the cached sequence that saves the most of `tokens`, and mark it as recently used. `for_file`: only
        sequences that have all blocks of a file.
        """
        best = PrefixMatch(None, 0, 0)
        for sequence in islice(self._candidates(tokens), _TRIED):
            alike = same(sequence.tokens, tokens)
            length = sequence.reach(alike)
            if for_file and not sequence.keeps(length // self._size * self._size):
                length = 0
            if length > best.length:
                best = PrefixMatch(sequence, length, max(alike, best.alike))
            elif alike > best.alike:
                best = best._replace(alike=alike)
        if best.sequence is not None:
            self._kept.move_to_end(best.sequence)
        return best

    def keep(self, sequence: CacheSequence) -> None:
        """Cache a sequence, which must not change afterwards."""
        hashes = tuple(chain(sequence.tokens, self._size))
        self._kept[sequence] = hashes
        for key in hashes:
            self._by_hash.setdefault(key, []).append(sequence)
        while len(self._kept) > MOST:
            self.evict()

    def keep_in_place(self, sequence: CacheSequence) -> None:
        """Cache a sequence, and remove its cached beginning if all layers can be cut to any length."""
        if not sequence.pool.has_windows:
            found = self.find(sequence.tokens)
            if found.sequence is not None and found.length == found.sequence.length:
                self.drop(found.sequence)
        self.keep(sequence)

    def evict(self) -> bool:
        """Evict the least recently used sequence; return whether there was one."""
        if not self._kept:
            return False
        oldest = next(iter(self._kept))
        if self._leaving is not None:
            self._leaving(oldest)
        self.drop(oldest)
        return True

    def drop(self, sequence: CacheSequence) -> None:
        """Remove a cached sequence and free its blocks."""
        for key in self._kept.pop(sequence):
            holders = self._by_hash[key]
            holders.remove(sequence)
            if not holders:
                del self._by_hash[key]
        sequence.free()

    def clear(self) -> None:
        while self.evict():
            pass

    def forget(self) -> None:
        """Remove all sequences, whose content was lost, without saving them."""
        for sequence in list(self._kept):
            self.drop(sequence)

    def _candidates(self, tokens: Sequence[int]) -> Iterator[CacheSequence]:
        """Yield cached sequences that share leading blocks, longest prefix first, then newest; then those that share
        the first token.
        """
        seen: set[int] = set()
        for key in reversed(list(chain(tokens, self._size))):
            for sequence in reversed(self._by_hash.get(key, ())):
                if id(sequence) not in seen:
                    seen.add(id(sequence))
                    yield sequence
        first = list(tokens[:1])
        for sequence in reversed(self._kept):
            if id(sequence) not in seen and sequence.tokens[:1] == first:
                yield sequence


def chain(tokens: Sequence[int], size: int) -> Iterator[int]:
    """Yield a hash for each whole block of `tokens`; it covers all tokens up to the end of the block."""
    key = 0
    for start in range(0, len(tokens) - size + 1, size):
        key = hash((key, *tokens[start : start + size]))
        yield key


def same(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that are equal."""
    length = min(len(one), len(other))
    start, step = 0, 1024  # comparing slices is faster than a loop
    while start < length and one[start : start + step] == other[start : start + step]:
        start += step
    return next((i for i in range(start, length) if one[i] != other[i]), length) if start < length else length
