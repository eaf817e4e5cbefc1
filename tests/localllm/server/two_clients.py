"""Two clients of one server with a real model. The server identifies clients by their addresses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

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
ONE, OTHER = "10.0.0.1", "10.0.0.2"
CONTEXT = 256
WAIT = 30  # seconds after which a test counts as hanging
SHORT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
Clients = dict[str, httpx.AsyncClient]


@asynccontextmanager
async def clients_of(registry: ModelRegistry) -> AsyncIterator[Clients]:
    app = make_app(Service(registry), ServerSettings())
    made = {
        address: httpx.AsyncClient(
            transport=httpx.ASGITransport(app, client=(address, 1)), base_url="http://localhost", timeout=WAIT
        )
        for address in (ONE, OTHER)
    }
    try:
        yield made
    finally:
        for each in made.values():
            await each.aclose()
        registry.end()


@asynccontextmanager
async def clients(limits: SchedulerLimits | None = None, context: int = CONTEXT) -> AsyncIterator[Clients]:
    """Yield HTTP clients with two addresses, connected to one server."""
    limits = limits or SchedulerLimits(parallel=2)

    def opened(path: Path) -> Served:
        model = localllm.load(path, backend="cpu", threads=1, sequences=limits.parallel, ctx_size=context)
        return Served(model, limits)

    registry = ModelRegistry(only("demo", DEMO), opened)
    async with clients_of(registry) as made:
        yield made


def blocked(job: threading.Event, free: threading.Event) -> None:
    job.set()
    assert free.wait(WAIT)


async def short_answers(http: Clients) -> None:
    """Check that the other client's requests are answered while the first client's work runs."""
    for path, body in (
        ("/v1/chat/completions", SHORT),
        ("/tokenize", {"content": "hello"}),
        ("/completion", {"prompt": "Once", "n_predict": 2}),
        ("/v1/messages/count_tokens", {"messages": SHORT["messages"]}),
    ):
        answer = await asyncio.wait_for(http[OTHER].post(path, json=body), WAIT)
        assert answer.status_code == 200, answer.text
