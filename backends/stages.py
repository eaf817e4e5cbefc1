"""Stages: a plan that is split over several places runs from one boundary to the next, alternating with the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from localllm.plan import Value

B = TypeVar("B")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Stage(Generic[B]):
    """The calls or launches of one stage, and the locations of the values that it does not make, or that it sends.

    Before its work the executable fills in what the stage before sent, and what comes from tables in the file.
    """

    work: slice
    received: tuple[tuple[Value, B], ...] = ()
    sent: tuple[tuple[Value, B], ...] = ()
    looked_up: tuple[tuple[Value, B], ...] = ()

    def located(self, find: Callable[[Value, B], C]) -> Stage[C]:
        """The same stage with other locations, for instance memory instead of planned buffers."""
        sides = (self.received, self.sent, self.looked_up)
        return Stage(self.work, *(tuple([(value, find(value, at)) for value, at in side]) for side in sides))
