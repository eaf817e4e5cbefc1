"""A conversation: what it evaluates, what it keeps, and what it shows when tokens, characters and stops cross."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.backends.base import BackendError
from localllm.cache import CacheFull
from localllm.engine import ContextFull
from localllm.plan import BLOCK
from tests.localllm.support import SPECIAL, write_model

SPACE = len(SPECIAL) + 256  # the tokens are: control tokens, all bytes, the space, printable ASCII from "!" on


def byte(value: int) -> int:
    return len(SPECIAL) + value


def letters(text: str) -> list[int]:
    return [SPACE if c == " " else SPACE + ord(c) - 32 for c in text]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localllm.Model]:
    """Four blocks of context."""
    with localllm.load(write_model(tmp_path_factory.mktemp("m") / "m.gguf", context=4 * BLOCK), threads=2) as opened:
        yield opened


@pytest.fixture
def session(model: localllm.Model) -> Iterator[localllm.Session]:
    opened = model.session()
    yield opened
    opened.close()
    assert model.pool.free_blocks == model.pool.blocks


class Script:
    """A sampler that says what it is told to, so that a test chooses the tokens of an answer."""

    looks_at = 0

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.accepted: list[int] = []

    def sample(self, logits: np.ndarray) -> int:
        return self.tokens.pop(0)

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    write = accept
    finished = False

    def constrain(self, constraint: object, ends: Collection[int], ignore_eos: bool) -> None:
        assert constraint is None
        self.ends = () if ignore_eos else ends

    def is_end(self, token: int) -> bool:
        return token in self.ends


def say(session: localllm.Session, tokens: Sequence[int], prompt: Sequence[int] = (1, 70), **options: Any) -> list[Any]:
    return list(session.generate(list(prompt), Script(tokens), **options))  # type: ignore[arg-type]


def texts(pieces: list[Any]) -> list[str]:
    return [piece.text for piece in pieces]


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_half_a_character_is_never_shown(session: localllm.Session) -> None:
    euro = [byte(b) for b in "€".encode()]
    pieces = say(session, [*letters("a"), *euro, *letters("b")], max_tokens=5)
    assert texts(pieces) == ["a", "", "", "€", "b", ""]


def test_a_character_that_stays_half_ends_as_a_replacement(session: localllm.Session) -> None:
    pieces = say(session, [*letters("a"), byte(0xE2), byte(0x82)], max_tokens=3)
    assert texts(pieces) == ["a", "", "", "\ufffd"]


def test_a_stop_that_comes_in_pieces(session: localllm.Session) -> None:
    """Held back while it may become one, shown when it does not, and its rest never shown."""
    pieces = say(session, letters("abENoEND!"), stop=("END", "zzz"))
    assert texts(pieces) == ["a", "b", "", "", "ENo", "", "", ""]
    assert pieces[-1].statistics.reason == "stop"
    assert pieces[-1].statistics.answer_tokens == 8  # the one that completes the stop is part of the answer


def test_what_was_held_back_is_shown_at_the_end(session: localllm.Session) -> None:
    assert texts(say(session, letters("abEN"), stop=("END",), max_tokens=4)) == ["a", "b", "", "", "EN"]
    pieces = say(session, [*letters("EN"), 4], stop=("END",))  # 4 ends the generation
    assert (texts(pieces), pieces[-1].statistics.reason) == (["", "", "EN"], "end")


def test_ends_can_be_ignored(session: localllm.Session) -> None:
    pieces = say(session, [4, 4, 70], max_tokens=3, ignore_eos=True)
    assert [piece.token for piece in pieces] == [4, 4, 70, None]


def test_the_sampler_hears_of_prompt_and_answer(session: localllm.Session) -> None:
    script = Script([100, 101, 4])
    list(session.generate([1, 70, 71], script))  # type: ignore[arg-type]
    assert script.accepted == [1, 70, 71, 100, 101]


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_the_next_turn_evaluates_only_what_is_new(session: localllm.Session) -> None:
    first = say(session, [80, 81, 82], prompt=range(10, 60), max_tokens=3)
    assert first[-1].statistics.reused_tokens == 0
    assert session.tokens == [*range(10, 60), 80, 81]  # the last token has not been needed yet
    longer = [*range(10, 60), 80, 81, 82, 90, 91]
    second = say(session, [83], prompt=longer, max_tokens=1)
    assert second[-1].statistics.reused_tokens == 52
    assert second[-1].statistics.prompt_tokens == 55


def test_another_turn_from_the_middle(session: localllm.Session) -> None:
    say(session, [80], prompt=range(10, 60), max_tokens=1)
    edited = [*range(10, 40), 7, 7]
    assert say(session, [80], prompt=edited, max_tokens=1)[-1].statistics.reused_tokens == 30
    assert session.tokens == edited


def test_the_same_prompt_again_still_evaluates_its_last_token(session: localllm.Session) -> None:
    say(session, [80], prompt=range(10, 60), max_tokens=1)
    assert say(session, [80], prompt=range(10, 60), max_tokens=1)[-1].statistics.reused_tokens == 49


def test_reuse_does_not_show_in_the_logits(model: localllm.Model, session: localllm.Session) -> None:
    ids = [1, *range(60, 250)]
    truth = model.logits(ids)
    session.evaluate(ids[:100], logits=False)
    session.evaluate([5] * 30, logits=False)
    session.rewind(90)
    assert (session.evaluate(ids[90:], logits=True) == truth[90:]).all()
    session.rewind(BLOCK)
    assert (session.evaluate(ids[BLOCK:], logits=False) == truth[-1:]).all()


def test_an_answer_that_is_not_read_on(model: localllm.Model, session: localllm.Session) -> None:
    """The session goes on from what it holds."""
    answer = session.generate([1, 70, 71], Script([80, 81, 82]))  # type: ignore[arg-type]
    assert [next(answer).token, next(answer).token] == [80, 81]
    answer.close()  # type: ignore[attr-defined]
    assert session.tokens == [1, 70, 71, 80]
    truth = model.logits([1, 70, 71, 80, 81])[-1]
    assert (session.evaluate([81], logits=True)[-1] == truth).all()


# -- what does not fit -----------------------------------------------------------------------------------------------


def test_what_cannot_be_evaluated_is_not_kept(session: localllm.Session) -> None:
    session.evaluate([1, 2, 3], logits=False)
    with pytest.raises(BackendError, match="tokens must be"):
        session.evaluate([4, 10_000], logits=False)
    assert session.tokens == [1, 2, 3]
    with pytest.raises(ContextFull, match="3 are held and 254 more do not fit"):
        session.evaluate([5] * 254, logits=False)
    assert session.tokens == [1, 2, 3]
    assert session.evaluate([5] * 253, logits=True).shape[0] == 253


def test_a_long_prompt_goes_in_batches_and_can_be_cancelled_between(
    model: localllm.Model, session: localllm.Session
) -> None:
    class After:
        """Set from the third time that it is asked on."""

        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 2

    before, session.batch_rows = session.batch_rows, 16
    try:
        pieces = say(session, [80], prompt=range(5, 105), cancel=After())
        assert [piece.token for piece in pieces] == [None]
        assert pieces[-1].statistics.reason == "cancelled"
        assert session.tokens == list(range(5, 37))  # two batches of sixteen
        again = say(session, [80], prompt=range(5, 105), max_tokens=1)
        assert again[-1].statistics.reused_tokens == 32
    finally:
        session.batch_rows = before


def test_several_conversations_share_the_cache_until_it_is_full(model: localllm.Model) -> None:
    one, two = model.session(), model.session()
    one.evaluate([1] * 3 * BLOCK, logits=False)
    two.evaluate([2] * 2 * BLOCK, logits=False)
    with pytest.raises(CacheFull, match="the context is full: 1 more tokens do not fit"):
        two.evaluate([3], logits=False)
    assert len(two.tokens) == 2 * BLOCK
    one.close()
    two.evaluate([3], logits=False)
    two.close()
    assert model.pool.free_blocks == model.pool.blocks


def test_conversations_do_not_hear_each_other(model: localllm.Model, tmp_path: Path) -> None:
    """Two, in turn, a token at a time: each as if alone."""
    a, b = [1, *letters("one two three")], [1, *letters("vier fünf sechs".replace("ü", "u"))]
    truth = [model.logits(a), model.logits(b)]
    sessions = [model.session(), model.session()]
    for at in range(len(a)):
        for session, ids, logits in zip(sessions, (a, b), truth, strict=True):
            assert (session.evaluate(ids[at : at + 1], logits=True)[0] == logits[at]).all()
    for session in sessions:
        session.close()
