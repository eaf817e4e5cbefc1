"""Shared by the tests of speculation: models that are tables, drafters with given drafts, and a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.model import Model
from localllm.options import SamplingOptions
from localllm.sampling.sampler import Sampler
from localllm.speculation.drafter import Drafting
from localllm.speculation.policy import Costs, Judge
from localllm.speculation.rule import Guess
from localllm.speculation.speculator import SpeculativeDecoding, Speculator

Logits = Callable[[Sequence[int]], NDArray[np.float32]]

# Seconds of a pass of 1 ... 16 rows, measured on two cores with the 1B geometry in Q4_0.
MEASURED = dict(enumerate((24.6, 24.7, 25.7, 47.7, 54, 54, 61.5, 63, 70, 70, 74, 77, 81, 85, 87, 89.4), 1))


class Clock:
    """A clock that advances only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TableSession:
    """A session on a model that is a function of the tokens so far; a pass takes `costs[rows]` seconds of `clock`."""

    def __init__(self, logits: Logits, clock: Clock, costs: dict[int, float], context: int = 1 << 20) -> None:
        self._logits, self._clock, self._costs, self._context = logits, clock, costs, context
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def room(self) -> int:
        return self._context - len(self.tokens)

    def rewind(self, length: int) -> None:
        assert length <= len(self.tokens)
        del self.tokens[length:]

    def evaluate(self, tokens: Sequence[int], logits: bool) -> NDArray[np.float32]:
        assert len(tokens) <= self.room
        rows = []
        for token in tokens:
            self.tokens.append(token)
            rows.append(self._logits(self.tokens))
        self._clock.now += self._costs[len(tokens)]
        return np.stack(rows)


class ToldDrafter:
    """Drafts the tokens of `guess(text)`, in `seconds` each."""

    name = "told"

    def __init__(self, guess: Callable[[list[int], Sampler], Guess], clock: Clock, seconds: float = 0.0) -> None:
        self._guess, self._clock, self.step_seconds = guess, clock, seconds
        self.text: list[int] = []

    def begin(self, text: Sequence[int]) -> None:
        self.text = list(text)

    def accept(self, token: int) -> None:
        self.text.append(token)

    def delay(self) -> float:
        return 0.0

    def propose(self, sampler: Sampler) -> Iterator[Guess]:
        text = self.text.copy()
        while True:
            self._clock.now += self.step_seconds
            guess = self._guess(text, sampler)
            yield guess
            text.append(guess.token)

    def close(self) -> None: ...


class Reckless(Judge):
    """Always drafts, whatever it costs."""

    def __init__(self) -> None:
        super().__init__([1.0] * 20)
        self.acceptance.observe = lambda trust, likelihood: None  # type: ignore[method-assign]

    def ready(self) -> bool:
        return True

    def settle(self, won: float) -> None: ...

    def rest(self) -> None: ...


class Free(Costs):
    """A pass costs the same for any number of rows, so all drafts are verified."""

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__({1: seconds, 16: seconds})

    def observe(self, rows: int, seconds: float) -> None: ...


def reckless(drafter: ToldDrafter, longest: int = 15) -> Speculator:
    """A speculator that verifies every draft."""
    return Speculator((Drafting(drafter, Reckless()),), Free(), longest)


def eager(model: Model) -> None:
    """Let the next sessions of an open model verify every draft, whatever it costs on this machine."""
    found = model.speculation
    assert found is not None
    found.costs, found._ngram_judge, found._draft_judge = Free(), Reckless(), Reckless()
    if found._draft_costs is not None:
        found._draft_costs = Free(1e-6)


def write(
    decoding: SpeculativeDecoding, sampler: Sampler, session: TableSession, prompt: list[int], count: int
) -> list[int]:
    """`count` tokens after `prompt`."""
    for token in prompt:
        sampler.accept(token)
    decoding.start(session.evaluate(prompt, logits=True)[-1:])
    answer: list[int] = []
    while True:
        answer.append(decoding.sample())
        sampler.write(answer[-1])
        if len(answer) == count:
            return answer
        decoding.feed(answer[-1], count - len(answer))


GREEDY = SamplingOptions(temperature=0)
