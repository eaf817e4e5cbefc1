"""Models in Ollama's format: lists, descriptions, and changes (/api/pull, /api/delete, /api/copy, /api/create)."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localllm.server.derived import read_options
from localllm.server.errors import NotFound, NotSupported
from localllm.server.http import Handlers, ndjson, reply
from localllm.server.info import ModelInfo
from localllm.server.ollama.reply import CAPABILITIES, details, listed
from localllm.server.ollama.request import ModelBody
from localllm.server.openai.models import modified
from localllm.server.permission import may_change
from localllm.server.store import ModelStore
from localllm.server.structs import Body, Wrong
from localllm.server.structs import listed as texts
from localllm.server.turn import Json

VERSION = "0.33.0"  # reported version of Ollama; clients require a minimum version
NEVER = "2318-01-01T00:00:00Z"  # `expires_at` of a loaded model that stays until memory is needed
MAX_MESSAGES = 1000
MAX_TEXT = 1 << 18  # maximum characters of a system prompt or licence


class PullBody(ModelBody):
    """The body of /api/pull."""

    stream: bool = True
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.insecure:
            raise Wrong("insecure", "downloads always use the address in HF_ENDPOINT; leave it out")


class CopyBody(Body):
    """The body of /api/copy."""

    source: str
    destination: str


class FirstMessage(Body):
    """A message at the beginning of every conversation."""

    role: str
    content: Annotated[str, Meta(max_length=MAX_TEXT)]

    def __post_init__(self) -> None:
        if self.role not in ("system", "user", "assistant"):
            raise Wrong("role", "expected one of system, user, assistant")


class CreateBody(ModelBody, kw_only=True):
    """The body of /api/create. The fields after `stream` are refused."""

    from_: str = msgspec.field(default="", name="from")
    system: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    parameters: Json = {}
    messages: Annotated[list[FirstMessage], Meta(max_length=MAX_MESSAGES)] = []
    license: Annotated[str, Meta(max_length=MAX_TEXT)] | Annotated[list[str], Meta(max_length=100)] = ""
    stream: bool = True
    template: str = ""
    quantize: str = ""
    files: Json = {}
    adapters: Json = {}

    def __post_init__(self) -> None:
        for name, reason in _REFUSED.items():
            if getattr(self, name):
                raise Wrong(name, reason)
        if not self.from_:
            raise Wrong("from", "required: the name of a model that /api/tags lists")


_REFUSED = {
    "template": "is not supported: a derived model uses its base's chat template",
    "quantize": "is not supported: `localllm quantize` makes a smaller file",
    "files": "is not supported: this server accepts no uploads; `localllm serve` can offer a folder of files",
    "adapters": "is not supported: adapters are not implemented",
}


class OllamaModels(Handlers):
    """HTTP handlers of models."""

    async def tags(self, request: Request) -> Json:
        return {"models": [listed(model) for model in self.service.models()]}

    async def ps(self, request: Request) -> Json:
        loaded = [model for model in self.service.models() if model.state == "loaded" and model.derived is None]
        return {"models": [_running(model) for model in loaded]}

    async def show(self, request: Request, body: ModelBody) -> Json:
        model = body.find(self.service)
        parameters = _parameters(model)
        found = {
            "modelfile": _modelfile(model, parameters),
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters),
            "template": model.template,
            "details": details(model),
            "model_info": _info(model),
            "capabilities": [name for name in CAPABILITIES if name in model.capabilities],
            "modified_at": modified(model),
        }
        if (derived := model.derived) is not None:
            given: Json = {"system": derived.system, "messages": list(derived.messages), "license": derived.license}
            found |= {name: value for name, value in given.items() if value}
        return found

    async def version(self, request: Request) -> Json:
        return {"version": VERSION}

    async def running(self, request: Request) -> Response:
        """Answer the probe that clients use to find an Ollama server."""
        return Response("Ollama is running", media_type="text/plain")

    # -- changes ---------------------------------------------------------------------------------------------------

    async def pull(self, request: Request, body: PullBody) -> Response | Json:
        """Download a model. Report success at once for a model that is here."""
        if self.service.store is None and any(_is(model, body.wanted) for model in self.service.models()):
            return await self._told(_success(), body.stream)
        may_change(self.settings, request)
        return await self._told(self._store.pull(body.wanted), body.stream)

    async def create(self, request: Request, body: CreateBody) -> Response | Json:
        """Make a derived model: a system prompt, parameters and messages for another model."""
        read_options(body.parameters)
        messages = tuple({"role": each.role, "content": each.content} for each in body.messages)
        licence = "\n\n".join(texts(body.license or ()))
        await self._store.create(
            body.wanted, body.from_, system=body.system, parameters=body.parameters, messages=messages, license=licence
        )
        return await self._told(_success(), body.stream)

    async def copy(self, request: Request, body: CopyBody) -> Response:
        await self._store.copy(body.source, body.destination)
        return Response(status_code=200)

    async def delete(self, request: Request, body: ModelBody) -> Response:
        await self._store.delete(body.wanted)
        return Response(status_code=200)

    async def unsupported(self, request: Request) -> Json:
        raise NotSupported(
            "this server does not upload models or accept files; /api/create derives models from the ones it has"
        )

    async def blob(self, request: Request) -> Json:
        raise NotFound("no such blob")

    @property
    def _store(self) -> ModelStore:
        assert self.service.store is not None, "checked by the settings"
        return self.service.store

    async def _told(self, lines: AsyncGenerator[Json, None], stream: bool) -> Response | Json:
        """Stream the lines, or return the last one."""
        if stream:
            return ndjson(lines, self.settings.limits)
        last: Json = {}
        try:
            async for line in lines:
                last = line
        finally:
            await lines.aclose()
        return reply(last)


async def _success() -> AsyncGenerator[Json, None]:
    yield {"status": "success"}


def _is(model: ModelInfo, name: str) -> bool:
    return model.id.removesuffix(":latest") == name.removesuffix(":latest")


def _running(model: ModelInfo) -> Json:
    found = listed(model)
    found.pop("modified_at")
    until = datetime.fromtimestamp(model.expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if model.expires else NEVER
    return found | {"expires_at": until, "size_vram": 0, "context_length": model.context}


def _parameters(model: ModelInfo) -> list[tuple[str, str]]:
    """Return the names and values of a derived model's parameters. A list is several of them."""
    given = model.derived.parameters if model.derived is not None else {}
    return [
        (name, json.dumps(each, ensure_ascii=False))
        for name, value in given.items()
        for each in (value if isinstance(value, list) else [value])
    ]


def _modelfile(model: ModelInfo, parameters: list[tuple[str, str]]) -> str:
    derived = model.derived
    lines = ["# Modelfile made by localllm", f"FROM {Path(model.path).name if derived is None else derived.base}"]
    lines += [f"PARAMETER {name} {value}" for name, value in parameters]
    if derived is not None:
        lines += [f'SYSTEM """{derived.system}"""'] if derived.system else []
        lines += [f"MESSAGE {each.get('role', '')} {each.get('content', '')}" for each in derived.messages]
    return "\n".join(lines) + "\n"


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
