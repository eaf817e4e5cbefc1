"""The repositories of the test hub, and a client that pulls them into a cache."""

from __future__ import annotations

import os
from pathlib import Path

from localllm.hub import StoredModel, StoreFolders, everything
from localllm.hub.client import Hub
from localllm.hub.fetch import FetchHooks
from localllm.hub.pull import Pulled, pull_model
from localllm.hub.reference import reference
from tests.localllm.hub.hub_server import HubServer

GIB = 1 << 30
DATA = {name: os.urandom(300_000 + 1000 * n) for n, name in enumerate(("Q2_K", "Q4_K_M", "Q8_0", "F16"))}
FILES = {f"Toy-{name}.gguf": data for name, data in DATA.items()}
PARTS = {f"Big-Q4_0/Big-Q4_0-{n:05d}-of-00003.gguf": os.urandom(70_000 + n) for n in (1, 2, 3)}


class Client:
    """Client that pulls models into a cache, and records the messages, waits and progress."""

    def __init__(self, server: HubServer, cache: Path) -> None:
        self.server, self.cache = server, cache
        self.told: list[str] = []
        self.waited: list[float] = []
        self.progress: list[tuple[str, int, int]] = []

    def pull(self, name: str, free: int = 16 * GIB, hub: Hub | None = None) -> Pulled:
        self.told, self.waited, self.progress = [], [], []
        return pull_model(
            hub or Hub(self.server.url), reference(name), self.cache, free,
            FetchHooks(lambda *step: self.progress.append(step), self.told.append, self.waited.append),
        )  # fmt: skip

    def models(self) -> list[StoredModel]:
        return everything(StoreFolders(self.cache))

    def partials(self) -> list[Path]:
        return list(self.cache.glob("*/blobs/*.incomplete"))
