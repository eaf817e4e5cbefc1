"""The parts that a model needs to speculate, built once when it is opened and once per session."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.engine import Engine
from localllm.options import SpeculationOptions
from localllm.speculation import draft, ngram
from localllm.speculation.costs import DRAFTING, VERIFYING, measure
from localllm.speculation.draft import ModelDrafter
from localllm.speculation.drafter import Drafting
from localllm.speculation.ngram import NgramDrafter
from localllm.speculation.policy import Judge
from localllm.speculation.speculator import Speculator
from localllm.speculation.vocabulary import Vocabulary, match

SHORTEST_PASS = 2e-3  # seconds; drafting takes 30 to 50 microseconds per pass in Python, 2 % of this


@dataclass(frozen=True, slots=True)
class Reader:
    """A model as speculation sees it: its engine and its vocabulary."""

    engine: Engine
    vocabulary: Vocabulary


class Speculation:
    """Speculation for a model: the costs of its passes and of the draft model's, and acceptance rates so far."""

    def __init__(self, target: Reader, options: SpeculationOptions, drafting: Reader | None) -> None:
        """SpeculationError if the vocabularies do not match."""
        self.options, self._draft = options, drafting
        self._mapping = match(target.vocabulary, drafting.vocabulary) if drafting is not None else None
        self.costs = measure(target.engine, target.vocabulary.size, VERIFYING)
        self._draft_costs = (
            measure(drafting.engine, drafting.vocabulary.size, DRAFTING) if drafting is not None else None
        )
        self._ngram_judge, self._draft_judge = Judge(ngram.PRIORS), Judge(draft.PRIORS)

    def speculator(self) -> Speculator | None:
        """Return a speculator for a new session; None in automatic mode if passes are too short for drafting to pay."""
        if self.options.kind == "auto" and self.costs.seconds(1) < SHORTEST_PASS:
            return None
        draftings: list[Drafting] = []
        if self.options.kind in ("ngram", "auto"):
            draftings.append(Drafting(NgramDrafter(), self._ngram_judge))
        if self._draft is not None:
            assert self._mapping is not None
            assert self._draft_costs is not None
            drafter = ModelDrafter(self._draft.engine, self._mapping, self._draft_costs)
            draftings.append(Drafting(drafter, self._draft_judge))
        return Speculator(tuple(draftings), self.costs, min(self.options.draft_max, self.costs.most - 1))
