"""Run the application on uvicorn: listen, serve, and stop on signals.

The first SIGTERM or SIGINT stops accepting connections and lets running requests finish; the second ends them.
Connections that do not send complete headers in time are closed, because uvicorn has no such timeout. No single address
can use up all connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from types import FrameType, ModuleType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.generation.request import within_share
from localllm.server.accounts import account_of_address
from localllm.server.admission import Admission
from localllm.server.settings import ServerSettings
from localllm.server.streams import ABORT

try:
    import resource as _resource
except ImportError:  # Windows
    resource: ModuleType | None = None
else:
    resource = _resource

HEADER_BYTES = 64 * 1024
FILES = 64  # file descriptors reserved for everything except connections
PROBE_SECONDS, MOST_PROBE_SECONDS = 0.1, 2.0  # seconds between probes of a half-closed client
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FULL = b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"
KEEP_ALIVE_SECONDS = 75
BACKLOG = 512
Ready = Callable[[], Coroutine[Any, Any, None]]


class ListenError(LocalLLMError):
    """The server cannot listen on the address."""


def listen(settings: ServerSettings) -> list[socket.socket]:
    """Open the sockets of all addresses; raise ListenError for the first address that fails."""
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


def run_server(
    app: ASGIApp,
    settings: ServerSettings,
    admission: Admission,
    sockets: Sequence[socket.socket],
    ready: Ready | None = None,
) -> None:
    """Serve until stopped. `ready` loads the model while connections are already accepted.

    If `ready` fails, the server stops and the error is raised again.
    """
    asyncio.run(start(app, settings, admission, sockets, ready)[1]())


def start(
    app: ASGIApp,
    settings: ServerSettings,
    admission: Admission,
    sockets: Sequence[socket.socket],
    ready: Ready | None = None,
) -> tuple[_Server, Ready]:
    """Create a server and the coroutine function that runs it, for a program with an existing event loop."""
    config = uvicorn.Config(
        app,
        http=partial(_Connection, settings.limits.header_seconds, Connections(_most(settings))),  # type: ignore[arg-type]
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
        limit_concurrency=None,  # `Connections` limits the connections instead
    )
    server = _Server(config, admission)
    return server, partial(_serve, server, list(sockets), ready)


async def _serve(server: _Server, sockets: list[socket.socket], ready: Ready | None) -> None:
    serving = asyncio.create_task(server.serve(sockets))
    loading = asyncio.create_task(_nothing() if ready is None else ready())
    try:
        await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit |= loading.done() and loading.exception() is not None
        await serving
    finally:
        unfinished = loading.cancel()
        serving.cancel()
    if not unfinished:
        loading.result()


async def _nothing() -> None:
    pass


class _Server(uvicorn.Server):
    """uvicorn's server, except that any second signal forces an immediate exit."""

    def __init__(self, config: uvicorn.Config, admission: Admission) -> None:
        super().__init__(config)
        self._admission = admission

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._admission.draining = True
        if self.force_exit:  # from Python 3.12, closing the sockets waits for their connections
            for connection in tuple(self.server_state.connections):
                connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, but do not raise them again at the end, because stopping is not a failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.signal(sig, self.handle_exit) for sig in handled}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def _most(settings: ServerSettings) -> int:
    """Return the maximum number of connections: the setting, or less if the open-file limit is lower."""
    if resource is None:
        return settings.limits.connections
    files: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return settings.limits.connections if files < 0 else max(min(settings.limits.connections, files - FILES), 1)


class Connections:
    """Counts connections, in total and per address. An address may not hold more connections than are still free."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def enter(self, account: str) -> bool:
        """Count a connection, and return whether to keep it."""
        if not within_share(self._open[account], self._most - self._open.total()):
            return False
        self._open[account] += 1
        return True

    def leave(self, account: str) -> None:
        self._open[account] -= 1
        if not self._open[account]:
            del self._open[account]


class _Connection(H11Protocol):
    """uvicorn's connection, with limits on headers and connections, and with a way to close it at once.

    A client may close its sending side after a request (half-close). It still gets the response if that has not
    started.
    """

    def __init__(
        self,
        header_seconds: float,
        connections: Connections,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._header_seconds = header_seconds
        self._deadline: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._counts, self._account = connections, ""
        self._entered = False
        inner: ASGIApp = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await inner({**scope, "extensions": {ABORT: self.transport.abort}}, receive, _titled(send))
            except asyncio.CancelledError:  # a forced exit cancels running requests
                self.transport.abort()
                if self.cycle is not None:
                    self.cycle.disconnected = True

        self.app = app

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._account = account_of_address(self.client[0] if self.client else "")
        self._entered = self._counts.enter(self._account)
        if self._entered:
            self._watch()
        else:
            transport.write(FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._entered:
            super().data_received(data)
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Reject bytes that are not HTTP. A request in progress gets no response, or no more of it."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        super().send_400_response(msg)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if a request is complete and its response has not started.

        A disconnected client looks like a half-closed one, but it responds to data with a reset. The server therefore
        sends an interim response from time to time, which clients skip.
        """
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_started or self.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False
        self._ask(PROBE_SECONDS)
        return True

    def _ask(self, seconds: float) -> None:
        """Send an interim response, and repeat it at growing intervals."""
        if not self.transport.is_closing() and not self.cycle.response_started:
            self.transport.write(CONTINUE)
            self._probe = self.loop.call_later(seconds, self._ask, min(2 * seconds, MOST_PROBE_SECONDS))

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        if self._probe is not None:
            self._probe.cancel()
        if self._entered:
            self._entered = False
            self._counts.leave(self._account)
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the timer for an incomplete header. Further bytes do not restart it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._header_seconds, self._late)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def _titled(send: Send) -> Send:
    """Write header names as `Content-Type`, since some clients compare them case-sensitively."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [(name.title(), value) for name, value in message.get("headers", ())]}
        await send(message)

    return sending
