"""The costs of an answer: time, bytes read and operations, and the hardware limits of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter

import numpy as np

from localllm.backends.base import Clocked, Roofs
from localllm.explain.costs import Cost, costs_of
from localllm.explain.record import Record, StepRecord
from localllm.generation.request import Finished
from localllm.model import Model
from localllm.plan import BLOCK

MEASURE_SECONDS = 0.1
MOST_SHARE = 1.05  # maximum plausible share of a limit; a larger share means that other threads did part of the work


@dataclass(frozen=True, slots=True)
class Spent:
    """The time, bytes and operations of some operations in some forward passes.

    Rates and shares are 0 if the limit or the time is unknown.
    """

    kind: str
    calls: int  # operations per forward pass
    seconds: float
    waited: float  # seconds, included in `seconds`, in which the first thread waited for others
    bytes: int
    operations: int
    roofs: Roofs

    @property
    def bandwidth(self) -> float:
        """The bandwidth in bytes per second."""
        return self.bytes / self.seconds if self._plausible else 0.0

    @property
    def rate(self) -> float:
        """The compute rate in operations per second."""
        return self.operations / self.seconds if self._plausible else 0.0

    @property
    def intensity(self) -> float:
        """The arithmetic intensity: operations per byte read."""
        return self.operations / self.bytes if self.bytes else 0.0

    @property
    def memory_seconds(self) -> float:
        """The minimum time in seconds to read the bytes at the measured bandwidth."""
        return self.bytes / self.roofs.bytes if self.roofs.bytes else 0.0

    @property
    def compute_seconds(self) -> float:
        """The minimum time in seconds for the operations at the measured rate of int8 products."""
        return self.operations / self.roofs.operations if self.roofs.operations else 0.0

    @property
    def memory_share(self) -> float:
        return self.memory_seconds / self.seconds if self._plausible else 0.0

    @property
    def compute_share(self) -> float:
        return self.compute_seconds / self.seconds if self._plausible else 0.0

    @property
    def _plausible(self) -> bool:
        return 0 < self.seconds * MOST_SHARE >= max(self.memory_seconds, self.compute_seconds)

    @property
    def bound(self) -> str:
        """The bottleneck: "memory", "arithmetic", or "waiting" if threads waited for each other most of the time.

        It is "" if nothing is read or multiplied, or no limit is known.
        """
        if not self.memory_seconds or not self.roofs.operations:
            return ""
        if 2 * self.waited > self.seconds:
            return "waiting"
        return "memory" if self.memory_seconds >= self.compute_seconds else "arithmetic"


@dataclass(frozen=True, slots=True)
class Phase:
    """Forward passes of one kind: prefill, decode of one token, or verification of several drafted tokens."""

    name: str
    steps: tuple[StepRecord, ...]
    kinds: tuple[Spent, ...]  # costs by kind of operation, the longest first
    whole: Spent  # all operations
    seconds: float  # time of the forward passes, including Python code around the operations

    @property
    def rows(self) -> int:
        return sum(len(step.tokens) for step in self.steps)


@dataclass(frozen=True, slots=True)
class DraftTotals:
    """Statistics of speculative decoding."""

    drafted: int  # number of drafted tokens that were verified
    accepted: int
    unverified: int  # drafted tokens that were not verified, since verification would not pay off
    rounds: int  # number of verify passes
    tokens: int  # number of answer tokens after the first token
    passes: int  # number of forward passes of the draft model
    one_row: float  # median seconds of a forward pass over one token; 0 without such a pass
    several_rows: float  # median seconds of a verify pass
    drafting: float  # seconds of the draft model's forward passes


class Account:
    """The measurements of a recorded answer."""

    def __init__(self, record: Record, model: Model, roofs: Roofs, end: Finished) -> None:
        assert model.plan is not None
        self.record, self.roofs, self.usage, self.reason = record, roofs, end.usage, end.reason
        self.costs = costs_of(model.executable, model.plan)
        self.block_bytes = sum(model.executable.block_bytes)
        self.blocks = model.pool.blocks
        self.clocked = isinstance(model.executable, Clocked)

    # -- time ------------------------------------------------------------------------------------------------------

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The forward passes of the model by phase: prefill, decode, verify. Phases that did not occur are missing."""
        later = self.record.later("model")
        sorts = (
            ("prompt", self.record.chunks()),
            ("decoding", [step for step in later if len(step.tokens) == 1]),
            ("verifying drafts", [step for step in later if len(step.tokens) > 1]),
        )
        return tuple([self._phase(name, steps) for name, steps in sorts if steps])

    def phase(self, name: str) -> Phase | None:
        return next((each for each in self.phases if each.name == name), None)

    @cached_property
    def time(self) -> tuple[tuple[str, float], ...]:
        """Seconds by activity, which add up to the total time of the answer."""
        record = self.record
        parts = [("template and tokens", record.prepared)]
        parts += [(phase.name, phase.seconds) for phase in self.phases]
        drafting = sum(step.seconds for step in record.steps if step.who == "draft")
        parts += [("draft model", drafting)] if drafting else []
        parts.append(("sampling", sum(choice.ended - choice.began for choice in record.choices)))
        parts.append(("text, and the rest", max(record.ended - sum(seconds for _, seconds in parts), 0.0)))
        return tuple(parts)

    def _phase(self, name: str, steps: Sequence[StepRecord]) -> Phase:
        groups: dict[str, list[int]] = {}
        for number, cost in enumerate(self.costs):
            groups.setdefault(cost.kind, []).append(number)
        kinds = [self._spent(kind, numbers, steps) for kind, numbers in groups.items()]
        kinds.sort(key=lambda each: (-each.seconds, -each.bytes))
        whole = self._spent("all operations", range(len(self.costs)), steps)
        return Phase(name, tuple(steps), tuple(kinds), whole, sum(step.seconds for step in steps))

    def _spent(self, kind: str, numbers: Sequence[int], steps: Sequence[StepRecord]) -> Spent:
        costs: list[Cost] = [self.costs[number] for number in numbers]
        seconds = waited = 0.0
        if self.roofs.cycles:
            clocks = [step.cycles[list(numbers)].sum(axis=0) for step in steps if step.cycles is not None]
            seconds, waited = (float(sum(each)) / self.roofs.cycles for each in zip(*clocks, strict=True))
        return Spent(
            kind,
            len(numbers),
            seconds,
            waited,
            sum(cost.bytes(step) for cost in costs for step in steps),
            sum(cost.operations(step) for cost in costs for step in steps),
            self.roofs,
        )

    # -- cache -----------------------------------------------------------------------------------------------------

    @property
    def cache_per_token(self) -> int:
        """KV cache bytes per token."""
        return self.block_bytes // BLOCK

    def cache_bytes(self, step: StepRecord) -> int:
        """Return the KV cache bytes that a forward pass reads."""
        return sum(cost.bytes(step) for cost in self.costs if cost.cache)

    def operations_without_cache(self) -> int:
        """Return the operations that the last token would need without a KV cache, with all previous tokens evaluated
        again."""
        count = self.record.held
        again = StepRecord("model", 0.0, 0.0, 0, (0,) * count, 1, None)
        return sum(cost.operations(again) for cost in self.costs)

    # -- drafts ----------------------------------------------------------------------------------------------------

    @cached_property
    def drafts(self) -> DraftTotals | None:
        """The statistics of speculative decoding, or None without speculation."""
        record = self.record
        if not self.usage.drafting:
            return None
        later = record.later("model")
        several = [step for step in later if len(step.tokens) > 1]
        return DraftTotals(
            drafted=sum(len(step.tokens) - 1 for step in several),
            accepted=sum(choice.accepted for choice in record.choices),
            unverified=sum(choice.draft is not None and not choice.verified for choice in record.choices),
            rounds=len(several),
            tokens=max(len(record.choices) - 1, 0),
            passes=len(later),
            one_row=_median([step.seconds for step in later if len(step.tokens) == 1]),
            several_rows=_median([step.seconds for step in several]),
            drafting=sum(step.seconds for step in record.steps if step.who == "draft"),
        )


def measure_roofs(model: Model) -> Roofs:
    """Measure the limits of the processor. A limit that this executable cannot measure is 0."""
    executable, began, found = model.executable, perf_counter(), Roofs(0.0, 0.0, 0.0)
    while perf_counter() - began < MEASURE_SECONDS:  # other programs disturb single measurements
        if isinstance(executable, Clocked):
            found = best(found, executable.roofs())
        else:
            found = best(found, Roofs(executable.read_bandwidth(), 0.0, 0.0))
    return found


def best(first: Roofs, second: Roofs) -> Roofs:
    """Return the higher limits of two measurements, one before and one after a run."""
    return Roofs(*map(max, first, second))


def _median(seconds: Sequence[float]) -> float:
    return float(np.median(seconds)) if seconds else 0.0
