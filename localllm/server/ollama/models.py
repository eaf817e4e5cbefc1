"""Models in Ollama's format: /api/tags, /api/show, /api/ps, and refusals of unsupported operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.server.errors import NotFound, NotSupported
from localllm.server.http import Handlers, ndjson
from localllm.server.info import ModelInfo
from localllm.server.ollama.reply import CAPABILITIES, details, listed
from localllm.server.ollama.request import ModelBody
from localllm.server.openai.models import modified
from localllm.server.turn import Json

VERSION = "0.33.0"  # reported version of Ollama; clients require a minimum version
NEVER = "2318-01-01T00:00:00Z"  # `expires_at` of a loaded model, which stays loaded until memory is needed


class PullBody(ModelBody):
    """The body of /api/pull."""

    stream: bool = True


class OllamaModels(Handlers):
    """HTTP handlers of models."""

    async def tags(self, request: Request) -> Json:
        return {"models": [listed(model) for model in self.service.models()]}

    async def ps(self, request: Request) -> Json:
        loaded = [model for model in self.service.models() if model.state == "loaded"]
        return {"models": [_running(model) for model in loaded]}

    async def show(self, request: Request, body: ModelBody) -> Json:
        model = body.find(self.service)
        return {
            "modelfile": f"# Modelfile made by localllm\nFROM {Path(model.path).name}\n",
            "parameters": "",
            "template": model.template,
            "details": details(model),
            "model_info": _info(model),
            "capabilities": [name for name in CAPABILITIES if name in model.capabilities],
            "modified_at": modified(model),
        }

    async def version(self, request: Request) -> Json:
        return {"version": VERSION}

    async def running(self, request: Request) -> Response:
        """Answer the probe that clients use to find an Ollama server."""
        return Response("Ollama is running", media_type="text/plain")

    async def pull(self, request: Request, body: PullBody) -> Response | Json:
        """Report success for a local model. Refuse to pull other models."""
        name = body.wanted.removesuffix(":latest")
        if not any(name == model.id for model in self.service.models()):
            raise NotSupported(f"{name!r} is not here, and this server does not download models")
        return ndjson(_success(), self.settings.limits) if body.stream else {"status": "success"}

    async def unsupported(self, request: Request) -> Json:
        raise NotSupported("this server does not create, copy, push or delete models; change its folder of models")

    async def blob(self, request: Request) -> Json:
        raise NotFound("no such blob")


async def _success() -> Any:
    yield {"status": "success"}


def _running(model: ModelInfo) -> Json:
    found = listed(model)
    found.pop("modified_at")
    return found | {"expires_at": NEVER, "size_vram": 0, "context_length": model.context}


def _info(model: ModelInfo) -> Json:
    """Return the known metadata under GGUF's key names."""
    architecture = model.architecture
    return {
        "general.architecture": architecture,
        "general.basename": model.id,
        "general.parameter_count": model.parameters,
        f"{architecture}.context_length": model.trained_context,
        f"{architecture}.embedding_length": model.width,
        f"{architecture}.vocab_size": model.vocabulary,
    }
