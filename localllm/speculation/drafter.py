"""What guesses: the interface that n-grams and draft models share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from localllm.sampling.sampler import Sampler
from localllm.speculation.policy import Judge
from localllm.speculation.rule import Guess


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
