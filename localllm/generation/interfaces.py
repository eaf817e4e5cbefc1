"""The scheduler's limits, the interfaces that it calls, and the load that it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from localllm.engine import CacheSequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits on the number of requests and on the time of a step."""

    parallel: int = 4  # maximum running requests
    client_parallel: int = 0  # maximum running requests of one account; its others wait (0: same as `parallel`)
    waiting: int = 256  # maximum waiting requests
    slice_seconds: float = 1.0  # decode time after which an account with nothing running may preempt a request
    step_seconds: float = 0.4  # target for a step with both prompt rows and decode rows
    aligned: int = 1  # prefill chunks end at multiples of this: on a GPU, bits depend on the number of rows


class PrefixStore(Protocol):
    """Sequences on disk. The prefix cache saves the sequences that it evicts there."""

    def best(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that `load` would restore."""
        ...

    def load(self, tokens: Sequence[int]) -> CacheSequence | None: ...

    def save(self, sequence: CacheSequence) -> None: ...


class Observer(Protocol):
    """Observes the scheduler, in its thread."""

    def step(self, sequences: int, drafts: int = 0) -> None:
        """Called after each step with its number of sequences; `drafts` is how many sequences verified drafts."""
        ...


@dataclass(frozen=True, slots=True)
class Slot:
    """A running request, for monitoring."""

    number: int
    client: str
    prompt_tokens: int
    evaluated: int
    answered: int


@dataclass(frozen=True, slots=True)
class Load:
    """The current load of the scheduler."""

    running: tuple[Slot, ...]
    waiting: int
    kept_tokens: int  # in the prefix cache, for later prompts
    kept_blocks: int  # blocks in the prefix cache
    free_blocks: int
    blocks: int
