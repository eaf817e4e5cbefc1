"""The application: every protocol's routes over one service."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from localllm.server.anthropic.routes import routes as anthropic
from localllm.server.http import refused
from localllm.server.openai.routes import routes as openai
from localllm.server.refusal import Refusal, refusal_of
from localllm.server.settings import Settings
from localllm.server.turn import Service

Routes = Callable[[Service, Settings], list[Route]]
PROTOCOLS: tuple[Routes, ...] = (openai, anthropic)  # the first route that fits a path is taken


def make_app(service: Service, settings: Settings) -> Starlette:
    """Make the ASGI application."""
    return Starlette(
        routes=[route for protocol in PROTOCOLS for route in protocol(service, settings)],
        exception_handlers={HTTPException: _unrouted, Exception: _unexpected},
    )


def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.scope["path"]
    message = f"{method} is not allowed for this path" if error.status_code == 405 else "no such path"
    return refused(Refusal(error.status_code, "not_found", message), path)


def _unexpected(request: Request, error: Exception) -> Response:
    return refused(refusal_of(error), request.scope["path"])
