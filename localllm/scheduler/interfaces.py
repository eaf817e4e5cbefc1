"""The limits of the scheduler, what it needs of others, and what it says of itself."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Protocol

from localllm.cache import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much runs at once."""

    parallel: int = 4  # requests that run
    client_parallel: int = 0  # requests of one account that run; its others wait (0: as many as `parallel`)
    waiting: int = 256  # requests that wait
    slice_seconds: float = 1.0  # of writing before an answer gives its place to an account without one
    step_seconds: float = 0.4  # of a step with prompt rows while answers are being written
    aligned: int = 1  # prompts are cut at multiples of this: on a card bits depend on the rows of a step


class Store(Protocol):
    """Sequences beyond memory: on disk."""

    def best(self, tokens: Several[int]) -> int:
        """Return how many leading tokens `load` would bring."""
        ...

    def load(self, tokens: Several[int]) -> Sequence | None: ...

    def save(self, sequence: Sequence) -> None: ...


class Observer(Protocol):
    """Hears what the scheduler does, in its thread."""

    def step(self, sequences: int, drafts: int = 0) -> None:
        """Hear of a step with so many sequences, of which `drafts` verified drafted tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Slot:
    """A running request, for people who look."""

    number: int
    client: str
    prompt_tokens: int
    evaluated: int
    answered: int


@dataclass(frozen=True, slots=True)
class Load:
    """What the scheduler does at this moment."""

    running: tuple[Slot, ...]
    waiting: int
    kept_tokens: int  # of finished requests, for later prompts
    kept_blocks: int  # that hold them
    free_blocks: int
    blocks: int
