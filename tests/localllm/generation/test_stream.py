"""Interleaved answers share steps: how far an answer runs ahead of its reader, what it frees when suspended,
and how it ends.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import localllm
from localllm.base.errors import LocalLLMError
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Finished, Request, Started, Token
from localllm.generation.stream import AHEAD
from localllm.loading.predictor import PARALLEL
from localllm.options import SamplingOptions

PROMPT = "Once upon a time there was a little bird. The little bird"


@pytest.fixture(scope="module")
def model() -> Iterator[localllm.Model]:
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=256) as opened:
        yield opened


@pytest.fixture
def all_free(model: localllm.Model) -> Iterator[None]:
    """Check that the test leaves no request, and no KV cache blocks except in the prefix cache."""
    model.new_core(SchedulerLimits(parallel=PARALLEL))
    before = model.engine.free_blocks
    yield
    running = model.stepper.core.running
    assert running.active == []
    assert running.waiting == []
    running.prefixes.clear()
    assert model.engine.free_blocks == before


def begin(model: localllm.Model, number: int, count: int = 30, **more: Any) -> localllm.Reply:
    """Start an answer. Every second answer is sampled, and the others are greedy."""
    sampling = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    return model.generate([300 + number, *range(400, 420)], max_tokens=count, ignore_eos=True, **sampling, **more)  # type: ignore[arg-type]


def alone(model: localllm.Model, number: int, count: int = 30) -> list[int]:
    return begin(model, number, count).tokens


def answered(model: localllm.Model) -> dict[int, int]:
    """Return the tokens of the unfinished answers, by the first token of their prompt."""
    running = model.stepper.core.running
    return {one.tokens[0] - 300: one.answer_tokens for one in [*running.active, *running.waiting]}


class Steps:
    """Calls a function within every step of an engine, with the index of the step and the number of its sequences."""

    def __init__(self, job: Callable[[int, int], None]) -> None:
        self.job, self.count = job, 0

    @contextmanager
    def step(self, rows: Any) -> Iterator[None]:
        self.count += 1
        self.job(self.count, len(rows))
        yield


@contextmanager
def within_steps(model: localllm.Model, job: Callable[[int, int], None]) -> Iterator[None]:
    model.engine.watch = Steps(job)
    try:
        yield
    finally:
        model.engine.watch = None


# -- run-ahead ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_free")
def test_an_answer_runs_ahead_of_its_reader_by_few_tokens(model: localllm.Model) -> None:
    expected = [alone(model, number) for number in range(3)]
    replies = [begin(model, number) for number in range(3)]
    next(replies[1])
    assert replies[0].tokens == expected[0]
    ahead = answered(model)
    assert set(ahead) == {1, 2}
    assert 1 < ahead[1] <= AHEAD + 1  # the reader has read one token
    assert 1 < ahead[2] <= AHEAD
    assert [reply.tokens for reply in replies[1:]] == expected[1:]


@pytest.mark.usefixtures("all_free")
def test_answers_that_are_read_in_turn_share_steps(model: localllm.Model) -> None:
    expected = [alone(model, number) for number in range(4)]
    sizes = list[int]()
    with within_steps(model, lambda step, rows: sizes.append(rows)):
        replies = [begin(model, number) for number in range(4)]
        for _ in zip(*replies, strict=True):
            pass
    assert [reply.tokens for reply in replies] == expected
    assert sizes.count(4) >= 25  # most of the 30 tokens are generated in steps of four sequences
    assert len(sizes) < 60  # separate answers would need 120 steps


@pytest.mark.usefixtures("all_free")
def test_without_a_bound_an_answer_never_waits_for_its_reader(model: localllm.Model) -> None:
    request = Request([1, 2, 3], SamplingOptions(temperature=0), 40, ignore_eos=True)
    stream = model.stepper.stream(request, ahead=None)
    assert begin(model, 0, 60).tokens
    assert answered(model) == {}
    events = list(stream)
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, Token) for event in events) == 40


# -- what suspended answers give up ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_free")
def test_more_suspended_answers_than_places(model: localllm.Model) -> None:
    """Every answer is read a little, so that suspended answers take all slots."""
    count = PARALLEL + 5
    expected = [alone(model, number, 12) for number in range(count)]
    replies = [begin(model, number, 12) for number in range(count)]
    found = [[next(reply).token for _ in range(2)] for reply in replies]
    assert len(model.stepper.core.running.active) <= PARALLEL
    for number in reversed(range(count)):
        assert replies[number].tokens == expected[number]
        assert found[number] == expected[number][:2]


@pytest.mark.usefixtures("all_free")
@pytest.mark.parametrize("places", [1, 2, 3])
def test_suspended_answers_make_room_while_there_are_blocks(model: localllm.Model, places: int) -> None:
    expected = [alone(model, number) for number in range(4)]
    model.new_core(SchedulerLimits(parallel=places))
    replies = [begin(model, number) for number in range(4)]
    found = [[next(reply).token for _ in range(2)] for reply in replies]
    for number in reversed(range(4)):
        assert replies[number].tokens == expected[number]
        assert found[number] == expected[number][:2]


def test_suspended_answers_whose_blocks_others_need() -> None:
    """Five answers of 90 tokens share a KV cache of 128 positions. They are read alternately, and then one after
    another.
    """
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=128) as model:
        free = model.engine.free_blocks
        expected = [alone(model, number, 70) for number in range(5)]
        replies = [begin(model, number, 70) for number in range(5)]
        for _ in range(20):
            for reply in replies:
                next(reply)
        for reply, tokens in zip(reversed(replies), reversed(expected), strict=True):
            assert reply.tokens == tokens
            assert reply.finish_reason == "length"
        model.stepper.core.running.prefixes.clear()
        assert model.engine.free_blocks == free


def test_logits_take_the_blocks_of_suspended_answers() -> None:
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=128) as model:
        ids, expected = [7] * 120, alone(model, 2, 70)
        logits = model.logits(ids)
        reply = begin(model, 2, 70)
        first = [next(reply).token for _ in range(40)]
        assert (model.logits(ids) == logits).all()
        assert reply.tokens == expected
        assert first == expected[:40]


# -- functions within a step -------------------------------------------------------------------------------------------


class Asks(threading.Event):
    """A cancel event that uses the model when a step checks it."""

    def __init__(self, use: Callable[[], object]) -> None:
        super().__init__()
        self.use, self.found = use, list[BaseException]()

    def is_set(self) -> bool:
        try:
            self.use()
        except LocalLLMError as error:
            self.found.append(error)
        return False


USES: dict[str, Callable[[localllm.Model], object]] = {
    "generate": lambda model: begin(model, 5).text,
    "chat": lambda model: model.chat("Hello", max_tokens=3).text,
    "logits": lambda model: model.logits([1, 2, 3]),
    "drafts": lambda model: model.draft_with(None),
}


@pytest.mark.usefixtures("all_free")
@pytest.mark.parametrize("use", USES)
def test_a_function_within_a_step_cannot_use_the_model(model: localllm.Model, use: str) -> None:
    """A function that uses the model within a step gets an error instead of a deadlock. The answer continues."""
    expected, found = alone(model, 4), list[list[int]]()
    asks = Asks(lambda: USES[use](model))
    thread = threading.Thread(target=lambda: found.append(begin(model, 4, cancel=asks).tokens), daemon=True)
    thread.start()
    thread.join(60)
    assert found == [expected]
    assert asks.found
    assert {str(error) for error in asks.found} == {
        "the model is in the middle of a step; a function that it calls cannot use it"
    }
    assert USES[use](model) is not False  # afterwards the function can use the model


# -- interrupts --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_free")
@pytest.mark.parametrize("at", [1, 2, 9])
def test_an_interrupt_within_a_step_leaves_the_model_usable(model: localllm.Model, at: int) -> None:
    """Ctrl-C is raised within the engine. The answer that is read ends, and others continue with the same tokens."""
    expected = [alone(model, number) for number in range(3)]
    model.stepper.core.running.prefixes.clear()
    read, other = begin(model, 0), begin(model, 1)

    def interrupt(step: int, rows: int) -> None:
        if step == at:
            signal.raise_signal(signal.SIGINT)

    with within_steps(model, interrupt), pytest.raises(KeyboardInterrupt):
        read.wait()
    assert list(read) == []
    assert read.finish_reason == "cancelled"
    assert other.tokens == expected[1]
    assert alone(model, 2) == expected[2]
    assert alone(model, 0) == expected[0]


@pytest.mark.usefixtures("all_free")
def test_an_interrupt_while_a_token_is_chosen_loses_no_other_answer(model: localllm.Model) -> None:
    """Ctrl-C is delayed until the end of the step, so that no results of the step are lost."""
    expected, calls = alone(model, 1), list[int]()

    def processor(tokens: Any, logits: Any) -> Any:
        calls.append(len(tokens))
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return logits

    read, other = begin(model, 0, logits_processor=processor), begin(model, 1)
    with pytest.raises(KeyboardInterrupt):
        read.wait()
    assert other.tokens == expected
    assert len(read.tokens) <= 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("all_free")
def test_a_grammar_that_fails_ends_its_own_answer_only(model: localllm.Model) -> None:
    """Only the answer whose grammar fails gets the error. Other answers in the step continue."""

    def broken() -> Any:
        raise LocalLLMError("no grammar")

    expected = alone(model, 0)
    failing = model.stepper.stream(Request([1, 2, 3], SamplingOptions(), 5, constraint=broken))
    assert alone(model, 0) == expected
    with pytest.raises(LocalLLMError, match="no grammar"):
        list(failing)


class Interrupts:
    """An observer that raises KeyboardInterrupt after a token was sampled."""

    def __init__(self, at: int) -> None:
        self.left, self.lengths = at, list[int]()

    def started(self, prompt: object, sequence: object, sampler: object) -> None: ...

    def choosing(self) -> None: ...

    def chose(self, token: int, by: object, sampler: object) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def ended(self, length: int) -> None:
        self.lengths.append(length)


@pytest.mark.usefixtures("all_free")
def test_an_interrupt_between_a_pass_and_its_tokens_loses_no_request(model: localllm.Model) -> None:
    """Results of the forward pass that were not processed are lost. The affected answers end with an error,
    so that no reader waits forever.
    """
    expected, observer = alone(model, 1), Interrupts(5)
    request = Request([1, 2, 3], SamplingOptions(temperature=0), 30, ignore_eos=True, observer=observer)
    watched, other = model.stepper.stream(request), begin(model, 0)
    with pytest.raises(KeyboardInterrupt):
        list(watched)
    with pytest.raises(LocalLLMError, match="interrupted"):
        list(watched)
    assert len(observer.lengths) == 1
    with pytest.raises(LocalLLMError, match="interrupted"):
        other.wait()
    assert alone(model, 1) == expected


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_free")
def test_a_cancel_event_ends_an_answer_after_the_token_that_was_read(model: localllm.Model) -> None:
    cancel, expected = threading.Event(), alone(model, 1)
    reply = begin(model, 1, cancel=cancel)
    for piece in reply:
        if len(reply._tokens) == 5 and piece.token is not None:
            cancel.set()
    assert reply.tokens == expected[:5]
    assert (reply.finish_reason, reply.end.reason, reply.usage.answer_tokens) == ("cancelled", "cancelled", 5)


@pytest.mark.usefixtures("all_free")
def test_a_cancel_event_that_is_set_before_gives_no_token(model: localllm.Model) -> None:
    cancel = threading.Event()
    cancel.set()
    reply = begin(model, 1, cancel=cancel)
    assert (reply.tokens, reply.text, reply.end.reason) == ([], "", "cancelled")


@pytest.mark.usefixtures("all_free")
@pytest.mark.parametrize("read", [0, 1, 7])
def test_a_closed_reply_has_what_was_read(model: localllm.Model, read: int) -> None:
    expected = alone(model, 1)
    with begin(model, 1) as reply:
        for _ in range(read):
            next(reply)
    with pytest.raises(StopIteration):
        next(reply)
    assert (reply.tokens, reply.finish_reason) == (expected[:read], "cancelled")
    reply.close()
    assert answered(model) == {}


@pytest.mark.usefixtures("all_free")
@pytest.mark.parametrize("read", [0, 1, 7])
def test_a_reply_that_nobody_holds_frees_its_place(model: localllm.Model, read: int) -> None:
    other, reply = begin(model, 2), begin(model, 1)
    for _ in range(read):
        next(reply)
    next(other)
    assert set(answered(model)) == {1, 2}
    del reply
    gc.collect()
    assert set(answered(model)) == {2}
    assert other.tokens == alone(model, 2)


@pytest.mark.usefixtures("all_free")
def test_a_reply_that_is_dropped_in_the_last_step_of_another_thread(model: localllm.Model) -> None:
    """No further step follows, so the last step must free the blocks of the reply."""
    dropped = begin(model, 1)
    next(dropped)
    inside, go_on = threading.Event(), threading.Event()
    last = model.generate([300], max_tokens=1, ignore_eos=True)  # a single step

    def stop(step: int, rows: int) -> None:
        if threading.current_thread() is thread:
            inside.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=lambda: next(last))
    with within_steps(model, stop):
        thread.start()
        assert inside.wait(60)
        dropped.close()  # does not wait for the step
        assert 1 in answered(model)
        go_on.set()
        thread.join(60)
    assert 1 not in answered(model)
    last.wait()


def test_a_closed_model_ends_its_answers(model: localllm.Model) -> None:
    other = localllm.load("demo", backend="cpu", threads=1, ctx_size=256)
    replies = [begin(other, number) for number in range(3)]
    first = next(replies[0]).token
    other.close()
    other.close()
    for reply in replies:
        with pytest.raises(LocalLLMError, match="this model is closed; load it again"):
            reply.wait()
        assert list(reply) == []
    assert first == alone(model, 0)[0]
    with pytest.raises(LocalLLMError, match="this model is closed"):
        begin(other, 0)
    with pytest.raises(LocalLLMError, match="this model is closed"):
        other.logits([1])


@pytest.mark.usefixtures("all_free")
def test_a_new_core_ends_the_answers_of_the_one_before(model: localllm.Model) -> None:
    expected, reply = alone(model, 1), begin(model, 1)
    next(reply)
    model.new_core(SchedulerLimits(parallel=PARALLEL))
    with pytest.raises(LocalLLMError, match="another way"):
        reply.wait()
    assert alone(model, 1) == expected


@pytest.mark.usefixtures("all_free")
def test_a_job_between_steps_returns_its_result_or_raises_its_error(model: localllm.Model) -> None:
    reply = begin(model, 1)
    next(reply)
    assert model.stepper.run(lambda: 41 + 1) == 42
    with pytest.raises(ZeroDivisionError):
        model.stepper.run(lambda: 1 // 0)
    assert reply.tokens == alone(model, 1)
