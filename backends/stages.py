"""Stages of a split plan. The devices run their stages one at a time, in alternation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from localllm.plan import Value

B = TypeVar("B")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Stage(Generic[B]):
    """The kernel calls or launches of one stage, and the locations of the values that it receives, sends or looks up.

    Before the stage runs, the executable stores the values from the previous stage and from tables in the model file.
    """

    work: slice
    received: tuple[tuple[Value, B], ...] = ()
    sent: tuple[tuple[Value, B], ...] = ()
    looked_up: tuple[tuple[Value, B], ...] = ()

    def located(self, find: Callable[[Value, B], C]) -> Stage[C]:
        """Return this stage with every location mapped by `find`, for instance from planned buffers to memory."""
        sides = (self.received, self.sent, self.looked_up)
        return Stage(self.work, *(tuple([(value, find(value, at)) for value, at in side]) for side in sides))
