"""GET /api/known: the models with short names, and whether this client can load and download models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.requests import Request

from localllm.hub.short_names import KNOWN
from localllm.server.errors import Forbidden, NotSupported, refusal_of
from localllm.server.http import Handlers
from localllm.server.permission import may_change, may_unload
from localllm.server.settings import ServerSettings
from localllm.server.turn import Json


class Known(Handlers):
    """The HTTP handler of /api/known."""

    async def known(self, request: Request) -> Json:
        """Return the short names, the two permissions of this client, and why it cannot download models."""
        unloads, changes = (self._refusal(check, request) for check in (may_unload, may_change))
        return {
            "models": short_names(self.settings.names),
            "load": not unloads,
            "download": not changes,
            "reason": changes,
        }

    def _refusal(self, check: Callable[[ServerSettings, Request], None], request: Request) -> str:
        """Return why a check refuses a request, or ""."""
        try:
            check(self.settings, request)
        except (NotSupported, Forbidden) as error:
            return refusal_of(error).message
        return ""


def short_names(own: Mapping[str, str]) -> list[Json]:
    """Return the models with short names: the user's `own`, whose sizes are unknown, then ours. Sizes are in bytes."""
    return [
        *({"name": name, "reference": reference, "size": 0, "licence": ""} for name, reference in own.items()),
        *(
            {"name": each.name, "reference": each.reference, "size": each.bytes, "licence": each.licence}
            for each in KNOWN
            if each.name not in own
        ),
    ]
