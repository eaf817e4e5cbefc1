"""The ASGI application: the web page and the routes of every API over one service, behind the checks for all requests.

request -> Watch (counts) -> Guard (host, origin, key) -> Gate (limits) -> the route of an API
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from localllm.server import anthropic, llamacpp, ollama, openai, web
from localllm.server.admission import Admission, Gate
from localllm.server.errors import Refusal, refusal_of
from localllm.server.http import refused
from localllm.server.limits import LOOKING
from localllm.server.metrics import Metrics, MetricsMiddleware
from localllm.server.observer import ServiceObserver
from localllm.server.security import ASSETS, Guard
from localllm.server.service import Service
from localllm.server.settings import ServerSettings

Routes = Callable[[Service, ServerSettings], list[Route]]
PROTOCOLS: tuple[Routes, ...] = (  # the first matching route is used
    openai.routes,
    anthropic.routes,
    web.routes,
    ollama.routes,
    llamacpp.routes,
)


def make_app(
    service: Service, settings: ServerSettings, metrics: Metrics | None = None, admission: Admission | None = None
) -> Starlette:
    """Create the ASGI application. `metrics` counts the scheduler's steps, and `admission` can reject new requests."""
    metrics = metrics or Metrics()
    admission = admission or Admission(settings.limits)
    if service.store is not None:
        service.store.pulls.stopping = lambda: admission.draining
    service.observer = ServiceObserver(metrics, admission.spend, settings.priorities)
    app = Starlette(
        routes=[route for protocol in PROTOCOLS for route in protocol(service, settings)],
        middleware=[
            Middleware(MetricsMiddleware, metrics),
            Middleware(Guard, settings),
            Middleware(Gate, admission),
            Middleware(_Refreshed, service),
        ],
        exception_handlers={HTTPException: _unrouted, Exception: _unexpected},
    )
    app.router.redirect_slashes = False
    return app


class _Refreshed:
    """Middleware that looks for new and deleted models before a request."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in LOOKING and not scope["path"].startswith(ASSETS):
            await self.service.refresh()
        await self.app(scope, receive, send)


def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = error.status_code == 405
    message = f"{request.method} is not allowed for this path" if known else "no such path"
    return refused(Refusal(error.status_code, "not_found", message), request.scope["path"])


def _unexpected(request: Request, error: Exception) -> Response:
    return refused(refusal_of(error), request.scope["path"])
