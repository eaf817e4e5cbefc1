"""Answers: the tokens that are evaluated and left in the KV cache, and the text if tokens, characters and
stop strings overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.backends.base import BackendError
from localllm.engine import CacheFull, ContextFull
from localllm.engine.session import Session
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Finished, Request
from localllm.options import SamplingOptions
from localllm.plan import BLOCK
from localllm.reply import pieces_of
from tests.localllm.support import SPECIAL, write_model

# Token id of the space. The vocabulary has special tokens, all bytes, the space, and printable ASCII from "!" on.
SPACE = len(SPECIAL) + 256


def byte(value: int) -> int:
    return len(SPECIAL) + value


def letters(text: str) -> list[int]:
    return [SPACE if c == " " else SPACE + ord(c) - 32 for c in text]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localllm.Model]:
    """Provide a model with a context of four KV cache blocks."""
    with localllm.load(write_model(tmp_path_factory.mktemp("m") / "m.gguf", context=4 * BLOCK), threads=2) as opened:
        yield opened


@pytest.fixture
def session(model: localllm.Model) -> Iterator[Session]:
    """Provide a sequence, with an otherwise empty KV cache."""
    model.new_core(SchedulerLimits())
    opened = Session(model.engine)
    yield opened
    opened.close()
    model.new_core(SchedulerLimits())
    assert model.pool.free_blocks == model.pool.blocks


class Script:
    """A sampler that returns scripted tokens."""

    required_top_k = 0

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


def say(
    model: localllm.Model,
    tokens: Sequence[int],
    prompt: Sequence[int] = (1, 70),
    cancel: Any = None,
    max_tokens: int | None = None,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
) -> list[localllm.Piece]:
    request = Request(list(prompt), SamplingOptions(), max_tokens, stop, ignore_eos)
    return list(pieces_of(model.stepper.stream(request, cancel, sampler=Script(tokens))))  # type: ignore[arg-type]


def end_of(pieces: list[localllm.Piece]) -> Finished:
    assert pieces[-1].finished is not None
    return pieces[-1].finished


def texts(pieces: list[localllm.Piece]) -> list[str]:
    return [piece.text for piece in pieces]


def cached(model: localllm.Model) -> list[list[int]]:
    """Return the cached sequences, the newest first."""
    return [list(sequence.tokens) for sequence in reversed(list(model.stepper.core.running.prefixes))]


@pytest.fixture
def fresh(model: localllm.Model) -> localllm.Model:
    """Provide the model with an empty KV cache."""
    model.new_core(SchedulerLimits())
    return model


# -- shown text
# ---------------------------------------------------------------------------------------------------------


def test_half_a_character_is_never_shown(fresh: localllm.Model) -> None:
    euro = [byte(b) for b in "€".encode()]
    pieces = say(fresh, [*letters("a"), *euro, *letters("b")], max_tokens=5)
    assert texts(pieces) == ["a", "", "", "€", "b", ""]


def test_a_character_that_stays_half_ends_as_a_replacement(fresh: localllm.Model) -> None:
    pieces = say(fresh, [*letters("a"), byte(0xE2), byte(0x82)], max_tokens=3)
    assert texts(pieces) == ["a", "", "", "\ufffd"]


def test_a_stop_that_comes_in_pieces(fresh: localllm.Model) -> None:
    """The possible start of a stop string is held back. That text is shown if the stop string does not
    follow. A complete stop
    string is never shown.
    """
    pieces = say(fresh, letters("abENoEND!"), stop=("END", "zzz"))
    assert texts(pieces) == ["a", "b", "", "", "ENo", "", "", ""]
    assert end_of(pieces).reason == "stop"
    assert end_of(pieces).usage.answer_tokens == 8  # includes the token that completes the stop


def test_what_was_held_back_is_shown_at_the_end(fresh: localllm.Model) -> None:
    assert texts(say(fresh, letters("abEN"), stop=("END",), max_tokens=4)) == ["a", "b", "", "", "EN"]
    pieces = say(fresh, [*letters("EN"), 4], stop=("END",))  # token 4 ends the generation
    assert (texts(pieces), end_of(pieces).reason) == (["", "", "EN"], "end")


def test_ends_can_be_ignored(fresh: localllm.Model) -> None:
    pieces = say(fresh, [4, 4, 70], max_tokens=3, ignore_eos=True)
    assert [piece.token for piece in pieces] == [4, 4, 70, None]


def test_the_sampler_hears_of_prompt_and_answer(fresh: localllm.Model) -> None:
    script = Script([100, 101, 4])
    list(fresh.stepper.stream(Request([1, 70, 71], SamplingOptions()), sampler=script))  # type: ignore[arg-type]
    assert script.accepted == [1, 70, 71, 100, 101]


# -- cached tokens
# ------------------------------------------------------------------------------------------------------


def test_the_next_turn_evaluates_only_what_is_new(fresh: localllm.Model) -> None:
    first = say(fresh, [80, 81, 82], prompt=range(10, 60), max_tokens=3)
    assert end_of(first).usage.reused_tokens == 0
    assert end_of(first).cached_tokens == 52  # the last token has not been evaluated yet
    assert cached(fresh) == [[*range(10, 60), 80, 81]]
    longer = [*range(10, 60), 80, 81, 82, 90, 91]
    second = end_of(say(fresh, [83], prompt=longer, max_tokens=1)).usage
    assert (second.reused_tokens, second.prompt_tokens) == (52, 55)


def test_another_turn_from_the_middle(fresh: localllm.Model) -> None:
    say(fresh, [80], prompt=range(10, 60), max_tokens=1)
    edited = [*range(10, 40), 7, 7]
    assert end_of(say(fresh, [80], prompt=edited, max_tokens=1)).usage.reused_tokens == 30
    assert cached(fresh)[0] == edited


def test_the_same_prompt_again_still_evaluates_its_last_token(fresh: localllm.Model) -> None:
    say(fresh, [80], prompt=range(10, 60), max_tokens=1)
    assert end_of(say(fresh, [80], prompt=range(10, 60), max_tokens=1)).usage.reused_tokens == 49


def test_reuse_does_not_show_in_the_logits(model: localllm.Model, session: Session) -> None:
    ids = [1, *range(60, 250)]
    truth = model.logits(ids)
    session.evaluate(ids[:100], logits=False)
    session.evaluate([5] * 30, logits=False)
    session.rewind(90)
    assert (session.evaluate(ids[90:], logits=True) == truth[90:]).all()
    session.rewind(BLOCK)
    assert (session.evaluate(ids[BLOCK:], logits=False) == truth[-1:]).all()


def test_an_answer_that_is_not_read_on(fresh: localllm.Model) -> None:
    """If a reader abandons an answer, later answers reuse the tokens that were evaluated."""
    request = Request([1, 70, 71], SamplingOptions())
    answer = fresh.stepper.stream(request, sampler=Script([*range(80, 96)]))  # type: ignore[arg-type]
    pieces = pieces_of(answer)
    assert [next(pieces).token, next(pieces).token] == [80, 81]
    answer.close()
    assert cached(fresh) == [[1, 70, 71, 80]]
    truth = fresh.logits([1, 70, 71, 80, 81])[-1]
    reply = fresh.generate([1, 70, 71, 80, 81], max_tokens=1, temperature=0, ignore_eos=True)
    assert reply.tokens == [int(truth.argmax())]
    assert reply.usage.reused_tokens == 4


# -- requests that do not fit
# -------------------------------------------------------------------------------------------


def test_what_cannot_be_evaluated_is_not_kept(session: Session) -> None:
    session.evaluate([1, 2, 3], logits=False)
    with pytest.raises(BackendError, match="tokens must be"):
        session.evaluate([4, 10_000], logits=False)
    assert session.tokens == [1, 2, 3]
    with pytest.raises(ContextFull, match="3 are in use and 254 more do not fit"):
        session.evaluate([5] * 254, logits=False)
    assert session.tokens == [1, 2, 3]
    assert session.evaluate([5] * 253, logits=True).shape[0] == 253


def test_a_long_prompt_goes_in_batches_and_can_be_cancelled_between(model: localllm.Model) -> None:
    class After:
        """A cancel event that is set from the third check on."""

        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 2

    whole = model.engine.limits
    model.engine.limits = replace(whole, rows=16)
    model.new_core(SchedulerLimits())
    try:
        pieces = say(model, [80], prompt=range(5, 105), cancel=After())
        assert [piece.token for piece in pieces] == [None]
        assert end_of(pieces).reason == "cancelled"
        assert cached(model) == [list(range(5, 37))]  # two batches of sixteen
        again = say(model, [80], prompt=range(5, 105), max_tokens=1)
        assert end_of(again).usage.reused_tokens == 32
    finally:
        model.engine.limits = whole
        model.new_core(SchedulerLimits())


def test_several_conversations_share_the_cache_until_it_is_full(model: localllm.Model) -> None:
    model.new_core(SchedulerLimits())
    one, two = Session(model.engine), Session(model.engine)
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
    """Two conversations, interleaved token by token, have the same answers as separate conversations."""
    a, b = [1, *letters("one two three")], [1, *letters("vier fünf sechs".replace("ü", "u"))]
    truth = [model.logits(a), model.logits(b)]
    sessions = [Session(model.engine), Session(model.engine)]
    for at in range(len(a)):
        for session, ids, logits in zip(sessions, (a, b), truth, strict=True):
            assert (session.evaluate(ids[at : at + 1], logits=True)[0] == logits[at]).all()
    for session in sessions:
        session.close()
