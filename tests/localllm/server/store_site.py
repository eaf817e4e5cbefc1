"""A server without MODEL over the stores below a folder, and a client of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from localllm.server.app import make_app
from localllm.server.catalogue import stores
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.server.service import Service
from localllm.server.settings import ServerSettings
from localllm.server.store import ModelStore
from tests.localllm.hub.stores import lm_studio_model, places
from tests.localllm.server.calls import LOCAL
from tests.localllm.server.whole import opened

TOY, OTHER, BIG = "ann/Toy-GGUF:Q4_K_M", "ann/Toy-GGUF:Q8_0", "ann/Big-GGUF:Q4_0"
OFFERS = ServerSettings(offer="stores")
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}


class Site:
    """A server over the stores below a folder."""

    def __init__(self, root: Path, endpoint: str, **options: Any) -> None:
        self.places = places(root)
        self.loads: list[Path] = []
        options.setdefault("load", lambda path: opened(path, ctx_size=128))
        self._load: Callable[[Path], Served] = options.pop("load")
        self.registry = ModelRegistry(stores(self.places), self.load, live=True, strict=True, **options)
        self.service = Service(self.registry)
        self.service.store = ModelStore(self.places, self.registry, lambda: 1 << 30, endpoint=endpoint)

    def load(self, path: Path) -> Served:
        self.loads.append(path)
        return self._load(path)

    @asynccontextmanager
    async def client(self, settings: ServerSettings = OFFERS) -> AsyncIterator[Client]:
        transport = httpx.ASGITransport(make_app(self.service, settings))
        try:
            async with httpx.AsyncClient(transport=transport, base_url=LOCAL, timeout=60) as http:
                yield Client(http)
        finally:
            self.registry.end()


class Client:
    """Requests to a server."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def told(self, path: str, status: int = 200, method: str = "", **body: Any) -> Any:
        """Return the JSON of an answer, or its lines."""
        answer = await self.http.request(method or ("POST" if body else "GET"), path, json=body or None)
        assert answer.status_code == status, answer.text
        lines = [json.loads(line) for line in answer.text.splitlines()]
        return lines if answer.headers.get("content-type") == "application/x-ndjson" else lines[0] if lines else {}

    async def names(self) -> list[str]:
        return sorted(model["id"] for model in (await self.told("/v1/models"))["data"])

    async def said(self, model: str, **more: Any) -> str:
        answer = await self.told("/v1/chat/completions", model=model, **HELLO, **more)
        return str(answer["choices"][0]["message"]["content"])

    async def pulled(self, name: str) -> None:
        assert (await self.told("/api/pull", model=name, stream=False)) == {"status": "success"}


def put(root: Path, place: str, data: bytes) -> Path:
    path = lm_studio_model(root, place)
    path.write_bytes(data)
    return path
