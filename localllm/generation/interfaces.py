"""The scheduler's limits, its observer and store interfaces, and its load report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from localllm.engine import CacheSequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits on the number of requests and on the duration of a step."""

    parallel: int = 4  # maximum running requests
    client_parallel: int = 0  # maximum running requests of one account; the rest wait (0: same as `parallel`)
    waiting: int = 256  # maximum waiting requests
    slice_seconds: float = 1.0  # decode time after which an account without running requests may preempt a request
    itl_target: float = 0.0  # longest step in seconds while requests decode; 0: chosen by `budget.py`
    aligned: int = 1  # prefill chunks end at multiples of this: on a GPU, results depend on the number of rows


class PrefixStore(Protocol):
    """Saved sequences on disk. The prefix cache saves evicted sequences here."""

    def best(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that `load` would restore."""
        ...

    def load(self, tokens: Sequence[int]) -> CacheSequence | None: ...

    def save(self, sequence: CacheSequence) -> None: ...


class Observer(Protocol):
    """Observes the scheduler, in the stepping thread."""

    def step(self, sequences: int, drafts: int = 0) -> None:
        """Called after each step with the number of its sequences; `drafts` counts the sequences whose drafts were
        verified.
        """
        ...


@dataclass(frozen=True, slots=True)
class Slot:
    """A running request, as reported to monitoring."""

    number: int
    client: str
    prompt_tokens: int
    evaluated: int
    answered: int


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of a model that runs in other processes (`localllm.distributed`)."""

    alive: int  # that are heard
    wanted: int  # at most
    stages: int  # of each
    hop_seconds: float  # from a stage to the next, as measured at the start; 0.0: unknown, or one stage
    lost: int  # that died or were silent, since the start
    moved: int  # requests that were sent again, since the start
    restarted: int = 0  # stages that were lost and started again, while the rest of their replica went on


@dataclass(frozen=True, slots=True)
class Load:
    """The current load of the scheduler."""

    running: tuple[Slot, ...]
    waiting: int
    kept_tokens: int  # tokens in the prefix cache, reusable by later prompts
    kept_blocks: int  # blocks in the prefix cache
    free_blocks: int
    blocks: int
    replicas: Replicas | None = None  # None: the model runs in this process
