"""Repetition in the text so far: counts for the penalties, and repeated phrases for DRY.

DRY follows github.com/oobabooga/text-generation-webui/pull/5677; sequence breakers are as in llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

# First token of a sequence breaker -> what must follow it. A token that contains a whole breaker needs nothing: ().
Breakers = Mapping[int, tuple[tuple[int, ...], ...]]


def window_counts(history: Sequence[int], last: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The distinct tokens (n,) among the last `last` of `history`, and the count of each (n,)."""
    counts = Counter(history[-last:])
    return np.fromiter(counts, np.int32, len(counts)), np.fromiter(counts.values(), np.int64, len(counts))


def continuations(history: Sequence[int], last: int, allowed: int, breakers: Breakers) -> dict[int, int]:
    """Tokens that would continue a repetition -> its length so far in tokens, at least `allowed`.

    A repetition means that the newest tokens also occur earlier in the window of `last` tokens; the token after the
    earlier place continues it. No repetition crosses a sequence breaker, and a breaker is never a continuation.
    """
    newest_first = history[-last:][::-1]
    reach = _reach(newest_first, breakers)
    if len(newest_first) <= allowed or reach < allowed:
        return {}
    longest: dict[int, int] = {}
    for distance, common in enumerate(_common_lengths(newest_first)):
        length = min(common, reach)
        if distance and length >= allowed:
            token = newest_first[distance - 1]
            if () not in breakers.get(token, ()):
                longest[token] = max(length, longest.get(token, 0))
    return longest


def _reach(newest_first: Sequence[int], breakers: Breakers) -> int:
    """Number of newest tokens after the last sequence breaker."""
    for age, token in enumerate(newest_first):
        ends = [
            age - len(tail)
            for tail in breakers.get(token, ())
            if len(tail) <= age and all(newest_first[age - 1 - i] == wanted for i, wanted in enumerate(tail))
        ]
        if ends:
            return min(ends)
    return len(newest_first)


def _common_lengths(items: Sequence[int]) -> list[int]:
    """For every d: the number of leading items equal to those from d on. Linear time (Gusfield's Z algorithm)."""
    n = len(items)
    lengths = [n] + [0] * (n - 1)
    start = end = 0  # items[start:end] equals items[:end - start], with the largest `end` so far
    for d in range(1, n):
        common = min(lengths[d - start], end - d) if d < end else 0
        while d + common < n and items[common] == items[d + common]:
            common += 1
        lengths[d] = common
        if d + common > end:
            start, end = d, d + common
    return lengths


def find_breakers(
    strings: Iterable[str], pieces: Iterable[bytes], tokenize: Callable[[str], Sequence[int]]
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Every way in which tokens can spell one of `strings`, as a `Breakers`.

    `pieces` are the bytes of token 0, 1, ...; `tokenize` returns the ids of a text without BOS and special tokens.
    Takes some tenths of a second for 128,000 tokens.
    """
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    wanted = [text.encode() for text in strings]
    tails: dict[bytes, tuple[int, ...]] = {b"": ()}  # the rest of a breaker -> its tokens
    for token, piece in enumerate(pieces):
        rests = [rest for text in wanted for rest in _rests(text, piece)]
        for rest in rests:
            if rest not in tails:
                tails[rest] = tuple(tokenize(rest.decode(errors="replace")))
        if rests:
            found[token] = tuple(dict.fromkeys(tails[rest] for rest in rests))
    return found


def _rests(text: bytes, piece: bytes) -> list[bytes]:
    """What must follow `piece` to complete `text`: nothing if `piece` contains it, else for every end of `piece` that
    begins `text`."""
    if text in piece:
        return [b""]
    return [text[n:] for n in range(1, min(len(text), len(piece) + 1)) if piece.endswith(text[:n])]
