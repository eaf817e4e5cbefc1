"""Decide whether a request may change the models of this server: load, unload, download or delete them."""

from __future__ import annotations

from starlette.requests import Request

from localllm.server.errors import Forbidden, NotSupported
from localllm.server.security import urlsplit_host
from localllm.server.settings import ServerSettings

_ELSEWHERE = {
    "model": "this server has one fixed model; `localllm serve` without MODEL downloads, deletes and unloads models",
    "folder": "this server offers a folder of models; change its files, or start `localllm serve` without MODEL",
}


def may_unload(settings: ServerSettings, request: Request) -> None:
    """Raise NotSupported or Forbidden unless the request may unload models."""
    if settings.offer == "model":
        raise NotSupported(_ELSEWHERE["model"])
    if settings.locked:
        raise Forbidden(settings.locked)
    origin = request.headers.get("origin", "")
    if origin and not settings.keys and urlsplit_host(origin) != request.headers.get("host"):
        raise Forbidden("pages of other sites need an API key to change this server's models")


def may_change(settings: ServerSettings, request: Request) -> None:
    """Raise NotSupported or Forbidden unless the request may download, delete and create models."""
    if settings.offer == "folder":
        raise NotSupported(_ELSEWHERE["folder"])
    may_unload(settings, request)
