"""Sets up speculative decoding: costs and vocabulary mapping once per model, drafters once per core.

If drafting was asked for, a pass of one row is measured when the model is loaded, so that a note can say why drafts
cannot help. By default, nothing is measured: the costs are learned from the passes of the first answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.base.notices import Notice, Setting, said
from localllm.engine import Engine
from localllm.generation.speculation.costs import measure_costs, measure_head_costs, unknown_costs
from localllm.generation.speculation.drafts import Drafts
from localllm.generation.speculation.errors import SpeculationError
from localllm.generation.speculation.policy import Costs, outlook
from localllm.generation.speculation.vocabulary import Mapping, Vocabulary, match_vocabularies
from localllm.options import SpeculationOptions

if TYPE_CHECKING:
    from localllm.generation.speculation.model_drafter import ModelDrafter

SMALL = 100 << 20  # bytes of weights; passes of smaller models may be too short, so the first ones are waited for
SHORTEST_PASS = 3e-3  # minimum seconds per forward pass: looking for drafts in vain takes 2 % of it

NO_HEAD = (
    "no multi-token-prediction head can draft (none in the file or its folder, or only a part of the model is on a "
    "graphics card)"
)
_ITSELF = "it is the model itself, so drafting cannot be faster; use a smaller one"


@dataclass(frozen=True, slots=True)
class SpeculationTarget:
    """The parts of a model that speculative decoding uses: engine and vocabulary."""

    engine: Engine
    vocabulary: Vocabulary


def _same_file(one: SpeculationTarget, other: SpeculationTarget) -> bool:
    try:
        return one.vocabulary.path.samefile(other.vocabulary.path)
    except OSError:
        return False


class Speculation:
    """Speculative decoding for a model: the measured costs of the target and draft models, and the token mapping."""

    def __init__(
        self, target: SpeculationTarget, options: SpeculationOptions, drafting: SpeculationTarget | None
    ) -> None:
        """If the vocabularies do not match, ignore the draft model in automatic mode, else raise SpeculationError."""
        self.options, self._draft, self.refused = options, drafting, ""  # refused: why the draft model cannot be used
        self._mapping: Mapping | None = None
        self._itself = drafting is not None and _same_file(target, drafting)
        if self._itself and options.kind == "auto":
            self._draft, drafting, self.refused = None, None, f"the draft model is not used: {_ITSELF}"
        if drafting is not None:
            try:
                self._mapping = match_vocabularies(target.vocabulary, drafting.vocabulary)
            except SpeculationError as error:
                if options.kind != "auto":
                    raise
                self._draft, self.refused = None, said(error)
        heads = options.may_use_head and drafting is None and bool(target.engine.draft_heads)
        self._head = target.engine if heads else None
        if options.kind == "mtp" and self._head is None:
            raise SpeculationError(f"{target.vocabulary.path}: {NO_HEAD}; use ngram")
        drafting = self._draft
        self._clock = target.engine.clock
        self._small = target.engine.read_after(0) < SMALL
        if not options.asked:
            self.costs = unknown_costs(target.engine)
        else:
            self.costs = measure_costs(target.engine, target.vocabulary.size)
        self._draft_costs: Costs | None = None
        if drafting is not None:
            self._draft_costs = measure_costs(drafting.engine, drafting.vocabulary.size, clock=self._clock)
        elif self._head is not None:
            self._draft_costs = measure_head_costs(self._head, target.vocabulary.size)

    @property
    def _too_short(self) -> bool:
        """Whether, in automatic mode, forward passes are too short for drafting to save time."""
        return self.options.kind == "auto" and self.costs.sure and self.costs.seconds(1) < SHORTEST_PASS

    @property
    def notes(self) -> tuple[str, ...]:
        """Notices about options that are not applied as given, with the reasons."""
        given, most = self.options.draft_max, self.options.most_drafted
        clamped = Notice(
            Setting("draft_max", given), f": at most {most} tokens are drafted, because a pass cannot verify more"
        )
        return (*((clamped,) if given > most else ()), *((self.unused,) if self.unused else ()))

    @property
    def unused(self) -> str:
        """The reason why speculation or the draft model, if asked for, will not be used; "" if both may be used."""
        if not self.options.asked:
            return ""
        one = f"{1e3 * self.costs.seconds(1):.2f} ms"
        if self.refused or self._itself:
            return self.refused or f"the draft model saves no time: {_ITSELF}"
        if self._too_short:
            what, instead = ("the draft model", "draft") if self._draft is not None else ("speculation", "ngram")
            reason = f"{what} is not used: a pass of the model takes only {one}, so drafting would not save time"
            return Notice(f"{reason}; use it anyway with ", Setting("spec", instead))
        if self._draft_costs is None:
            return ""
        step, longest = self._draft_costs.seconds(1), min(self.options.most_drafted, self.costs.most - 1)
        if outlook(self.costs, self.costs.seconds(1), 0, 1.0, 1.0, step, longest) > 0:
            return ""
        passes = f"one of its passes takes {1e3 * step:.2f} ms, one of the model {one}"
        if self._draft is None:
            return f"the model's head for drafting is not used: {passes}, so it cannot make the model faster"
        return f"the draft model is not used: {passes}, so it cannot make the model faster; use a smaller one"

    def drafts(self) -> Drafts | None:
        """Return the drafter for a core's requests, which uses repetitions, the draft model or the model's head.

        Return None in automatic mode if forward passes are too short for drafting to save time.
        """
        if self._too_short:
            return None
        longest = min(self.options.most_drafted, self.costs.most - 1)
        model: ModelDrafter[Any] | None = None
        if self._draft_costs is not None and self._draft is not None and self._mapping is not None:
            from localllm.generation.speculation.draft_model import DraftModel

            model = DraftModel(
                self._draft.engine, self._mapping, self._draft_costs, self.costs, longest, clock=self._clock
            )
        elif self._draft_costs is not None and self._head is not None:
            from localllm.generation.speculation.head import HeadDrafter

            model = HeadDrafter(self._head, self._draft_costs, self.costs, longest)
        automatic = self.options.kind == "auto"
        return Drafts(
            self.costs, longest, model, repeats=automatic or self.options.kind == "ngram",
            shortest_pass=SHORTEST_PASS if automatic else 0.0, reported=self.options.asked,
            waits=automatic and self._small, clock=self._clock, earlier=self.options.draft_earlier,
        )  # fmt: skip
