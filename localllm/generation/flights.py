"""The steps in flight, at most `Engine.depth`: this number keeps all parts of the executable busy.

The requests of a step in flight wait for its results. All others may be changed at any time, because the executable
runs steps, copies and drafts in the order in which they are sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.engine import Engine, Pending
from localllm.generation.step_part import StepPart

if TYPE_CHECKING:
    from localllm.generation.speculation.drafts import Proposal


@dataclass(slots=True)
class Flight:
    """A step in flight. Times are in seconds; `before` is by the clock that compares costs."""

    parts: list[StepPart]
    prompt_rows: int
    decode_rows: int
    began: float  # start of the schedule
    submitted: float
    before: float
    proposal: Proposal | None
    pending: Pending | None = None
    other_prompts: int = 0  # prefill tokens of other steps that were in flight at the same time
    other_decodes: int = 0  # their decode tokens


class Flights(deque[Flight]):
    """The steps in flight, oldest first."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine, self.depth = engine, engine.depth

    def add(self, flight: Flight) -> None:
        for other in self:
            for one, second in ((flight, other), (other, flight)):
                one.other_prompts += second.prompt_rows
                one.other_decodes += second.decode_rows
        self.append(flight)

    def abandon(self) -> None:
        """Give up all steps: their requests stay as they were before."""
        while self:
            flight = self.popleft()
            if flight.pending is not None:
                self._engine.abandon(flight.pending)
            for part in flight.parts:
                part.state.land()
