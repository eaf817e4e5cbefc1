"""The parts of generation: prompt steps, top logits, text with stop strings, usage counts and times."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import localllm
from localllm.backends.base import TopK
from localllm.chat import Conversation, template_of
from localllm.engine import Engine, top_k_of
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Choosing, Prefilled, Request
from localllm.generation.statistics import Usage
from localllm.generation.text import AnswerText
from localllm.options import SamplingOptions
from localllm.sampling.sampler import Sampler
from tests.localllm.generation.speculation.support import Clock, Table, table_engine
from tests.localllm.generation.support import Stepped, Watched
from tests.localllm.support import SPECIAL, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localllm.Model]:
    with localllm.load(write_model(tmp_path_factory.mktemp("m") / "m.gguf", context=128), threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def demo() -> Iterator[localllm.Model]:
    with localllm.load("demo", threads=1, ctx_size=256) as opened:
        yield opened


# -- the prompt ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_prompt_in_steps_is_followed_by_the_token_of_its_last_logits(model: localllm.Model, rows: int) -> None:
    ids = list(range(260, 290))
    model.new_core(SchedulerLimits())
    engine = Watched(model.engine, rows=rows)
    with Stepped(engine) as it:
        _, answer = it.ask(Request(ids, SamplingOptions(temperature=0), 1, ignore_eos=True))
        it.finish()
    assert answer.tokens == [int(model.logits(ids)[-1].argmax())]
    parts = [part for [part] in engine.stepped]
    assert [token for part in parts for token in part.tokens] == ids
    assert [part.wanted for part in parts] == [*["none"] * (len(parts) - 1), "last"]
    told = [event.evaluated for event in answer.events if isinstance(event, Prefilled)]
    assert told == sorted(set(told))
    assert told[-1] == 30


def test_a_prompt_that_is_cancelled_keeps_what_was_read(model: localllm.Model) -> None:
    ids = list(range(260, 290))
    model.new_core(SchedulerLimits())
    with Stepped(Watched(model.engine, rows=8)) as it:
        one, answer = it.ask(Request(ids, SamplingOptions(temperature=0), 1))
        it.turn(2)
        one.ticket.cancel()
        it.turn()
        assert (answer.result().reason, answer.result().cached_tokens) == ("cancelled", 16)
        _, again = it.ask(Request(ids, SamplingOptions(temperature=0), 1))
        it.finish()
        assert again.reused > 0
        assert again.result().usage.prompt_tokens == 30


# -- the largest logits ----------------------------------------------------------------------------------------------


class Device(Table):
    """A device that returns up to `max_top_k` of the largest logits, and records how many each step requests."""

    def __init__(self, rows: np.ndarray, max_top_k: int) -> None:
        super().__init__(lambda text: rows[len(text) - 1], Clock(), lambda count: 1.0)
        self.max_top_k = max_top_k
        self.asked: list[int] = []

    def step(self, batch):  # type: ignore[no-untyped-def]
        self.asked.append(0)
        return super().step(batch)

    def step_top_k(self, batch, count: int):  # type: ignore[no-untyped-def]
        self.asked.append(count)
        return top_k_of(super().step(batch), count)

    def result_top_k(self, count: int) -> TopK:
        raise AssertionError("a plan in one place needs no stages")


def on(device: Device) -> Engine:
    plain = table_engine(lambda text: np.zeros(1, np.float32))
    return Engine(device, plain.pool, plain.limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [SamplingOptions(temperature=0), SamplingOptions(top_k=5, seed=3)])
@pytest.mark.parametrize("max_top_k", [0, 3, 256])
def test_the_tokens_are_the_same_however_few_logits_leave_the_device(options: SamplingOptions, max_top_k: int) -> None:
    rows = np.random.RandomState(2).standard_normal((9, 400)).astype(np.float32)
    truth, expected = Sampler(options), []
    truth.accept(1)
    for row in rows:
        expected.append(truth.sample(row))
        truth.write(expected[-1])
    device = Device(rows, max_top_k)
    with Stepped(on(device)) as it:
        _, answer = it.ask(Request([1], options, 9))
        it.finish()
    assert answer.tokens == expected
    few = Sampler(options).required_top_k
    assert device.asked == [few if 0 < few <= max_top_k else 0] * 9


class Looks:
    """An observer that records the logits from which tokens are sampled."""

    def __init__(self) -> None:
        self.seen: list[Choosing] = []

    def started(self, *_: object) -> None: ...

    def choosing(self) -> None: ...

    def chose(self, token: int, by: Choosing, sampler: Sampler) -> None:
        self.seen.append(by._replace(logits=by.logits.copy()))

    def ended(self, length: int) -> None: ...


def test_an_observer_gets_all_logits() -> None:
    rows = np.random.RandomState(2).standard_normal((3, 400)).astype(np.float32)
    device, looks = Device(rows, 256), Looks()
    with Stepped(on(device)) as it:
        it.ask(Request([1], SamplingOptions(top_k=5, seed=3), 3, observer=looks))
        it.finish()
    assert device.asked == [0, 0, 0]
    assert (np.stack([by.logits for by in looks.seen]) == rows).all()
    assert {by[1:] for by in looks.seen} == {(None, False, "")}


def test_largest_are_those_of_all() -> None:
    found = top_k_of(np.array([[1, 5, 3, 5]], np.float32), 3)
    assert isinstance(found, TopK)
    assert found.ids.tolist() == [[1, 3, 2]]


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


# -- usage -----------------------------------------------------------------------------------------------------------


def test_usage_times_the_prompt_the_first_token_and_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only forward passes advance the clock: the prompt takes 3 seconds, and each token 0.5 seconds."""
    clock = Clock()
    for module in ("generation.core", "generation.request_state"):
        monkeypatch.setattr(f"localllm.{module}.perf_counter", clock)
    clock.now = 10.0
    rows = np.eye(8, dtype=np.float32)
    engine = table_engine(lambda text: rows[len(text) % 8], clock, lambda rows: 3.0 if rows > 1 else 0.5)
    with Stepped(engine) as it:
        _, answer = it.ask(Request([1, 2, 3, 4, 5, 6], SamplingOptions(temperature=0), 5))
        clock.now = 12.0
        it.finish()
    usage = answer.result().usage
    assert (usage.prompt_tokens, usage.reused_tokens, usage.answer_tokens) == (6, 0, 5)
    assert (usage.queued_seconds, usage.prompt_seconds, usage.first_token_seconds) == (2.0, 3.0, 5.0)
    assert (usage.decode_seconds, usage.decode_steps, usage.decode_passes) == (2.0, 4, 4)
    assert (usage.prompt_rate, usage.decode_rate) == (2.0, 2.0)
    assert (usage.drafted, usage.speedup, usage.mean_accepted) == (0, 1.0, 0.0)


