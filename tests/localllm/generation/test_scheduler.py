"""The scheduler generates the same tokens for a request alone and in a batch, regardless of preemption, reuse
and drafts.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm.backends.base import Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.base.errors import LocalLLMError
from localllm.engine import CacheFull, ContextFull, SequenceRows
from localllm.generation.errors import QueueFull, Stopped
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Event, Prefilled, Request, Token
from localllm.generation.scheduler import Scheduler
from localllm.generation.speculation.drafts import Drafts
from localllm.generation.speculation.policy import Costs
from localllm.options import SamplingOptions
from localllm.plan import BLOCK
from localllm.sampling.constraint import Constraint
from tests.localllm.engine.support import ATTENDING, engine_of
from tests.localllm.generation.support import WAIT, Answer, ask, scheduled, stepper_of
from tests.models.kit import KIT

GREEDY = SamplingOptions(temperature=0.0)
MOST = 24  # largest number of tokens per answer
FAMILIES = {
    "attention": "llama-dense", "windows": "gpt-oss-moe", "delta net": "qwen35-mtp", "Mamba-2": "granitehybrid-dense",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Iterator[localllm.Model]:
    with localllm.load("demo", backend="cpu", threads=2, sequences=3) as model:
        yield model


def mixed(model: localllm.Model, count: int, longest: int, seed: int) -> list[Request]:
    """Return random requests, greedy and sampled, some with a common prefix."""
    chance = random.Random(seed)
    beginnings = [[chance.randrange(model.vocabulary) for _ in range(chance.randrange(longest))] for _ in range(3)]
    requests = []
    for number in range(count):
        rest = [chance.randrange(model.vocabulary) for _ in range(chance.randrange(1, longest // 2))]
        sampling = GREEDY if number % 3 == 0 else SamplingOptions(temperature=0.9, top_k=number % 7 * 10, seed=number)
        requests.append(
            Request([*chance.choice(beginnings), *rest], sampling, chance.randrange(1, MOST), ignore_eos=number % 2 > 0)
        )
    return requests


def each_alone(model: localllm.Model, requests: list[Request]) -> list[list[int]]:
    found = []
    for request in requests:
        pieces = model.generate(
            list(request.prompt), sampling=request.sampling, max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
        )  # fmt: skip
        found.append([piece.token for piece in pieces if piece.token is not None])
    return found


def test_answers_are_the_same_alone_and_in_company(model: localllm.Model) -> None:
    requests = mixed(model, 24, 150, 1)
    expected = each_alone(model, requests)
    with scheduled(model, parallel=5, itl_target=1e-4) as scheduler:
        for _ in range(2):  # the second time, the prompts are in the KV cache
            answers = [ask(scheduler, request) for request in requests]
            for answer, tokens in zip(answers, expected, strict=True):
                answer.result()
                assert answer.tokens == tokens
    assert any(answer.reused > 64 for answer in answers)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_cache_keeps_the_promise(family: str, tmp_path: Path) -> None:
    path = KIT[FAMILIES[family]].write(tmp_path / "model.gguf")
    with localllm.load(path, backend="cpu", threads=2, ctx_size=256, sequences=3) as model:
        requests = [
            Request(one.prompt, one.sampling, one.max_tokens, ignore_eos=True) for one in mixed(model, 10, 100, 2)
        ]
        expected = each_alone(model, requests)
        with scheduled(model, parallel=3) as scheduler:
            for _ in range(2):
                answers = [ask(scheduler, request) for request in requests]
                for answer, tokens in zip(answers, expected, strict=True):
                    answer.result()
                    assert answer.tokens == tokens
        assert model.pool.free_blocks == model.pool.blocks
        assert any(answer.reused for answer in answers)


def test_a_full_cache_preempts_and_loses_nothing() -> None:
    # The KV cache has room for one sequence.
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=256, sequences=1) as model:
        requests = [Request(one.prompt, one.sampling, 60, ignore_eos=True) for one in mixed(model, 8, 120, 3)]
        expected = each_alone(model, requests)
        with scheduled(model, parallel=4) as scheduler:
            answers = [ask(scheduler, request) for request in requests]
            for answer, tokens in zip(answers, expected, strict=True):
                answer.result()
                assert answer.tokens == tokens
        assert model.pool.free_blocks == model.pool.blocks


class Free(Costs):
    """A cost model in which additional tokens cost nothing, so that all drafts are verified."""

    def observe(self, rows: int, seconds: float) -> None: ...


def test_drafted_tokens_change_nothing(model: localllm.Model) -> None:
    phrase = list(range(40, 60))
    requests = [
        Request(
            [*phrase * 5, *range(number)], SamplingOptions(temperature=0.3 * number, seed=number), 150, ignore_eos=True
        )
        for number in range(4)
    ]
    expected = each_alone(model, requests)
    free = Free({1: 1e-3, 16: 1e-3})
    with Scheduler(stepper_of(model, SchedulerLimits(), Drafts(free, 15))) as scheduler:
        answers = [ask(scheduler, request) for request in requests]
        usages = [answer.result().usage for answer in answers]
    assert [answer.tokens for answer in answers] == expected
    assert sum(usage.drafted for usage in usages) > 10
    assert sum(usage.accepted for usage in usages) > 0


def test_a_prompt_waits_for_one_that_evaluates_the_same_tokens(model: localllm.Model) -> None:
    prompt = [token % model.vocabulary for token in range(7, 607)]
    with scheduled(model, parallel=3) as scheduler:
        answers = [ask(scheduler, Request([*prompt, number], GREEDY, 3)) for number in range(3)]
        reused = [answer.result().usage.reused_tokens for answer in answers]
    assert reused == [0, 600, 600]


def test_a_cancelled_request_ends_and_others_go_on(model: localllm.Model) -> None:
    with scheduled(model) as scheduler:
        stopping = Answer(until=3)
        stopping.ticket = scheduler.submit(Request([1, 2, 3], GREEDY, 500, ignore_eos=True), stopping)
        other = ask(scheduler, Request([4, 5], GREEDY, 20, ignore_eos=True))
        assert stopping.result().reason == "cancelled"
        assert len(stopping.tokens) < 500
        assert other.result().reason == "length"
        assert len(other.tokens) == 20


def test_a_listener_that_fails_ends_only_its_own_request(model: localllm.Model) -> None:
    def broken(event: object) -> None:
        raise RuntimeError("not ours")

    with scheduled(model) as scheduler:
        scheduler.submit(Request([1], GREEDY, 5), broken)
        assert ask(scheduler, Request([1, 2], GREEDY, 5, ignore_eos=True)).result().reason == "length"
        assert scheduler.load().waiting == 0


def test_priority_and_fairness_decide_who_runs(model: localllm.Model) -> None:
    ended: list[str] = []

    def listener(name: str) -> Answer:
        class Named(Answer):
            def __call__(self, event: object) -> None:
                super().__call__(event)  # type: ignore[arg-type]
                if self.over.is_set():
                    ended.append(name)

        return Named()

    with scheduled(model, parallel=1) as scheduler:
        first = ask(scheduler, Request([9], GREEDY, 30, ignore_eos=True))
        waiting = [
            ("low", Request([1], GREEDY, 2, priority=-1, ignore_eos=True)),
            ("usual", Request([2], GREEDY, 2, ignore_eos=True)),
            ("high", Request([3], GREEDY, 2, priority=1, ignore_eos=True)),
        ]
        answers = []
        for name, request in waiting:
            answer = listener(name)
            scheduler.submit(request, answer)
            answers.append(answer)
        first.result()
        for answer in answers:
            answer.result()
    assert ended == ["high", "usual", "low"]


def test_what_does_not_fit_is_refused(model: localllm.Model) -> None:
    with scheduled(model, parallel=1, waiting=0) as scheduler:
        with pytest.raises(ContextFull, match="the context holds 1024"):
            scheduler.submit(Request([1] * 1025, GREEDY), Answer())
        with pytest.raises(LocalLLMError, match="no tokens"):
            scheduler.submit(Request([], GREEDY), Answer())
        running = ask(scheduler, Request([1], GREEDY, 200, ignore_eos=True))
        with pytest.raises(QueueFull):
            scheduler.submit(Request([1], GREEDY), Answer())
        running.result()
    with pytest.raises(Stopped):
        scheduler.submit(Request([1], GREEDY), Answer())


def test_no_token_is_written_if_none_is_wanted(model: localllm.Model) -> None:
    prompt = [3 + i % 50 for i in range(100)]
    with scheduled(model) as scheduler:
        answer = ask(scheduler, Request(prompt, GREEDY, 0))
        assert answer.result().reason == "length"
        assert answer.tokens == []
        again = ask(scheduler, Request([*prompt, 9], GREEDY, 1))
        assert again.result().usage.reused_tokens == 100


def test_the_context_ends_an_answer(model: localllm.Model) -> None:
    with scheduled(model) as scheduler:
        answer = ask(scheduler, Request([5] * 1000, GREEDY, ignore_eos=True))
        assert answer.result().reason == "context"
        assert len(answer.tokens) == 25  # the last token needs no slot in the KV cache


def test_closing_ends_what_runs(model: localllm.Model) -> None:
    with scheduled(model) as scheduler:
        answers = [ask(scheduler, Request([number], GREEDY, 900, ignore_eos=True)) for number in range(6)]
    assert all(isinstance(answer.error().error, Stopped) for answer in answers)
    assert model.pool.free_blocks == model.pool.blocks


def test_what_is_kept_can_be_forgotten(model: localllm.Model) -> None:
    with scheduled(model) as scheduler:
        ask(scheduler, Request([7] * 100, GREEDY, 2, ignore_eos=True)).result()
        assert until(lambda: scheduler.load().kept_tokens == 101)
        scheduler.forget()
        assert ask(scheduler, Request([7] * 100, GREEDY, 2, ignore_eos=True)).result().usage.reused_tokens == 0


def until(true: Callable[[], bool]) -> bool:
    """Wait for a condition that becomes true soon after an event."""
    end = time.monotonic() + WAIT
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def test_what_is_asked_while_it_closes_is_told_the_end(model: localllm.Model) -> None:
    """A request that arrives after the stop signal, before the thread ends, still gets a final event."""
    scheduler = Scheduler(stepper_of(model))
    late: list[Answer] = []

    class Late(Answer):
        def __call__(self, event: Event) -> None:
            super().__call__(event)
            if not late:
                scheduler._stepper.put(scheduler._close)
                late.append(ask(scheduler, Request([3], GREEDY, 2)))

    first = Late()
    scheduler.submit(Request([1], GREEDY, 900, ignore_eos=True), first)
    scheduler._thread.join(60)
    with scheduler._lock:
        scheduler._stopped = scheduler._stopped or Stopped("closed")
    assert late
    scheduler.close()
    assert late[0].over.wait(1)


def test_load_may_be_asked_at_any_time() -> None:
    """Another thread calls `load` while sliding windows free blocks, and sequences start and end."""
    backend = CpuBackend(1)
    limits = Limits(rows=128, logit_rows=16, blocks=50, positions=10 * BLOCK, window_blocks=14)
    engine = engine_of(backend, ATTENDING["experts and windows"](), limits)
    over, wrong = threading.Event(), list[BaseException]()

    with Scheduler(stepper_of(engine, SchedulerLimits(parallel=3))) as scheduler:

        def look() -> None:
            while not over.is_set():
                try:
                    load = scheduler.load()
                    assert 0 <= load.free_blocks <= load.blocks
                except BaseException as error:
                    wrong.append(error)
                    return

        looking = threading.Thread(target=look)
        looking.start()
        prompts = [[(seed * i) % 28 for i in range(150)] for seed in range(1, 13)]
        answers = [ask(scheduler, Request(prompt, GREEDY, 30)) for prompt in prompts]
        for answer in answers:
            answer.result()
        over.set()
        looking.join(60)
    assert not wrong
    backend.close()


def test_logprobs_are_those_of_the_model(model: localllm.Model) -> None:
    prompt = [1, 70, 80, 90]
    with scheduled(model) as scheduler:
        answer = ask(scheduler, Request(prompt, GREEDY, 3, logprobs=5, prompt_logprobs=True, ignore_eos=True))
        answer.result()
    written = [event for event in answer.events if isinstance(event, Token)]
    ids = [*prompt, *(event.token for event in written)]
    logits = model.logits(ids).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    prompted = [logprob for event in answer.events if isinstance(event, Prefilled) for logprob in event.logprobs]
    assert [one.token for one in prompted] == prompt[1:]
    for place, found in enumerate([*prompted, *(event.logprob for event in written)]):
        assert found is not None
        assert found.token == ids[place + 1]
        assert found.logprob == pytest.approx(expected[place, found.token], abs=1e-6)
        assert [token for token, _ in found.top] == np.argsort(-expected[place], kind="stable")[:5].tolist()


def test_sampled_logprobs_are_those_of_the_tokens_that_may_come(model: localllm.Model) -> None:
    prompt = [1, 70, 80, 90]
    sampling = SamplingOptions(temperature=0.7, top_k=6, min_p=0.0, top_p=1.0, seed=3, repeat_penalty=1.5)
    with scheduled(model) as scheduler:
        plain = ask(scheduler, Request(prompt, sampling, 8, ignore_eos=True))
        answer = ask(scheduler, Request(prompt, sampling, 8, logprobs=10, sampled=True, ignore_eos=True))
        plain.result(), answer.result()
    assert answer.tokens == plain.tokens
    sampler = model.sampler(sampling)
    for token in prompt:
        sampler.accept(token)
    ids = [*prompt, *answer.tokens]
    logits = model.logits(ids)
    for place, event in enumerate(event for event in answer.events if isinstance(event, Token)):
        found = event.logprob
        assert found is not None
        assert len(found.top) == 6
        assert sum(np.exp(value) for _, value in found.top) == pytest.approx(1)
        assert [value for _, value in found.top] == sorted((value for _, value in found.top), reverse=True)
        expected = dict(
            zip(*map(np.ndarray.tolist, sampler.distribution(logits[len(prompt) - 1 + place])), strict=True)
        )
        assert {token: np.exp(value) for token, value in found.top} == pytest.approx(expected)
        assert dict(found.top)[found.token] == found.logprob
        sampler.accept(found.token)


class Even:
    """A grammar that allows only even tokens and then the end token."""

    def __init__(self, vocabulary: int, most: int, end: int) -> None:
        self._mask = np.arange(vocabulary) % 2 == 0
        self._end = np.arange(vocabulary) == end
        self._mask[end] = False
        self._left = most

    def allowed(self) -> NDArray[np.bool_] | None:
        mask: NDArray[np.bool_] = self._mask if self._left else self._end
        return mask

    def accept(self, token: int) -> None:
        assert self._mask[token]
        self._left -= 1

    def validate(self, tokens: object) -> int:
        raise AssertionError("not asked for")

    @property
    def finished(self) -> bool:
        return not self._left


def test_a_constraint_decides_what_may_come(model: localllm.Model) -> None:
    end = min(model.tokenizer.eog)

    def constraint() -> Constraint:
        return Even(model.vocabulary, 7, end)

    with scheduled(model) as scheduler:
        request = Request([1, 2, 3], SamplingOptions(seed=3), 50, constraint=constraint)
        answers = [ask(scheduler, request) for _ in range(3)]
        for answer in answers:
            assert answer.result().reason == "end"
            assert len(answer.tokens) == 7
            assert all(token % 2 == 0 for token in answer.tokens)


def test_a_prompt_that_fills_the_cache_alone_is_told(model: localllm.Model) -> None:
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=128, sequences=1) as small:
        held = small.engine.add()
        small.engine.step([SequenceRows(held, [3] * 128)])  # another owner holds these blocks
        with scheduled(small) as scheduler:
            answer = ask(scheduler, Request([5] * 128, GREEDY, 100))
            error = answer.error().error
        assert isinstance(error, CacheFull)
