"""Helpers for tests of speculative decoding: models defined by functions, fixed drafts and costs, and a
simulated clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Executable, Limits
from localllm.engine import BlockPool, Engine
from localllm.generation.request_state import RequestState
from localllm.generation.speculation import draft
from localllm.generation.speculation.drafts import Drafts
from localllm.generation.speculation.policy import Acceptance, Costs, Judge
from localllm.generation.speculation.rule import DraftToken
from localllm.generation.speculation.setup import Speculation
from localllm.generation.speculation.suffixes import SuffixDrafter
from localllm.model import Model
from localllm.options import SamplingOptions
from localllm.plan import BLOCK, Batch
from localllm.sampling.sampler import Sampler

Logits = Callable[[Sequence[int]], NDArray[np.float32]]
Guessing = Callable[[list[int], Sampler], DraftToken]

# Seconds of a forward pass of 1 to 16 tokens, measured on two cores with a model of 1B parameters in Q4_0.
MEASURED = dict(enumerate((24.6, 24.7, 25.7, 47.7, 54, 54, 61.5, 63, 70, 70, 74, 77, 81, 85, 87, 89.4), 1))
GREEDY = SamplingOptions(temperature=0)


class Clock:
    """A clock that advances only on request."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ToldDrafter:
    """A drafter that drafts the tokens of `guess(text)`."""

    behind = 0

    def __init__(self, guess: Guessing, text: Sequence[int]) -> None:
        self._guess, self.text = guess, list(text)

    def accept(self, token: int) -> None:
        self.text.append(token)

    def propose(self, sampler: Sampler, most: int = 0) -> Iterator[DraftToken]:
        text = self.text.copy()
        while True:
            draft = self._guess(text, sampler)
            yield draft
            text.append(draft.token)


class Table:
    """The executable of a model whose logits are a function of the tokens so far. A step of n tokens advances `clock`
    by `costs(n)`.
    """

    def __init__(self, logits: Logits, clock: Clock, costs: Callable[[int], float]) -> None:
        self._logits, self._clock, self._costs = logits, clock, costs
        self.memory = self

    def read_after(self, length: int) -> int:
        return 0

    def step(self, batch: Batch) -> NDArray[np.float32]:
        self._clock.now += self._costs(len(batch.tokens))
        texts = (batch.histories[batch.sequence[row]][: batch.positions[row] + 1] for row in batch.logit_rows)
        found = [self._logits(text) for text in texts]
        return np.stack(found) if found else np.empty((0, 0), np.float32)


def table_engine(
    logits: Logits, clock: Clock | None = None, costs: Callable[[int], float] = lambda rows: 1.0
) -> Engine:
    """Return an engine of a `Table` model, without weights and without a KV cache."""
    limits = Limits(rows=64, logit_rows=64, blocks=64, positions=2048)
    table = cast(Executable, Table(logits, clock or Clock(), costs))
    engine = Engine(table, BlockPool(limits.blocks, BLOCK), limits)
    if clock is not None:
        engine.clock = clock
    return engine


class Free(Costs):
    """A cost model in which a forward pass costs the same for any number of tokens, so all drafts are verified."""

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__({1: seconds, 16: seconds})

    def observe(self, rows: int, seconds: float) -> None: ...


class Told(Drafts):
    """Drafts the tokens of `guess(text)` for every request. Without `costs`, all of them are verified."""

    def __init__(self, guess: Guessing, longest: int = 15, costs: Costs | None = None) -> None:
        super().__init__(costs or Free(), longest)
        self._told = guess
        self._acceptance = Acceptance([0.9])
        self._acceptance.observe = lambda trust, likelihood: None  # type: ignore[method-assign]

    def begin(self, one: RequestState) -> None:
        one.drafting = True
        one.drafter = cast(SuffixDrafter, ToldDrafter(self._told, one.tokens))


class Reckless(Judge):
    """A policy that always drafts, at any cost."""

    def __init__(self) -> None:
        super().__init__(draft.PRIORS)
        self.acceptance.observe = lambda trust, likelihood: None  # type: ignore[method-assign]

    def ready(self) -> bool:
        return True

    def settle(self, won: float) -> None: ...

    def rest(self) -> None: ...


class _Given:
    """Replaces the `Speculation` of a model, so that it verifies the given drafts."""

    def __init__(self, make: Callable[[], Drafts | None]) -> None:
        self._make = make

    def drafts(self) -> Drafts | None:
        return self._make()


@contextmanager
def drafting_by(model: Model, drafts: Drafts | None) -> Iterator[Model]:
    """Within the block, `drafts` supplies the drafts for an open model."""
    before = model.speculation
    model.draft_with(cast(Speculation, _Given(lambda: drafts)))
    try:
        yield model
    finally:
        model.draft_with(before)


def eager(model: Model) -> None:
    """Make an open model verify every draft from now on, regardless of cost."""
    found = model.speculation
    assert found is not None
    found.costs = Free()
    if found._draft_costs is not None:
        found._draft_costs = Free(1e-6)

    def make() -> Drafts | None:
        drafts = found.drafts()
        assert drafts is not None
        if drafts._model is not None:
            drafts._model._judge = judge = Reckless()
            drafts._model.acceptance = judge.acceptance
        return drafts

    model.draft_with(cast(Speculation, _Given(make)))
