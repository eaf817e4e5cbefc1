"""HTTP helpers for all APIs. A handler gets the body of a request as a struct, and returns JSON or a stream.

    class Chat(Handlers):
        async def complete(self, request: Request, body: ChatBody) -> Response | Json: ...

    def routes(service, settings):
        return post(("/v1/chat/completions",), Chat(service, settings).complete, settings.limits)

A handler may raise the exceptions that `errors.py` lists. It is cancelled when its client disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar, get_type_hints

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from localllm.server.body import ClientGone, read_json
from localllm.server.errors import Refusal, refusal_of
from localllm.server.forms import Form, read_form
from localllm.server.limits import ServerLimits
from localllm.server.service import Service
from localllm.server.settings import ServerSettings
from localllm.server.shapes import shape_of
from localllm.server.streams import Writer, disconnected, ndjson, sse
from localllm.server.structs import read
from localllm.server.turn import Json
from localllm.server.wire import dumps, frame, line

__all__ = ["Handlers", "client", "frame", "get", "line", "ndjson", "post", "read_json", "refused", "reply", "sse"]

T = TypeVar("T")
Reply = Response | Json | list[Any]
CLIENT = "localllm.client"  # key of a request's client in the ASGI scope, set by `security.py`
GONE = 499  # nginx's status for a closed connection, which appears only in logs


class Handlers:
    """A group of handlers over the same service."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self.service, self.settings = service, settings

    async def answer(
        self, events: AsyncGenerator[T, None], writer: Writer[T], stream: bool, ping_seconds: float | None = None
    ) -> Response | Json:
        """Return the answer as a stream of server-sent events, or as one object."""
        if stream:
            return sse(writer.stream(events), self.settings.limits, ping_seconds, writer.named)
        return await writer.collect(events)


def post(
    paths: Sequence[str],
    handler: Callable[..., Coroutine[Any, Any, Reply]],
    limits: ServerLimits,
    method: str = "POST",
    check: Callable[[Request], None] = lambda request: None,
) -> list[Route]:
    """Make the routes of a handler that takes a JSON object, which the type of its parameter `body` describes. The
    handler is cancelled if the client disconnects. `check` may refuse a request before its body is read."""
    kind = get_type_hints(handler)["body"]

    async def work(request: Request) -> Reply:
        check(request)
        body = read(await read_json(request, limits), kind)
        return await while_connected(request, handler(request, body))

    return _routes(paths, work, method)


def post_form(
    paths: Sequence[str], handler: Callable[[Request, Form], Coroutine[Any, Any, Reply]], limits: ServerLimits
) -> list[Route]:
    """Make the routes of a handler that takes a multipart form."""

    async def work(request: Request) -> Reply:
        form = await read_form(request, limits)
        return await while_connected(request, handler(request, form))

    return _routes(paths, work, "POST")


def get(paths: Sequence[str], handler: Callable[[Request], Awaitable[Reply]], method: str = "GET") -> list[Route]:
    """Make the routes of a handler without a body."""
    return _routes(paths, handler, method)


def _routes(paths: Sequence[str], handler: Callable[[Request], Awaitable[Reply]], method: str) -> list[Route]:
    async def endpoint(request: Request) -> Response:
        try:
            found = await handler(request)
        except ClientGone:
            return Response(status_code=GONE)
        except Exception as error:
            return refused(refusal_of(error), request.scope["path"])
        return found if isinstance(found, Response) else reply(found)

    return [Route(path, endpoint, methods=[method]) for path in paths]


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects, cancel it and raise ClientGone. The body must have been
    read."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def reply(value: Json | list[Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(dumps(value), status, headers, "application/json")


def refused(refusal: Refusal, path: str) -> Response:
    """Return an error response in the format of the API that the path belongs to."""
    return reply(shape_of(path).body(refusal), refusal.status, refusal.headers)


def client(request: Request) -> str:
    """Return the client of a request, for limits and fairness: the API key or, without keys, the address."""
    found = request.scope.get(CLIENT)
    return str(found) if found is not None else (request.client.host if request.client else "")
