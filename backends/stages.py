"""Stages: a plan split over several devices runs one stage at a time, alternating between the devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from localllm.plan import Value

B = TypeVar("B")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Stage(Generic[B]):
    """The calls or launches of one stage, and the locations of the values that it receives, sends or looks up.

    Before the work starts, the executable stores the values from the previous stage and from tables in the file.
    """

    work: slice
    received: tuple[tuple[Value, B], ...] = ()
    sent: tuple[tuple[Value, B], ...] = ()
    looked_up: tuple[tuple[Value, B], ...] = ()

    def located(self, find: Callable[[Value, B], C]) -> Stage[C]:
        """Return the same stage with other locations, for instance memory instead of planned buffers."""
        sides = (self.received, self.sent, self.looked_up)
        return Stage(self.work, *(tuple([(value, find(value, at)) for value, at in side]) for side in sides))
