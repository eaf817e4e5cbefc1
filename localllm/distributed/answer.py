"""An open request of a front: its ticket, and the part of its answer that the client has. Used by remote.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.generation.request import Event, Finished, Prefilled, Request, Started, Token
from localllm.generation.request_state import Ticket


@dataclass(eq=False, slots=True)
class RemoteTicket(Ticket):
    """A request that a replica runs."""

    gone: Callable[[], None] = lambda: None

    def cancel(self) -> None:
        Ticket.cancel(self)
        self.gone()


@dataclass(eq=False, slots=True)
class Answer:
    """An open request, and the part of its answer that the client has. Used on the scheduler's loop only."""

    request: Request
    listener: Callable[[Event], None]
    number: int = 0  # of the newest attempt
    tries: int = 0
    known: list[int] = field(default_factory=list)
    started: Started | None = None
    evaluated: int = 0  # prompt tokens that the client knows to be evaluated
    reached: int = 0  # prompt tokens that this attempt has evaluated
    running: bool = False  # a replica has begun this attempt
    call: Any = None
    held: int = 0  # bytes of its pictures and sounds in Ray's shared memory
    media: tuple[tuple[int, bytes], ...] = ()  # the same, packed
    over: bool = False

    def fresh(self, event: Event) -> Event | None:
        """Return what is new to the client in an event of the newest attempt."""
        match event:
            case Started():
                self.reached, self.running = event.reused_tokens, True
                if self.started is not None:
                    return None
                self.started, self.evaluated = event, event.reused_tokens
            case Prefilled():
                before, self.reached = max(self.reached, self.evaluated) - self.reached, event.evaluated
                if event.evaluated <= self.evaluated:
                    return None
                self.evaluated = event.evaluated
                return replace(event, logprobs=event.logprobs[before:])
            case Token():
                self.known.append(event.token)
            case Finished() if self.started is not None:
                usage = replace(event.usage, reused_tokens=self.started.reused_tokens)
                return replace(event, usage=usage)
        return event