def test_rates_of_usage() -> None:
    usage = Usage(
        prompt_tokens=30, reused_tokens=20, prompt_seconds=2.0, decode_seconds=0.75, decode_steps=2, decode_passes=2,
        bytes_per_step=1000, drafting=True, drafted=3, accepted=2, rounds=1, plain_seconds=1.5,
    )  # fmt: skip
    assert (usage.prompt_rate, usage.decode_rate) == (5.0, 2 / 0.75)
    assert (usage.bandwidth, usage.speedup, usage.mean_accepted) == (2000 / 0.75, 2.0, 2.0)
    assert (Usage().prompt_rate, Usage().decode_rate, Usage().bandwidth, Usage().speedup) == (0, 0, 0, 1)


def test_usage_of_two_parts_adds_up() -> None:
    one = Usage(prompt_tokens=5, queued_seconds=1.0, first_token_seconds=2.0, drafted=3, accepted=1, rounds=2)
    other = Usage(prompt_tokens=7, queued_seconds=4.0, first_token_seconds=5.0, drafted=2, accepted=2, rounds=1)
    both = one.and_then(other)
    assert (both.prompt_tokens, both.drafted, both.accepted, both.rounds) == (12, 5, 3, 3)
    assert (both.queued_seconds, both.first_token_seconds) == (1.0, 2.0)


def test_usage_of_a_reply(model: localllm.Model) -> None:
    model.new_core(SchedulerLimits())
    ids, cancel = list(range(260, 290)), threading.Event()
    first, second = (model.generate(ids, max_tokens=4, ignore_eos=True, seed=1, cancel=cancel) for _ in range(2))
    assert first.usage.reused_tokens == 0
    second.wait()
    again = model.generate([*ids, *first.tokens], max_tokens=4, ignore_eos=True, seed=1).usage
    assert (again.prompt_tokens, again.answer_tokens) == (34, 4)
    assert 0 < again.reused_tokens < 34
    assert again.decode_passes == again.decode_steps == 3
    assert again.bytes_per_step > 0


def test_a_conversation_tells_when_its_first_token_came(demo: localllm.Model) -> None:
    conversation = Conversation(demo, template_of(demo)[0], SamplingOptions(temperature=0), lambda note: None)
    for _ in range(2):
        usage = conversation.say("Hello!").usage
        assert 0 < usage.queued_seconds < usage.first_token_seconds
