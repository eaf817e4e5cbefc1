"""The observations of an answer. Times are in seconds since the start, without the time spent recording."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Who = Literal["model", "draft"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A forward pass of the model or the draft model."""

    who: Who
    began: float
    ended: float
    first: int  # position of the first token
    tokens: tuple[int, ...]
    logit_rows: int  # number of tokens with logits
    cycles: NDArray[np.int64] | None  # (kernel calls, 2): total and waiting; None if the executable has no clock

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class StageRecord:
    """The effect of one sampler on the candidates."""

    name: str
    left: int  # candidates left after the sampler
    removed: int
    mass: float  # probability of the removed candidates, before the sampler
    changed: int  # remaining candidates whose logit changed


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate for the next token."""

    token: int
    model: float  # probability from the model's logits
    drawn: float  # probability after all samplers; 0 if a sampler removed the candidate
    removed_by: str  # name of the sampler that removed the candidate, or ""


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """How a token of the answer was chosen."""

    token: int
    began: float
    ended: float
    step: int  # index of the forward pass that computed the logits
    row: int  # row of the logits in the output of this forward pass
    candidates: tuple[Candidate, ...]  # the model's most likely tokens, and other relevant tokens
    others: int  # number of all other candidates
    others_mass: float  # the probability of all other candidates from the model's logits
    stages: tuple[StageRecord, ...]
    draft: int | None = None  # the token drafted at this position
    verified: bool = False  # whether a forward pass verified the drafted token
    drafter: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the draft was accepted, which saved a forward pass."""
        return self.verified and self.draft == self.token

    def of(self, token: int) -> Candidate:
        """Return a listed candidate."""
        return next(each for each in self.candidates if each.token == token)


@dataclass(slots=True)
class Record:
    """All observations of one answer."""

    prompt: list[int] = field(default_factory=list)
    seed: int = 0  # the seed that the sampler used
    chain: tuple[str, ...] = ()  # the samplers with their settings, in order
    reused: int = 0  # prompt tokens found in the KV cache
    reused_blocks: int = 0
    prepared: float = 0.0  # time at which tokenizing the prompt ended
    steps: list[StepRecord] = field(default_factory=list)
    choices: list[TokenChoice] = field(default_factory=list)
    held: int = 0  # tokens in the KV cache at the end
    watching: float = 0.0  # seconds spent recording; excluded from all other times

    @property
    def ended(self) -> float:
        """The end of the last forward pass or choice."""
        return max([self.prepared, *(s.ended for s in self.steps), *(c.ended for c in self.choices[-1:])])

    def chunks(self) -> list[StepRecord]:
        """Return the prefill steps."""
        first = self.choices[0].step if self.choices else len(self.steps)
        return [step for step in self.steps[: first + 1] if step.who == "model"]

    def later(self, who: Who) -> list[StepRecord]:
        """Return the forward passes after prefill."""
        first = self.choices[0].step if self.choices else len(self.steps)
        return [step for step in self.steps[first + 1 :] if step.who == who]
