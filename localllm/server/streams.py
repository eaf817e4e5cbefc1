"""Send streams of events as responses: server-sent events and JSON lines.

The response starts with the first event, so that a request that fails earlier can set the HTTP status. If the client
disconnects, the source is closed at once, even while idle. A client that stops reading is disconnected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localllm.server.errors import Refusal, refusal_of
from localllm.server.limits import ServerLimits
from localllm.server.shapes import Shape, shape_of
from localllm.server.turn import Json
from localllm.server.wire import PING, dumps, frame, line, typed_frame

E = TypeVar("E")
Events = AsyncGenerator[Any, None]  # JSON objects, or bytes that are already encoded
ABORT = "localllm.abort"  # extension of localllm's uvicorn protocol that closes the connection and drops unsent bytes


class Writer(Generic[E]):
    """Converts the events of a request to the events of an API's stream, or to one object."""

    named: ClassVar[bool] = False  # whether the `type` of an event is also its name

    def events(self, event: E) -> Iterable[bytes | Json]:
        """Return the stream's events for one event of the request."""
        raise NotImplementedError

    def add(self, event: E) -> None:
        """Add an event to the object."""
        for _ in self.events(event):
            pass

    def last(self) -> Iterable[bytes | Json]:
        """Return the events that end the stream."""
        return ()

    def failed(self, error: Exception) -> Iterable[bytes | Json]:
        """Return the events that end a stream after an error, or raise the error, which sends the API's error event."""
        raise error

    def whole(self) -> Json:
        """Return the object, after all events."""
        raise NotImplementedError

    async def stream(self, events: AsyncGenerator[E, None]) -> Events:
        """Yield the stream's events. An error before the first of them is raised."""
        begun = False
        try:
            async with aclosing(events):
                async for event in events:
                    for made in self.events(event):
                        begun = True
                        yield made
            for made in self.last():
                yield made
        except Exception as error:
            if not begun:
                raise
            for made in self.failed(error):
                yield made

    async def collect(self, events: AsyncGenerator[E, None]) -> Json:
        """Return the object for all events."""
        async with aclosing(events):
            async for event in events:
                self.add(event)
        return self.whole()


def sse(events: Events, limits: ServerLimits, ping_seconds: float | None = None, named: bool = False) -> Response:
    """Send each event as soon as it is available: a dict as one `data:` event, and bytes (see `wire.frame`) unchanged.

    The source should await its first event before it yields anything, so that earlier errors can set the status. It is
    always closed. An error after the first event is sent in the stream, in the error format of the path's API. With
    `named`, the `type` of an event is also its name.
    """
    return _Stream(events, limits, "text/event-stream", typed_frame if named else frame, PING, ping_seconds)


def ndjson(events: Events, limits: ServerLimits) -> Response:
    """Send each event as a line of JSON. Unlike `sse`, it sends no comments, which JSON lines do not allow."""
    return _Stream(events, limits, "application/x-ndjson", line, b"", None)


class _Stream(Response):
    def __init__(
        self,
        events: Events,
        limits: ServerLimits,
        media_type: str,
        encode: Callable[[Json], bytes],
        ping: bytes,
        ping_seconds: float | None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events = events
        self._limits = limits
        self._encode = encode
        self._ping = ping
        self._every = limits.ping_seconds if ping_seconds is None else ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet = _Outlet(scope, send, self.raw_headers, self._limits.send_seconds)
        pump = asyncio.create_task(self._pump(outlet, scope["path"]))
        gone = asyncio.create_task(disconnected(receive))
        pings = asyncio.create_task(self._pings(outlet))
        tasks = (pump, gone, pings)
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, outlet: _Outlet, path: str) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await outlet.send(event if isinstance(event, bytes) else self._encode(event))
            await outlet.end()
        except _Unread:
            return
        except Exception as error:
            await outlet.fail(refusal_of(error), shape_of(path))

    async def _pings(self, outlet: _Outlet) -> None:
        while self._every > 0:
            silent = time.monotonic() - outlet.sent
            if silent >= self._every:
                await outlet.send(self._ping)
            else:
                await asyncio.sleep(self._every - silent)


class _Unread(Exception):
    """The client stopped reading for too long and was disconnected."""


class _Outlet:
    """The sending side of a connection. It sends one message at a time, each within the time limit."""

    def __init__(self, scope: Scope, send: Send, headers: list[tuple[bytes, bytes]], seconds: float) -> None:
        self.sent = time.monotonic()
        self._begun = self._ended = False
        self._abort: Callable[[], None] | None = (scope.get("extensions") or {}).get(ABORT)
        self._send = send
        self._headers = headers
        self._seconds = seconds
        self._lock = asyncio.Lock()

    async def send(self, data: bytes) -> None:
        """Send bytes, after the status and headers if they were not sent yet."""
        async with self._lock:
            await self._start(200, self._headers)
            await self._body(data, more=True)

    async def end(self) -> None:
        async with self._lock:
            await self._start(200, self._headers)
            await self._body(b"", more=False)

    async def fail(self, refusal: Refusal, shape: Shape) -> None:
        """Send an error and end: as an event, or as the full response if nothing was sent."""
        async with self._lock:
            data = shape.event(refusal) if self._begun else dumps(shape.body(refusal))
            named = {"content-type": "application/json"} | refusal.headers
            await self._start(refusal.status, [(name.lower().encode(), text.encode()) for name, text in named.items()])
            await self._body(data, more=False)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if not self._begun:
            self._begun = True
            await self._message({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, data: bytes, *, more: bool) -> None:
        if not self._ended:
            self._ended = not more
            await self._message({"type": "http.response.body", "body": data, "more_body": more})
            self.sent = time.monotonic()

    async def _message(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            if self._abort is not None:
                self._abort()
            raise _Unread from None


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
