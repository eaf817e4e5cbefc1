"""The interface of drafters: n-grams and draft models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from localllm.sampling.sampler import Sampler
from localllm.speculation.policy import Judge
from localllm.speculation.rule import Guess


class Drafter(Protocol):
    """Follows a text and drafts its next tokens."""

    name: str

    @property
    def step_seconds(self) -> float:
        """Seconds per drafted token."""
        ...

    def begin(self, text: Sequence[int]) -> None: ...

    def accept(self, token: int) -> None: ...

    def delay(self) -> float:
        """Return the seconds before the first draft."""
        ...

    def propose(self, sampler: Sampler) -> Iterator[Guess]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Drafting:
    """The drafter of a session, and the judge that all drafters of its kind share."""

    drafter: Drafter
    judge: Judge
