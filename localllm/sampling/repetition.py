"""Repetition in the token history: token counts for the penalties, and repeated phrases for DRY.

DRY follows github.com/oobabooga/text-generation-webui/pull/5677; sequence breakers are as in llama.cpp.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

# Maps the first token of a sequence breaker to the tokens that must follow; () if the token contains a whole breaker.
Breakers = Mapping[int, tuple[tuple[int, ...], ...]]
_KEPT = 8  # maximum cached sets of sequence breakers


def window_counts(history: Sequence[int], last: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the distinct tokens (n,) among the last `last` of `history`, and the count of each (n,)."""
    counts = Counter(history[-last:])
    return np.fromiter(counts, np.int32, len(counts)), np.fromiter(counts.values(), np.int64, len(counts))


def continuations(history: Sequence[int], last: int, allowed: int, dry_breakers: Breakers) -> dict[int, int]:
    """Return a map from each token that would extend a repetition to the length so far in tokens, at least `allowed`.

    In a repetition, the newest tokens also occur earlier among the last `last` tokens; the token after the earlier
    occurrence extends it. No repetition crosses a sequence breaker, and a breaker is never an extension.
    """
    newest_first = history[-last:][::-1]
    reach = _reach(newest_first, dry_breakers)
    if len(newest_first) <= allowed or reach < allowed:
        return {}
    longest: dict[int, int] = {}
    for distance, common in enumerate(_common_lengths(newest_first)):
        length = min(common, reach)
        if distance and length >= allowed:
            token = newest_first[distance - 1]
            if () not in dry_breakers.get(token, ()):
                longest[token] = max(length, longest.get(token, 0))
    return longest


def _reach(newest_first: Sequence[int], dry_breakers: Breakers) -> int:
    """Return the number of tokens after the last sequence breaker."""
    for age, token in enumerate(newest_first):
        ends = [
            age - len(tail)
            for tail in dry_breakers.get(token, ())
            if len(tail) <= age and all(newest_first[age - 1 - i] == wanted for i, wanted in enumerate(tail))
        ]
        if ends:
            return min(ends)
    return len(newest_first)


def _common_lengths(items: Sequence[int]) -> list[int]:
    """Return for every offset d the length of the common prefix of `items` and `items[d:]` (Gusfield's Z algorithm)."""
    n = len(items)
    lengths = [n] + [0] * (n - 1)
    start = end = 0  # items[start:end] equals items[:end - start]; `end` is the largest found so far
    for d in range(1, n):
        common = min(lengths[d - start], end - d) if d < end else 0
        while d + common < n and items[common] == items[d + common]:
            common += 1
        lengths[d] = common
        if d + common > end:
            start, end = d, d + common
    return lengths


def find_dry_breakers(
    strings: Iterable[str], pieces: Iterable[bytes], tokenize: Callable[[str], Sequence[int]]
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return all token sequences that spell one of `strings`, as a `Breakers` map.

    `pieces` are the bytes of token 0, 1, ...; `tokenize` returns the ids of a text without BOS and special tokens. The
    search takes a few tenths of a second for 128,000 tokens, regardless of the number of `strings`.
    """
    wanted = frozenset(text.encode() for text in strings)
    sizes = {len(text) for text in wanted}
    longest = max(sizes, default=0)
    starts: dict[bytes, list[bytes]] = {}  # prefix -> the breakers that start with it
    for text in wanted:
        for n in range(1, len(text)):
            starts.setdefault(text[:n], []).append(text)
    spell = cache(lambda rest: tuple(tokenize(rest.decode(errors="replace"))))

    @cache  # the longest suffix of a piece determines all shorter suffixes
    def followers(inside: frozenset[bytes], end: bytes) -> tuple[tuple[int, ...], ...]:
        ends = [tail for n in range(1, len(end) + 1) if (tail := end[-n:]) in starts]
        rests = [text[len(tail) :] for tail in ends for text in starts[tail] if text not in inside]
        return tuple(dict.fromkeys([*([()] if inside else []), *map(spell, rests)]))

    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    for token, piece in enumerate(pieces):
        parts = (piece[at : at + size] for size in sizes for at in range(len(piece) - size + 1))
        inside = wanted.intersection(parts)
        end = next((piece[-n:] for n in range(min(len(piece), longest), 0, -1) if piece[-n:] in starts), b"")
        if (inside or end) and (tails := followers(inside, end)):
            found[token] = tails
    return found


class DryBreakers:
    """Finds sequence breakers in a vocabulary, and caches the most recent sets. Thread-safe."""

    def __init__(self, pieces: Callable[[], Sequence[bytes]], tokenize: Callable[[str], Sequence[int]]) -> None:
        """`pieces` returns the bytes of all tokens; it is called once, on first use."""
        self._read, self._tokenize = pieces, tokenize
        self._lock, self._searching = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[frozenset[str], Breakers] = OrderedDict()

    @cached_property
    def _pieces(self) -> Sequence[bytes]:
        return self._read()

    def known(self, strings: Iterable[str]) -> Breakers | None:
        """Return the breakers of `strings` if they are cached. Never blocks on a search."""
        wanted = frozenset(strings)
        with self._lock:
            if wanted in self._kept:
                self._kept.move_to_end(wanted)
            return self._kept.get(wanted)

    def find(self, strings: Iterable[str]) -> Breakers:
        """Return the breakers of `strings`. Searching a large vocabulary takes up to a second."""
        wanted = frozenset(strings)
        with self._searching:  # another thread with the same strings waits for the result
            found = self.known(wanted)
            if found is None:
                found = find_dry_breakers(wanted, self._pieces, self._tokenize)
                with self._lock:
                    self._kept[wanted] = found
                    while len(self._kept) > _KEPT:
                        self._kept.popitem(last=False)
            return found
