"""The web page: a chat in the browser, made of static files. Like any client, it uses the server's /v1 API.

`/` serves the page to browsers, which accept HTML; other clients get the response of the next route. The files are
under /web/. Only names present in `page/` when the server starts are served, so no path can leave the folder.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from localllm.server.errors import NotFound
from localllm.server.http import get
from localllm.server.security import ASSETS
from localllm.server.service import Service
from localllm.server.settings import ServerSettings
from localllm.server.web.files import PAGE, File, read_files
from localllm.server.web.known import Known

__all__ = ["routes"]

INDEX = "index.html"


def routes(service: Service, settings: ServerSettings) -> list[Route]:
    """Return the routes of the page, or none if it is disabled."""
    if not settings.web:
        return []
    files = read_files(PAGE)

    async def index(request: Request) -> Response:
        return _response(request, files[INDEX], {"Vary": "Accept"})

    async def one(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            raise NotFound(f"no file {name!r} of the web page")
        return _response(request, files[name])

    known = Known(service, settings).known
    return [
        _PageRoute("/", index, methods=["GET"]),
        *get((f"{ASSETS}{{name:path}}",), one),
        *get(("/api/known",), known),
    ]


class _PageRoute(Route):
    """Matches browsers only, since `/` also answers the probe that clients use to find an Ollama server."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return no match for a request that does not explicitly accept HTML."""
        found = super().matches(scope)
        accepted = [value for name, value in scope.get("headers", ()) if name == b"accept"]
        return found if any(b"text/html" in value.lower() for value in accepted) else (Match.NONE, {})


def _response(request: Request, file: File, more: dict[str, str] | None = None) -> Response:
    """Return a file, or 304 if the client has a current copy."""
    headers = file.headers | (more or {})
    given = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in given or given == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers, media_type=file.media_type)
