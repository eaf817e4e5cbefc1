"""A whole server with a real model, without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

import localllm
from localllm.generation.interfaces import SchedulerLimits
from localllm.loading.resolve import resolve
from localllm.server.app import make_app
from localllm.server.catalogue import only
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.server.service import Service
from localllm.server.settings import ServerSettings

DEMO = Path(resolve("demo"))


def opened(path: Path, parallel: int = 3, **options: Any) -> Served:
    model = localllm.load(path, backend="cpu", threads=1, sequences=parallel, **options)
    return Served(model, SchedulerLimits(parallel=parallel))


@asynccontextmanager
async def client(registry: ModelRegistry, settings: ServerSettings | None = None) -> AsyncIterator[httpx.AsyncClient]:
    service = Service(registry)
    transport = httpx.ASGITransport(make_app(service, settings or ServerSettings()))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080", timeout=60) as one:
            yield one
    finally:
        registry.end()


def one_model(**options: Any) -> ModelRegistry:
    return ModelRegistry(only("demo", DEMO), lambda path: opened(path, **options))
