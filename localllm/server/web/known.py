"""GET /api/known: what the page's list of models offers. Models with short names, and what clients may do here."""

from __future__ import annotations

from starlette.requests import Request

from localllm.hub.short_names import KNOWN
from localllm.server.http import Handlers
from localllm.server.turn import Json


class Known(Handlers):
    """The HTTP handler of /api/known."""

    async def known(self, request: Request) -> Json:
        reason = "This server does not download models."
        return {"models": short_names(), "load": False, "download": False, "reason": reason}


def short_names() -> list[Json]:
    """Return the models with short names. Sizes are in bytes."""
    return [
        {"name": each.name, "reference": each.reference, "size": each.bytes, "licence": each.licence} for each in KNOWN
    ]
