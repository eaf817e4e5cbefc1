"""What was seen of an answer while it was made. Times are in seconds since it began, without the time of watching."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Who = Literal["model", "draft"]


@dataclass(frozen=True, slots=True)
class Step:
    """A pass of the model, or of the draft model."""

    who: Who
    began: float
    ended: float
    first: int  # position of the first token
    tokens: tuple[int, ...]
    logit_rows: int  # rows that became logits
    cycles: NDArray[np.int64] | None  # (kernel calls, 2): all, and waiting; None if the executable has no clock

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Stage:
    """What one sampler did to the candidates."""

    name: str
    left: int  # candidates after it
    removed: int
    mass: float  # probability of the removed ones before it
    changed: int  # candidates that stay with another logit


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could have come next."""

    token: int
    model: float  # probability by the model's logits alone
    drawn: float  # probability after all samplers; 0 if one removed it
    removed_by: str  # name of this sampler; "" if none did


@dataclass(frozen=True, slots=True)
class Choice:
    """How a token of the answer was chosen."""

    token: int
    began: float
    ended: float
    step: int  # number of the pass whose logits decided
    row: int  # row of these logits
    candidates: tuple[Candidate, ...]  # the most likely by the model, and those that matter besides
    others: int  # number of all other candidates
    others_mass: float  # their probability by the model's logits
    stages: tuple[Stage, ...]
    draft: int | None = None  # token that was drafted here
    verified: bool = False  # whether the draft was in the pass
    drafter: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the draft saved a pass."""
        return self.verified and self.draft == self.token

    def of(self, token: int) -> Candidate:
        """Return a listed candidate."""
        return next(each for each in self.candidates if each.token == token)


@dataclass(slots=True)
class Record:
    """All that was seen of one answer."""

    prompt: list[int] = field(default_factory=list)
    seed: int = 0  # the one in use
    chain: tuple[str, ...] = ()  # the samplers with their settings, in order
    reused: int = 0  # tokens of the prompt that were in the cache
    reused_blocks: int = 0
    prepared: float = 0.0  # when the prompt had become tokens
    steps: list[Step] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    held: int = 0  # tokens in the cache at the end
    watching: float = 0.0  # seconds that recording took; no other time contains them

    @property
    def ended(self) -> float:
        """When the last pass or choice ended."""
        return max([self.prepared, *(s.ended for s in self.steps), *(c.ended for c in self.choices[-1:])])

    def chunks(self) -> list[Step]:
        """Return the passes over the prompt."""
        first = self.choices[0].step if self.choices else len(self.steps)
        return [step for step in self.steps[: first + 1] if step.who == "model"]

    def later(self, who: Who) -> list[Step]:
        """Return the passes after the prompt."""
        first = self.choices[0].step if self.choices else len(self.steps)
        return [step for step in self.steps[first + 1 :] if step.who == who]
