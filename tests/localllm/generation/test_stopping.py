"""The text before the first stop string is shown, no matter how the text is split into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.base.errors import LocalLLMError
from localllm.generation.text import StopStrings


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool, list[str]]:
    """Return the shown text, whether generation stopped, and the text shown after each piece."""
    watcher = StopStrings(stops)
    shown, stopped = [], False
    for piece in pieces:
        text, stopped = watcher.push(piece)
        shown.append(text)
    shown.append(watcher.finish())
    return "".join(shown), stopped, shown


def before_first_stop(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """Return the text before the first stop string, found character by character. If several end at the same
    place, the longest counts.
    """
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


letters = st.text("abé", max_size=30)
stops = st.lists(st.text("abé", min_size=1, max_size=5), max_size=4).map(tuple)


@settings(max_examples=400, deadline=None)
@given(stops, letters, st.lists(st.integers(0, 30)))
def test_any_cutting_shows_the_text_before_the_first_stop(stops: tuple[str, ...], text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    shown, stopped, _ = run(stops, pieces)
    assert (shown, stopped) == before_first_stop(stops, text)


@settings(max_examples=300, deadline=None)
@given(stops, letters)
def test_only_what_may_become_a_stop_is_held_back(stops: tuple[str, ...], text: str) -> None:
    watcher = StopStrings(stops)
    shown = ""
    for end, letter in enumerate(text, 1):
        piece, stopped = watcher.push(letter)
        shown += piece
        if stopped:
            return
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_one_example_in_full() -> None:
    assert run(("</s>", "User:"), ["Hi", "! <", "b> Us", "er", ": x"]) == (
        "Hi! <b> ",
        True,
        ["Hi", "! ", "<b> ", "", "", ""],
    )


def test_a_beginning_that_comes_to_nothing_is_shown_at_the_end() -> None:
    watcher = StopStrings(("stop",))
    assert watcher.push("do not sto") == ("do not ", False)
    assert watcher.finish() == "sto"
    assert watcher.finish() == ""


def test_nothing_is_shown_after_a_stop() -> None:
    watcher = StopStrings(("x",))
    assert watcher.push("axb") == ("a", True)
    assert watcher.push("c") == ("", True)
    assert watcher.finish() == ""


def test_without_stops_all_is_shown_at_once() -> None:
    assert run((), ["a", "b"]) == ("ab", False, ["a", "b", ""])


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(LocalLLMError, match="stop string is empty"):
        StopStrings(("\n", ""))
