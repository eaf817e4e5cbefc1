"""What a model needs to speculate: built once when it is opened, and for every session."""

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


SHORTEST_PASS = 2e-3  # seconds; drafting takes 30 to 50 microseconds per pass in Python, 2 % of this


class Drafter(Protocol):
    """Follows one text and drafts its continuation."""

    name: str

    @property
    def step_seconds(self) -> float:
        """Seconds per drafted token."""
        ...

    def begin(self, text: Sequence[int]) -> None: ...

    def accept(self, token: int) -> None: ...

    def delay(self) -> float:
        """Seconds before the first drafted token."""
        ...

    def propose(self, sampler: Sampler) -> Iterator[Guess]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter of one session, and the judge shared by all of its kind."""

    drafter: Drafter
    judge: Judge


@dataclass(frozen=True, slots=True)
class Speculator:
    """The drafters of one session."""

    draftings: tuple[Drafting, ...]
    costs: Costs
    longest: int

    def close(self) -> None:
        for drafting in self.draftings:
            drafting.drafter.close()


class Speculation:
    """Speculation of one model: its draft model, the costs of both, and their acceptance rates. Closes the draft
    model."""

    def __init__(self, target: Model, options: SpeculationOptions, drafting: Model | None) -> None:
        """SpeculationError if the vocabularies do not match."""
        self.options, self.draft = options, drafting
        self._mapping = match(target, drafting) if drafting is not None else None
        self.costs = measure(target, VERIFYING)
        self._draft_costs = measure(drafting, DRAFTING) if drafting is not None else None
        self._ngram_judge, self._draft_judge = Judge(ngram.PRIORS), Judge(draft.PRIORS)

    def speculator(self) -> Speculator | None:
        """For a new session; none if `auto` is set and passes are too short for drafting to pay."""
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
