"""The steps in flight, at most `Engine.depth`: this number keeps all parts of the executable busy.

The requests of a step in flight wait for its results. All others may be changed at any time, because the executable
runs steps, copies and drafts in the order in which they are sent. One further step may run in slices between the
others: the picture of a prompt whose tokens see each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.engine import Engine, Pending
from localllm.generation.request_state import RequestState
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
    """The steps in flight, oldest first, without the `sliced` one."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine, self.depth = engine, engine.depth
        self.sliced: Flight | None = None  # a step of one request that runs in slices

    def slices(self, one: RequestState) -> bool:
        """Return whether the sliced step is this request's."""
        return self.sliced is not None and self.sliced.parts[0].state is one

    def give_up(self, one: RequestState) -> bool:
        """Give up the sliced step if it is this request's. Return whether it was."""
        if not self.slices(one):
            return False
        flight, self.sliced = self.sliced, None
        assert flight is not None
        self._abandon(flight)
        return True

    def add(self, flight: Flight) -> None:
        for other in self:
            for one, second in ((flight, other), (other, flight)):
                one.other_prompts += second.prompt_rows
                one.other_decodes += second.decode_rows
        self.append(flight)

    def abandon(self) -> None:
        """Give up all steps: their requests stay as they were before."""
        while self:
            self._abandon(self.popleft())
        if self.sliced is not None:
            self.give_up(self.sliced.parts[0].state)

    def _abandon(self, flight: Flight) -> None:
        if flight.pending is not None:
            self._engine.abandon(flight.pending)
        for part in flight.parts:
            part.state.land()
