"""Streams end when their clients disconnect, start with their first event, and report failures."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from localllm.generation.request import Started
from localllm.server.errors import BadRequest, Draining
from localllm.server.http import frame, ndjson, post, sse
from localllm.server.limits import ServerLimits
from localllm.server.structs import Body
from tests.localllm.server.calls import call, events, lines, served
from tests.localllm.server.scripted import ScriptedService, said

Source = Callable[[], AsyncGenerator[Any, None]]


def app(source: Source, *, jsonl: bool = False, limits: ServerLimits | None = None) -> Starlette:
    limits = limits or ServerLimits()

    async def handler(request: Request, body: Body) -> Response:
        return ndjson(source(), limits) if jsonl else sse(source(), limits)

    return Starlette(routes=post(("/v1/chat/completions", "/v1/messages", "/api/chat", "/completion"), handler, limits))


async def two() -> AsyncGenerator[Any, None]:
    yield {"a": "é\u2028"}
    yield frame({"b": 1}, "named")


async def early() -> AsyncGenerator[Any, None]:
    raise Draining("not now", 3)
    yield {}


async def late() -> AsyncGenerator[Any, None]:
    yield {"a": 1}
    raise BadRequest("no more")


async def bug() -> AsyncGenerator[Any, None]:
    yield {"a": 1}
    raise ZeroDivisionError("secret")


async def nothing() -> AsyncGenerator[Any, None]:
    return
    yield {}


def test_server_sent_events() -> None:
    response = call(app(two), "/completion", {})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    assert response.content == 'data: {"a":"é\u2028"}\n\nevent: named\ndata: {"b":1}\n\n'.encode()


def test_lines() -> None:
    assert lines(call(app(late, jsonl=True), "/api/chat", {})) == [{"a": 1}, {"error": "no more"}]


def test_an_error_before_the_first_event_has_its_status() -> None:
    response = call(app(early), "/completion", {})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert response.headers["content-type"] == "application/json"
    assert "not now" in response.text


def test_a_bug_tells_nothing() -> None:
    response = call(app(bug), "/v1/chat/completions", {})
    assert "secret" not in response.text
    assert events(response)[1]["error"]["type"] == "server_error"


def test_a_stream_without_events_is_complete() -> None:
    response = call(app(nothing), "/completion", {})
    assert (response.status_code, response.content) == (200, b"")


# -- called as uvicorn calls the application -------------------------------------------------------------------------


class Wire:
    """Both ends of an ASGI connection, controlled by the test."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.gone = asyncio.Event()
        self.first = True
        self.stuck = False

    async def receive(self) -> Any:
        if self.first:
            self.first = False
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        while self.stuck:
            await asyncio.sleep(3600)
        self.sent.append(message)

    def scope(self, **more: Any) -> Any:
        return {
            "type": "http", "method": "POST", "path": "/completion", "headers": [], "query_string": b"",
            "client": None, "server": None, "scheme": "http", "root_path": "", "http_version": "1.1", **more,
        }  # fmt: skip


class Held:
    """An event source that yields one event, blocks, and records when it is closed."""

    def __init__(self, first: bool = True) -> None:
        self.first = first
        self.closed = asyncio.Event()

    async def __call__(self) -> AsyncGenerator[Any, None]:
        try:
            if self.first:
                yield {"a": 1}
            await asyncio.sleep(3600)
        finally:
            self.closed.set()


@pytest.mark.parametrize("first", [True, False])
def test_the_source_is_closed_when_the_client_goes_even_while_it_is_silent(first: bool) -> None:
    async def main() -> None:
        wire, held = Wire(), Held(first)
        task = asyncio.create_task(app(held.__call__)(wire.scope(), wire.receive, wire.send))
        await asyncio.sleep(0.01)
        assert not held.closed.is_set()
        wire.gone.set()
        await asyncio.wait_for(held.closed.wait(), 10)
        await asyncio.wait_for(task, 10)
        assert len(wire.sent) == (2 if first else 0)

    asyncio.run(main())


def test_the_source_is_closed_when_the_task_is_cancelled() -> None:
    async def main() -> None:
        wire, held = Wire(), Held()
        task = asyncio.create_task(app(held.__call__)(wire.scope(), wire.receive, wire.send))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held.closed.is_set()

    asyncio.run(main())


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    async def main() -> None:
        wire, held, cut = Wire(), Held(), asyncio.Event()
        wire.stuck = True
        scope = wire.scope(extensions={"localllm.abort": cut.set})
        await asyncio.wait_for(
            app(held.__call__, limits=ServerLimits(send_seconds=0.02))(scope, wire.receive, wire.send), 10
        )  # fmt: skip
        assert cut.is_set()
        assert held.closed.is_set()

    asyncio.run(main())


def test_a_silent_stream_has_comments() -> None:
    async def main() -> list[Any]:
        wire, held = Wire(), Held(first=False)
        asyncio.get_running_loop().call_later(0.2, wire.gone.set)
        await asyncio.wait_for(
            app(held.__call__, limits=ServerLimits(ping_seconds=0.01))(wire.scope(), wire.receive, wire.send), 10
        )  # fmt: skip
        return wire.sent

    sent = asyncio.run(main())
    assert sent[0]["status"] == 200
    assert {message["body"] for message in sent[1:]} == {b": keep-alive\n\n"}
    assert len(sent) > 2


def test_a_handler_is_cancelled_when_the_client_goes() -> None:
    async def main() -> None:
        wire, closed = Wire(), asyncio.Event()

        async def slow(request: Request, body: Body) -> Any:
            try:
                await asyncio.sleep(3600)
            finally:
                closed.set()

        routed = Starlette(routes=post(("/completion",), slow, ServerLimits()))
        task = asyncio.create_task(routed(wire.scope(), wire.receive, wire.send))
        await asyncio.sleep(0.01)
        wire.gone.set()
        await asyncio.wait_for(task, 10)
        assert closed.is_set()

    asyncio.run(main())


def test_a_body_that_does_not_come_is_refused() -> None:
    async def main() -> list[Any]:
        wire = Wire()
        wire.first = False  # the client neither sends a body nor disconnects
        await app(two, limits=ServerLimits(body_seconds=0.02))(wire.scope(), wire.receive, wire.send)
        return wire.sent

    assert asyncio.run(main())[0]["status"] == 408


def test_a_client_that_goes_while_it_sends_is_nobody() -> None:
    async def main() -> None:
        wire = Wire()
        wire.first = False
        wire.gone.set()
        await app(two)(wire.scope(), wire.receive, wire.send)

    asyncio.run(main())


# -- over a TCP connection -------------------------------------------------------------------------------------------


def test_a_closed_socket_closes_the_source() -> None:
    service = ScriptedService([Started(5, 0), *said("a"), 3600.0])
    with served(service) as port:
        body = b'{"prompt": "x", "stream": true}'
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            seen = b""
            while b"data: " not in seen:
                seen += client.recv(4096)
            assert service.closed == 0
        wait_for(lambda: service.closed == 1)


def wait_for(true: Callable[[], bool]) -> None:
    """Wait until a condition is true, for at most 20 seconds."""
    waiting = threading.Event()
    for _ in range(2000):
        if true():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not become true")
