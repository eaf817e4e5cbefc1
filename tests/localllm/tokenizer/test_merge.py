"""Both implementations of BPE merges give the results of the definition, and of a few merges done by hand."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.tokenizer.merge import _SCAN, NEVER, Rank, _by_queue, _by_scan, merge

RANKS = {("l", "o"): 0.0, ("o", "w"): 1.0, ("lo", "w"): 2.0, ("e", "r"): 3.0, ("low", "er"): 4.0}


def _table(ranks: dict[tuple[str, str], float]) -> Rank:
    return lambda left, right: ranks.get((left, right), NEVER)


def _by_definition(symbols: list[str], rank: Rank) -> list[str]:
    """Merge the leftmost pair of the best rank until none is left."""
    while len(symbols) > 1:
        best, i = min((rank(left, right), i) for i, (left, right) in enumerate(pairwise(symbols)))
        if best == NEVER:
            break
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]
    return symbols


@pytest.mark.parametrize(
    ("word", "pieces"),
    [
        ("lower", ["lower"]),
        ("slow", ["s", "low"]),
        ("lolow", ["lo", "low"]),
        ("ower", ["ow", "er"]),
        ("l", ["l"]),
        ("", []),
    ],
)
def test_by_hand(word: str, pieces: list[str]) -> None:
    assert merge(word, _table(RANKS)) == pieces


def test_among_equals_the_leftmost_goes_first() -> None:
    assert merge("aaa", _table({("a", "a"): 0.0})) == ["aa", "a"]
    assert merge("a" * (2 * _SCAN + 1), _table({("a", "a"): 0.0})) == ["aa"] * _SCAN + ["a"]


@settings(deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.text("ab", min_size=1, max_size=3), st.text("ab", min_size=1, max_size=3)),
        st.integers(0, 3).map(float),  # few ranks, so that ties and merges of better rank than their parts occur
        min_size=4,
        max_size=24,
    ),
    st.text("ab", min_size=4, max_size=24),
)
def test_short_and_long_words_follow_the_definition(ranks: dict[tuple[str, str], float], word: str) -> None:
    rank = _table(ranks)
    expected = _by_definition(list(word), rank)
    assert _by_scan(list(word), rank) == expected
    assert _by_queue(list(word), rank) == expected


@pytest.mark.parametrize("rank_of", [lambda size: float(size), lambda size: -float(size), lambda _: 0.0])
def test_time_grows_with_the_word_and_not_its_square(rank_of: object) -> None:
    """Merging takes linear time, even for 200,000 equal characters whose merge ranks rise, fall or stay
    constant with length.
    """
    assert callable(rank_of)
    start = time.process_time()
    pieces = merge("a" * 200_000, lambda left, right: rank_of(len(left + right)) if len(left + right) <= 16 else NEVER)
    assert sum(map(len, pieces)) == 200_000
    assert time.process_time() - start < 10


def test_a_thousand_random_tables_follow_the_definition() -> None:
    def piece(r: random.Random) -> str:
        return "".join(r.choices("ab", k=r.randrange(1, 4)))

    for seed in range(1000):
        r = random.Random(seed)
        rank = _table({(piece(r), piece(r)): float(r.randrange(4)) for _ in range(20)})
        word = r.choices("ab", k=r.randrange(4, 30))
        assert _by_scan(word[:], rank) == _by_queue(word[:], rank) == _by_definition(word, rank)
