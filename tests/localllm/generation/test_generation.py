"""The pieces of an answer, each alone: reading a prompt, plain decoding, text with stops, times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import localllm
from localllm.backends.base import Largest
from localllm.engine import largest_of
from localllm.generation import statistics
from localllm.generation.decoding import PlainDecoding
from localllm.generation.prompt import prefill
from localllm.generation.statistics import Meter, Speculated
from localllm.generation.text import AnswerText
from localllm.options import SamplingOptions
from localllm.sampling.sampler import Sampler
from tests.localllm.speculation.support import Clock
from tests.localllm.support import SPECIAL, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localllm.Model]:
    with localllm.load(write_model(tmp_path_factory.mktemp("m") / "m.gguf", context=128), threads=1) as opened:
        yield opened


@pytest.fixture
def session(model: localllm.Model) -> Iterator[localllm.Session]:
    opened = model.session()
    yield opened
    opened.close()


# -- the prompt ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_prompt_in_batches_gives_the_logits_of_its_last_token(
    model: localllm.Model, session: localllm.Session, rows: int
) -> None:
    ids = list(range(260, 290))
    truth = model.logits(ids)
    np.testing.assert_array_equal(prefill(session, ids, rows, lambda: False), truth[-1:])
    assert session.tokens == ids


def test_a_prompt_that_is_cancelled_keeps_what_was_read(session: localllm.Session) -> None:
    answers = iter([False, False, True])
    assert prefill(session, list(range(260, 290)), 8, lambda: next(answers)) is None
    assert session.tokens == list(range(260, 276))


# -- decoding ---------------------------------------------------------------------------------------------------------


class Device:
    """A session whose device finds up to `most_picked` of the largest logits; hears what it is asked for."""

    room = 100

    def __init__(self, rows: np.ndarray, most_picked: int) -> None:
        self.rows, self.most_picked, self.length = rows, most_picked, 1
        self.asked: list[int] = []

    def evaluate(self, tokens: Sequence[int], logits: bool) -> np.ndarray:
        return self._next(0)

    def evaluate_largest(self, tokens: Sequence[int], count: int) -> Largest:
        return largest_of(self._next(count), count)

    def rewind(self, length: int) -> int:
        raise AssertionError("plain decoding takes nothing back")

    def _next(self, asked: int) -> np.ndarray:
        self.asked.append(asked)
        self.length += 1
        return self.rows[self.length - 1 : self.length]


@pytest.mark.parametrize("options", [SamplingOptions(temperature=0), SamplingOptions(top_k=5, seed=3)])
@pytest.mark.parametrize("most_picked", [0, 3, 256])
def test_the_tokens_are_the_same_however_few_logits_leave_the_device(
    options: SamplingOptions, most_picked: int
) -> None:
    rows = np.random.RandomState(2).standard_normal((9, 400)).astype(np.float32)
    truth = Sampler(options)
    device, sampler = Device(rows, most_picked), Sampler(options)
    decoding = PlainDecoding(device, sampler)
    decoding.start(rows[:1])
    for row in rows:
        token = decoding.sample()
        assert token == truth.sample(row)
        sampler.accept(token)
        truth.accept(token)
        if device.length < len(rows):
            decoding.feed(token, 1)
    few = sampler.looks_at if 0 < sampler.looks_at <= most_picked else 0
    assert device.asked == [few] * 8
    assert (decoding.passes, decoding.held, decoding.speculated()) == (8, 9, None)


def test_whoever_watches_gets_all_logits() -> None:
    rows = np.random.RandomState(2).standard_normal((3, 400)).astype(np.float32)
    device, sampler = Device(rows, 256), Sampler(SamplingOptions(top_k=5, seed=3))
    decoding = PlainDecoding(device, sampler, whole=True)
    decoding.start(rows[:1])
    decoding.feed(decoding.sample(), 1)
    assert device.asked == [0]
    assert (decoding.deciding().logits == rows[1]).all()
    assert decoding.deciding()[1:] == (None, False, "")


# -- text ------------------------------------------------------------------------------------------------------------


def bytes_of(text: str) -> list[int]:
    return [len(SPECIAL) + byte for byte in text.encode()]


def shown(text: AnswerText, tokens: list[int]) -> list[str]:
    return [*(text.push(token) for token in tokens), text.finish()]


def test_text_comes_as_whole_characters(model: localllm.Model) -> None:
    assert shown(AnswerText(model.tokenizer), bytes_of("a€b")) == ["a", "", "", "€", "b", ""]
    assert shown(AnswerText(model.tokenizer), bytes_of("€")[:2]) == ["", "", "\ufffd"]


def test_text_ends_before_a_stop_string(model: localllm.Model) -> None:
    text = AnswerText(model.tokenizer, ("END",))
    assert [text.push(token) for token in bytes_of("xENoEN")] == ["x", "", "", "ENo", "", ""]
    assert not text.stopped
    assert text.push(bytes_of("D")[0]) == ""
    assert text.stopped
    assert text.finish() == ""


def test_what_was_held_back_comes_at_the_end(model: localllm.Model) -> None:
    assert shown(AnswerText(model.tokenizer, ("END",)), bytes_of("xEN")) == ["x", "", "", "EN"]


def test_a_stop_string_that_the_last_half_character_completes(model: localllm.Model) -> None:
    text = AnswerText(model.tokenizer, ("N\ufffd",))
    assert shown(text, [*bytes_of("xN"), bytes_of("€")[0]]) == ["x", "", "", ""]
    assert text.stopped


@pytest.mark.parametrize(("resumed", "first"), [(False, "a"), (True, " a")])
def test_the_first_space_belongs_to_a_text_that_goes_on(model: localllm.Model, resumed: bool, first: str) -> None:
    ids = model.tokenize(" a", add_special=False)[-2:]
    assert "".join(shown(AnswerText(model.tokenizer, resumed=resumed), ids)) == first


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert shown(AnswerText(None, ("a",)), [1, 2]) == ["", "", ""]


# -- statistics ------------------------------------------------------------------------------------------------------


def test_a_meter_times_the_prompt_the_first_token_and_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(statistics, "perf_counter", clock)
    meter = Meter(30, reused_tokens=20, _began=10.0)
    clock.now = 12.0
    meter.prompt_read()
    for now in (12.5, 13.0):
        clock.now = now
        meter.sampled()
    for seconds in (0.25, 0.5):
        since, clock.now = clock.now, clock.now + seconds
        meter.decoded(since)
    meter.answer_tokens = 2
    found = meter.finish("length", 1000, 2, Speculated(3, 2, 1, 1.5))
    assert (found.prompt_seconds, found.prompt_rate) == (2.0, 5.0)
    assert found.first_token_seconds == 2.5
    assert (found.decode_seconds, found.decode_steps, found.decode_rate) == (0.75, 2, 2 / 0.75)
    assert (found.reason, found.bandwidth, found.speedup) == ("length", 2000 / 0.75, 2.0)
