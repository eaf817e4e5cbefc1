"""Run the application on uvicorn: listen, serve, and stop when asked to.

The first SIGTERM or SIGINT stops accepting and lets running answers end, the second ends them. Connections that send no
complete header in time are closed, which uvicorn leaves to a proxy.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from localllm.errors import LocalLLMError
from localllm.notice import Notice, Setting
from localllm.server.admission import Admission
from localllm.server.settings import Settings

HEADER_BYTES = 64 * 1024
KEEP_ALIVE_SECONDS = 75
BACKLOG = 512
Ready = Callable[[], Coroutine[Any, Any, None]]


class ListenError(LocalLLMError):
    """The address cannot be listened on."""


def listen(settings: Settings) -> list[socket.socket]:
    """Open the sockets of all addresses. ListenError in words that say which one cannot be had."""
    made: list[socket.socket] = []
    try:
        for address in settings.addresses:
            made.append(_socket(address, settings.port if not made else made[0].getsockname()[1]))
    except ListenError:
        for each in made:
            each.close()
        raise
    return made


def _socket(address: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind(place)
            made.listen(BACKLOG)
        except OSError:
            made.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"cannot listen on {address} port {port}: {reason}; choose another "
        raise ListenError(Notice(problem, Setting("host"), " or ", Setting("port"))) from None
    return made


def serve(
    app: ASGIApp, settings: Settings, admission: Admission, sockets: Sequence[socket.socket], ready: Ready | None = None
) -> None:
    """Serve until told to stop. `ready` is awaited while connections are accepted already: it loads the model.

    An error of `ready` stops the server and is raised.
    """
    asyncio.run(start(app, settings, admission, sockets, ready)[1]())


def start(
    app: ASGIApp, settings: Settings, admission: Admission, sockets: Sequence[socket.socket], ready: Ready | None = None
) -> tuple[_Server, Ready]:
    """Make a server and what runs it, for a program that has its own event loop."""
    config = uvicorn.Config(
        app,
        http=partial(_Connection, settings.limits.header_seconds),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=settings.drain_seconds or None,
        h11_max_incomplete_event_size=HEADER_BYTES,
        limit_concurrency=settings.limits.connections,
    )
    server = _Server(config, admission)
    return server, partial(_serve, server, list(sockets), ready)


