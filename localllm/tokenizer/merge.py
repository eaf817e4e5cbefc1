"""The merge loop of BPE and SentencePiece: merge the best-ranked adjacent pair until no pair can be merged.

The two algorithms differ only in `rank`. On ties, the leftmost pair is merged first. Short words are scanned. Long ones
(text without word boundaries, such as adversarial input or Chinese, and vocabularies that merge whole lines) use a
priority queue: O(n log n).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

NEVER = float("inf")  # rank of a pair that must not be merged
Rank = Callable[[str, str], float]

_SCAN = 48  # maximum number of symbols for which scanning is faster than the queue (measured)


def merge(word: Iterable[str], rank: Rank) -> list[str]:
    """Merge `word`, a string or its symbols, lowest rank first. Return the pieces, whose concatenation is the word."""
    symbols = list(word)
    return _by_scan(symbols, rank) if len(symbols) <= _SCAN else _by_queue(symbols, rank)


def _by_scan(symbols: list[str], rank: Rank) -> list[str]:
    ranks = [rank(left, right) for left, right in pairwise(symbols)]  # ranks[i]: rank of symbols i and i + 1
    while ranks and (best := min(ranks)) != NEVER:
        i = ranks.index(best)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        del ranks[i]
        if i:
            ranks[i - 1] = rank(symbols[i - 1], symbols[i])
        if i < len(ranks):
            ranks[i] = rank(symbols[i], symbols[i + 1])
    return symbols


def _by_queue(symbols: list[str], rank: Rank) -> list[str]:
    count = len(symbols)
    after = list(range(1, count + 1))  # index of the next live symbol, or `count`
    before = list(range(-1, count - 1))
    ranks = [rank(left, right) for left, right in pairwise(symbols)]  # ranks[i]: symbol i and its successor
    ranks.append(NEVER)
    # All positions with the same rank are grouped, so that the heap orders a few ranks rather than many positions.
    # Positions mostly arrive in order and form a queue; the others go to a second heap. Outdated positions are skipped
    # when reached.
    places: dict[float, tuple[deque[int], list[int]]] = {}
    queue: list[float] = []

    def add(best: float, i: int) -> None:
        ranks[i] = best
        if best == NEVER:
            return
        if best not in places:
            places[best] = (deque(), [])
            heapq.heappush(queue, best)
        line, odd = places[best]
        if line and i < line[-1]:
            heapq.heappush(odd, i)
        else:
            line.append(i)

    for i, best in enumerate(ranks):
        add(best, i)
    while queue:
        best = queue[0]
        line, odd = places[best]
        if odd and (not line or odd[0] < line[0]):
            i = heapq.heappop(odd)
        elif line:
            i = line.popleft()
        else:
            del places[heapq.heappop(queue)]
            continue
        if ranks[i] != best:
            continue
        j = after[i]
        after[i] = k = after[j]
        symbols[i] = joined = symbols[i] + symbols[j]
        symbols[j], ranks[j] = "", NEVER
        if k < count:
            before[k] = i
            add(rank(joined, symbols[k]), i)
        else:
            ranks[i] = NEVER
        if (h := before[i]) >= 0:
            add(rank(symbols[h], joined), h)
    return [symbol for symbol in symbols if symbol]
