"""Limit the number of open requests, in total and per account. While the server stops, reject new requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, perf_counter

from starlette.types import ASGIApp, Receive, Scope, Send

from localllm.generation.request import within_share
from localllm.server.accounts import ACCOUNT
from localllm.server.body import BODIES
from localllm.server.errors import Draining, TooManyRequests, refusal_of
from localllm.server.http import CLIENT, refused
from localllm.server.lanes import Lane
from localllm.server.limits import ServerLimits

RETRY_SECONDS = 5  # Retry-After while the server stops
MOST_RETRY_SECONDS = 60
MOST_CLIENTS = 1000  # clients whose token use is remembered, in addition to clients active within the last minute
_WEIGHT = 0.1  # weight of the newest request in the moving average


@dataclass(eq=False, slots=True)
class Admission:
    """Counts the open requests. Use it only from the event loop's thread."""

    limits: ServerLimits
    draining: bool = False
    open: int = 0
    clients: Counter[str] = field(default_factory=Counter)
    bodies: Lane = field(default_factory=lambda: Lane("bodies", heavy=True))  # large bodies are read one at a time
    seconds: float = 0.0  # average duration of a request
    clock: Callable[[], float] = monotonic
    # client -> used tokens that are not refilled yet, and the time of this count
    spent: dict[str, tuple[float, float]] = field(default_factory=dict)

    def enter(self, client: str) -> None:
        """Count a new request. Raise Draining or TooManyRequests, with the seconds after which a retry may succeed."""
        if self.draining:
            raise Draining("the server is stopping", RETRY_SECONDS)
        if self.open >= self.limits.requests:
            raise TooManyRequests(
                f"{self.open} requests are open, which is the limit; try again later", self._retry(self.open)
            )
        mine = self.clients[client]
        if mine >= self.limits.client_requests or not within_share(mine, self.limits.requests - self.open):
            message = f"{mine} requests of yours are open, which is the limit; wait for one to end"
            raise TooManyRequests(message, self._retry(mine))
        if wait := self._wait(client):
            most = self.limits.client_tokens
            raise TooManyRequests(f"you have used the {most} tokens of a minute; try again in {wait} seconds", wait)
        self.open += 1
        self.clients[client] += 1

    def spend(self, client: str, tokens: int) -> None:
        """Count the tokens of a finished request against the client's budget, which refills evenly over a minute."""
        if self.limits.client_tokens:
            self.spent[client] = (self._owed(client) + tokens, self.clock())
            if len(self.spent) > MOST_CLIENTS:
                self.spent = {name: each for name, each in self.spent.items() if self._owed(name)}

    def _owed(self, client: str) -> float:
        """Return the number of tokens that a client has used and that its budget has not refilled yet."""
        tokens, when = self.spent.get(client, (0.0, 0.0))
        return max(0.0, tokens - (self.clock() - when) * self.limits.client_tokens / 60)

    def _wait(self, client: str) -> int:
        """Return the seconds until a client may send another request, or 0."""
        over = self._owed(client) - self.limits.client_tokens
        return (
            max(1, math.ceil(60 * over / self.limits.client_tokens)) if self.limits.client_tokens and over >= 0 else 0
        )

    def leave(self, client: str, seconds: float) -> None:
        """Count the end of a request, and add its duration to the moving average."""
        self.seconds += _WEIGHT * (seconds - self.seconds) if self.seconds else seconds
        self.open -= 1
        self.clients[client] -= 1
        if not self.clients[client]:
            del self.clients[client]

    def _retry(self, requests: int) -> int:
        """Return the expected seconds until one of `requests` open requests ends."""
        return max(1, min(math.ceil(self.seconds / requests), MOST_RETRY_SECONDS))


class Gate:
    """Middleware that applies the limits to requests with a body, which cause most of the work.

    Requests without a body, such as health checks, lists and metrics, are always answered.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self.app = app
        self.admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get(CLIENT, "")
        ACCOUNT.set(client)
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        scope[BODIES] = self.admission.bodies
        try:
            self.admission.enter(client)
        except (Draining, TooManyRequests) as error:
            await refused(refusal_of(error), scope["path"])(scope, receive, send)
            return
        began = perf_counter()
        try:
            await self.app(scope, receive, send)
        finally:
            self.admission.leave(client, perf_counter() - began)
