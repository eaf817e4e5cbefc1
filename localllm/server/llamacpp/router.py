"""POST /models/load and /models/unload, as in llama-server's router, which serves several models."""

from __future__ import annotations

from starlette.requests import Request

from localllm.server.errors import BadRequest
from localllm.server.http import Handlers
from localllm.server.structs import Body
from localllm.server.turn import Json


class RouterBody(Body):
    """The body of both requests."""

    model: str


class Router(Handlers):
    """HTTP handlers that load and unload models. GET /models has their states."""

    async def load(self, request: Request, body: RouterBody) -> Json:
        """Begin to load a model. GET /models shows when it is loaded, or that it failed."""
        model = self.service.find(body.model)
        if model.state != "loaded":
            self.service.registry.begin(model.id)
        return {"success": True}

    async def unload(self, request: Request, body: RouterBody) -> Json:
        """Unload a model once its requests have ended."""
        model = self.service.find(body.model)
        if model.state not in ("loaded", "loading"):
            raise BadRequest("model is not loaded", "model")
        self.service.registry.unload(model.id)
        return {"success": True}
