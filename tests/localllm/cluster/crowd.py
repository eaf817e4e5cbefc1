"""Random requests to the loop of a model in stages: they arrive, share prefixes and are cancelled while others run.

Every answer is compared with the answer of the model in one process, to one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm.backends.base import Backend
from localllm.backends.cpu.backend import CpuBackend
from localllm.cluster.backend import SplitBackend
from localllm.cluster.cut import even_cut
from localllm.cluster.executable import SplitExecutable
from localllm.cluster.ring import Connect, LocalRing
from localllm.generation.request import Failed, Finished, Request
from localllm.generation.request_state import RequestState
from localllm.options import SamplingOptions
from tests.localllm.generation.support import Answer, Stepped

Connecting = Callable[[Backend, int], Connect]  # from the backend and the number of stages


def over(backend: Backend, stages: int) -> Connect:
    return LocalRing.over([backend] * (stages - 1))


@contextmanager
def split(path: Path, stages: int, connecting: Connecting = over, **options: Any) -> Iterator[localllm.Model]:
    """Open a model in stages."""

    def opened(name: str, threads: int | None, device: str, checked: bool = True) -> SplitBackend:
        backend = CpuBackend(threads)
        return SplitBackend(backend, lambda plan: even_cut(plan, stages), connecting(backend, stages))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localllm.loading.loader.open_backend", opened)
        model = localllm.load(path, threads=1, **options)
    with model:
        assert isinstance(model.executable, SplitExecutable)
        yield model


class Rising:
    """A grammar in which every token is 1 to 40 more than the one before, modulo the vocabulary."""

    finished = False

    def __init__(self, words: int) -> None:
        self.words, self.last = words, -1

    def allowed(self) -> NDArray[np.bool_] | None:
        return None if self.last < 0 else (np.arange(self.words) - self.last - 1) % self.words < 40

    def accept(self, token: int) -> None:
        self.last = token

    def validate(self, tokens: Sequence[int]) -> int:
        last = self.last
        for count, token in enumerate(tokens):
            if last >= 0 and (token - last - 1) % self.words >= 40:
                return count
            last = token
        return len(tokens)


@dataclass
class Asked:
    """A request, its state, its answer so far, and whether it was cancelled."""

    request: Request
    one: RequestState
    answer: Answer
    cancelled: bool = False


@dataclass
class Crowd:
    """Requests to `model`, whose answers have the tokens of `plain`."""

    plain: localllm.Model
    model: localllm.Model
    seed: int
    parallel: int = 5
    longest: int = 90  # tokens of a prompt
    constrained: bool = False
    spare: int = 0  # cache blocks for the requests (0: all)
    failure: str = ""  # requests may fail with an error that begins so
    asked: list[Asked] = field(default_factory=list)
    together: int = 0  # most steps that were in flight at the same time
    largest: int = 0  # most requests of a step

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.vocabulary = min(self.plain.vocabulary, 90)

    def run(self, requests: int = 14) -> None:
        held = self.model.engine.add()
        if self.spare:
            pool = self.model.engine.pool
            held.occupy([0] * ((min(each.blocks for each in pool.pools) - self.spare) * pool.block_size))
        with Stepped(self.model, self.model.drafts(), parallel=self.parallel) as it:
            flights, steps = it.running.flights, 0
            submit = it.engine.submit

            def watched(rows: Any) -> Any:
                pending = submit(rows)
                self.together = max(self.together, len(flights) + 1)
                self.largest = max(self.largest, len(rows))
                return pending

            it.engine.submit = watched  # type: ignore[method-assign]
            try:
                while requests or it.core.running.busy:
                    if requests and (not it.core.running.busy or self.random.random() < 0.3):
                        requests -= 1
                        self.ask(it)
                    if self.random.random() < 0.03:
                        self.cancel()
                    it.turn()
                    steps += 1
                    assert steps < 20_000, "requests wait for ever"
            finally:
                del it.engine.submit  # type: ignore[method-assign]
            assert not flights
        held.free()
        self.check()
        free = [pool.free_blocks for pool in self.model.engine.pool.pools]
        assert free == [pool.blocks for pool in self.model.engine.pool.pools]

    def ask(self, it: Stepped) -> None:
        random = self.random
        prompt = random.integers(3, self.vocabulary, random.integers(1, self.longest)).tolist()
        if self.asked and random.random() < 0.5:  # a later turn, or the same text with another end
            earlier = self.asked[random.integers(len(self.asked))].one.tokens
            prompt = [*earlier[: random.integers(1, len(earlier) + 1)], *prompt[: random.integers(1, 12)]][
                : self.longest
            ]
        if random.random() < 0.4:  # suffixes repeat, so that drafts are found
            prompt = prompt[:20] * 4
        prompt = prompt[: self.longest]
        options = SamplingOptions(temperature=0.0) if random.random() < 0.6 else SamplingOptions(
            temperature=0.9, top_k=int(random.choice([0, 5])), seed=int(random.integers(1000))
        )  # fmt: skip
        logprobs = 2 if random.random() < 0.15 else None
        constraint = (lambda: Rising(self.plain.vocabulary)) if self.constrained and random.random() < 0.5 else None
        request = Request(
            prompt, options, int(random.integers(0, 25)), ignore_eos=constraint is None, logprobs=logprobs,
            reuse=bool(random.random() < 0.9), constraint=constraint, prompt_logprobs=bool(random.random() < 0.05),
        )  # fmt: skip
        self.asked.append(Asked(request, *it.ask(request)))

    def cancel(self) -> None:
        running = [each for each in self.asked if not each.one.done]
        if running and 3 * sum(each.cancelled for each in self.asked) < len(self.asked):
            each = running[self.random.integers(len(running))]
            each.cancelled = True
            each.one.ticket.cancel()

    def check(self) -> None:
        """Compare all answers, one after the other."""
        compared = failed = 0
        with Stepped(self.plain) as it:
            for each in self.asked:
                _, truth = it.ask(each.request)
                it.finish()
                found, expected = each.answer.tokens, truth.tokens
                if each.cancelled:
                    assert found == expected[: len(found)]
                    continue
                last = each.answer.events[-1]
                if isinstance(last, Failed) and self.failure and str(last.error).startswith(self.failure):
                    assert found == expected[: len(found)]
                    failed += 1
                    continue
                assert isinstance(last, Finished), last
                assert found == expected, each.request
                assert told(each.answer) == told(truth)
                compared += 1
        assert compared > (len(self.asked) - failed) / 2
        assert bool(failed) == bool(self.failure)


def told(answer: Answer) -> list[Any]:
    """Return the log-probabilities of the tokens and of the prompt's."""
    tokens = [getattr(event, "logprob", None) for event in answer.events]
    prompt = [each for event in answer.events for each in getattr(event, "logprobs", ())]
    return [*prompt, *[each for each in tokens if each is not None]]
