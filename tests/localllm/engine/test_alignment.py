"""Cached tokens are reused if a new prompt has the same text in other tokens. The reused part is as long as
possible.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.alignment import align_tokens

PIECES = [b"<end>", b"", b"a", b"b", b"ab", b"ba", b"abb", b"\xe2", b"\x82\xac", b"\xe2\x82\xac"]
SPECIAL = frozenset({0})


def text(tokens: list[int]) -> list[object]:
    """Return the bytes of the tokens, with special tokens kept separate."""
    parts: list[object] = [b""]
    for token in tokens:
        if token in SPECIAL:
            parts += [token, b""]
        else:
            last = parts[-1]
            assert isinstance(last, bytes)
            parts[-1] = last + PIECES[token]
    return parts


def keep(held: list[int], fresh: list[int]) -> list[int]:
    return align_tokens(held, fresh, PIECES.__getitem__, SPECIAL)


def test_an_answer_that_was_written_in_other_tokens_is_kept() -> None:
    assert keep([2, 3, 3, 2], [6, 2, 0, 2]) == [2, 3, 3, 2, 0, 2]  # "abba": the tokenizer would use the token "abb"
    assert keep([4, 3], [6, 0]) == [4, 3, 0]
    assert keep([6], [2, 3, 3, 0]) == [6, 0]
    assert keep([6, 0, 4, 5], [2, 3, 3, 0, 2, 3, 5, 0]) == [6, 0, 4, 5, 0]
    assert keep([7, 8, 2], [9, 2, 0]) == [7, 8, 2, 0]  # tokens 7 and 8 are the bytes of one character


def test_what_was_cut_off_the_end_goes_and_the_rest_stays() -> None:
    assert keep([2, 4, 3], [2, 4, 0, 2]) == [2, 4, 0, 2]
    assert keep([2, 3, 4], [2, 3, 0]) == [2, 3, 0]
    assert keep([4, 6], [4, 2, 0]) == [4, 2, 0]  # a match must not end within a token


def test_a_special_token_is_not_its_text() -> None:
    assert align_tokens([2, 0, 3], [2, 1, 3], [b"<e>", b"<e>", b"a", b"b"].__getitem__, {0}) == [2, 1, 3]
    assert align_tokens([2, 1, 3], [2, 0, 3], [b"<e>", b"<e>", b"a", b"b"].__getitem__, {0}) == [2, 0, 3]


def test_a_token_without_text_is_not_kept() -> None:
    assert keep([2, 1, 3], [2, 3]) == [2, 3]


def test_another_beginning_keeps_nothing() -> None:
    assert keep([3, 2], [2, 2]) == [2, 2]
    assert keep([], [2]) == [2]
    assert keep([2], []) == []


@given(st.lists(st.sampled_from([0, *range(2, 10)])), st.lists(st.sampled_from([0, *range(2, 10)])))
def test_the_text_is_never_changed(held: list[int], fresh: list[int]) -> None:
    found = keep(held, fresh)
    assert text(found) == text(fresh)
    kept = next((n for n, (a, b) in enumerate(zip(found, held, strict=False)) if a != b), min(len(found), len(held)))
    plain = next((n for n, (a, b) in enumerate(zip(fresh, held, strict=False)) if a != b), min(len(fresh), len(held)))
    assert kept >= plain


@given(st.lists(st.integers(2, 9)), st.lists(st.integers(2, 9)))
def test_all_of_an_answer_in_other_tokens_is_kept(answer: list[int], more: list[int]) -> None:
    """`fresh` has the same bytes in single-byte tokens, as far as the vocabulary has them, and then continues."""
    single = {b"a": [2], b"b": [3], b"\xe2": [7]}
    joined = b"".join(PIECES[token] for token in answer)
    if b"\x82" in joined:
        return
    fresh = [token for n in range(len(joined)) for token in single[joined[n : n + 1]]]
    assert keep(answer, [*fresh, 0, *more]) == [*answer, 0, *more]
