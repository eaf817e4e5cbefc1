"""What a model needs to speculate, put together once when it is opened, and for every session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from localllm.speculation import draft, ngram
from localllm.speculation.costs import DRAFTING, VERIFYING, measure
from localllm.speculation.draft import ModelDrafter
from localllm.speculation.ngram import NgramDrafter
from localllm.speculation.options import SpeculationOptions
from localllm.speculation.policy import Costs, Judge
from localllm.speculation.vocabulary import match

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from localllm.model import Model
    from localllm.sampling.sampler import Sampler
    from localllm.speculation.rule import Guess


SHORTEST_PASS = 2e-3  # seconds; guessing takes 30 to 50 microseconds a pass in Python, 2 % of this


class Drafter(Protocol):
    """Follows one text and guesses how it goes on."""

    name: str

    @property
    def step_seconds(self) -> float:
        """What a guess costs."""
        ...

    def begin(self, text: Sequence[int]) -> None: ...

    def accept(self, token: int) -> None: ...

    def delay(self) -> float:
        """Seconds it needs before the first guess."""
        ...

    def propose(self, sampler: Sampler) -> Iterator[Guess]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter of one session and the judge over all of its kind."""

    drafter: Drafter
    judge: Judge


@dataclass(frozen=True, slots=True)
class Speculator:
    """What one session speculates with."""

    draftings: tuple[Drafting, ...]
    costs: Costs
    longest: int

    def close(self) -> None:
        for drafting in self.draftings:
            drafting.drafter.close()


class Speculation:
    """Of one model: its draft model, the costs of both, and what was learned about their guesses. Closes the draft."""

    def __init__(self, target: Model, options: SpeculationOptions, drafting: Model | None) -> None:
        """SpeculationError where the draft model knows other tokens."""
        self.options, self.draft = options, drafting
        self._mapping = match(target, drafting) if drafting is not None else None
        self.costs = measure(target, VERIFYING)
        self._draft_costs = measure(drafting, DRAFTING) if drafting is not None else None
        self._ngram_judge, self._draft_judge = Judge(ngram.PRIORS), Judge(draft.PRIORS)

    def speculator(self) -> Speculator | None:
        """For a new session; none where what pays is to be done, and passes are too short for guessing to pay."""
        if self.options.kind == "auto" and self.costs.seconds(1) < SHORTEST_PASS:
            return None
        draftings: list[Drafting] = []
        if self.options.kind in ("ngram", "auto"):
            draftings.append(Drafting(NgramDrafter(), self._ngram_judge))
        if self.draft is not None:
            assert self._mapping is not None
            assert self._draft_costs is not None
            drafter = ModelDrafter(self.draft, self._mapping, self._draft_costs)
            draftings.append(Drafting(drafter, self._draft_judge))
        return Speculator(tuple(draftings), self.costs, min(self.options.longest, self.costs.most - 1))

    def close(self) -> None:
        if self.draft is not None:
            self.draft.close()
