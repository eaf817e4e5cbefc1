"""Send requests to the application, in process or over a TCP connection to uvicorn on 127.0.0.1."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from starlette.routing import Route
from starlette.types import ASGIApp

from localllm.server.admission import Admission
from localllm.server.app import make_app
from localllm.server.run import listen, start
from localllm.server.service import Service
from localllm.server.settings import ServerSettings

LOCAL = "http://localhost"


def call(
    service: Service | ASGIApp,
    path: str,
    body: Any = None,
    *,
    method: str = "",
    settings: ServerSettings | None = None,
    headers: Mapping[str, str] | None = None,
) -> httpx.Response:
    """Send one request and return the response: POST if there is a body (JSON value or bytes), else GET."""
    app = service if not hasattr(service, "find") else make_app(service, settings or ServerSettings())  # type: ignore[arg-type]

    async def one() -> httpx.Response:
        # Exceptions in the application reach the test. uvicorn would only log them.
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            verb = method or ("GET" if body is None else "POST")
            raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
            return await client.request(verb, path, content=content, headers=raw)

    return asyncio.run(one())


def events(response: httpx.Response) -> list[Any]:
    """Return the JSON data of the server-sent events."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def lines(response: httpx.Response) -> list[Any]:
    """Return the JSON values of a newline-delimited stream."""
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    return [json.loads(line) for line in response.text.splitlines()]


@contextmanager
def served(service: Service, settings: ServerSettings | None = None, more: Sequence[Route] = ()) -> Iterator[int]:
    """Serve on a free port of 127.0.0.1 in a thread, and yield the port. The routes in `more` come first."""
    settings = settings or ServerSettings(port=0)
    admission = Admission(settings.limits)
    sockets = listen(settings)
    app = make_app(service, settings, admission=admission)
    app.router.routes[:0] = more
    server, run = start(app, settings, admission, sockets)
    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    try:
        yield sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server does not stop"
