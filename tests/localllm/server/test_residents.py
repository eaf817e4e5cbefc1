"""Models that share memory: no client is refused, closed or delayed because another client asks for another model."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.generation.interfaces import SchedulerLimits
from localllm.hub import StoredModel
from localllm.server import residents
from localllm.server.registry import ModelRegistry
from localllm.server.residents import Entry
from localllm.server.served import Served
from localllm.server.service import Service
from tests.localllm.server.store_site import HELLO, OFFERS, Site
from tests.localllm.support import write_model

MEMORY = 100_000_000
SIZES = {"a": 60, "b": 30, "c": 50}  # percent of the memory
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}


class Large(Served):
    """A model that counts as `share` percent of the memory, and takes `seconds` to close."""

    share, seconds = 0, 0.0

    @property
    def bytes(self) -> int:
        return self.share * MEMORY // 100

    def close(self) -> None:
        time.sleep(self.seconds)
        super().close()


class Three(Site):
    """A server with three models. Only b and one other fit into memory."""

    def __init__(self, root: Path, known: bool = True, fails: float = 0) -> None:
        for name in SIZES:
            write_model(root / f"{name}.gguf")
        self.fails = fails
        self.loads = []
        scan = [StoredModel(name, "", (root / f"{name}.gguf",)) for name in SIZES]
        self._load = self._opened
        self.registry = ModelRegistry(lambda: scan, self.load, MEMORY, strict=True)
        self.service = Service(self.registry)
        for name, entry in self.entries.items():
            entry.bytes = SIZES[name] * MEMORY // 100 if known else entry.bytes

    @property
    def entries(self) -> dict[str, Entry]:
        return self.registry._entries

    def _opened(self, path: Path) -> Served:
        if path.stem == "c" and self.fails:
            time.sleep(self.fails)
            raise ValueError("damaged")
        model = localllm.load(path, backend="cpu", threads=1, sequences=3, ctx_size=2000)
        made = Large(model, SchedulerLimits(parallel=3))
        made.share = SIZES[path.stem]
        return made

    def loaded(self) -> list[str]:
        return sorted(name for name, entry in self.entries.items() if entry.served is not None)


@pytest.fixture(autouse=True)
def _long_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warnings.warn", lambda *_, **__: None)  # the model was trained on shorter texts


def test_no_model_is_unloaded_for_one_that_does_not_fit_anyway(tmp_path: Path) -> None:
    async def run() -> None:
        site = Three(tmp_path)
        async with site.client(OFFERS) as one:
            await one.said("b")
            async with site.registry.using("a"):
                waiting = asyncio.create_task(one.said("c"))
                await asyncio.sleep(0.3)
                assert site.loaded() == ["a", "b"]
            await waiting
            assert site.loaded() == ["c"]

    asyncio.run(run())


def test_a_model_that_does_not_fit_with_its_cache_waits_and_closes_nobody_s(tmp_path: Path) -> None:
    """The file of c would fit together with a. While room is made for its cache, more requests for c arrive."""

    async def run() -> None:
        site = Three(tmp_path, known=False)
        async with site.client(OFFERS) as one:
            await one.said("b")
            await one.said("a")
            last = site.entries["b"].served
            assert isinstance(last, Large)
            last.seconds = 0.3
            async with site.registry.using("a"):
                requests = [asyncio.create_task(one.said("c"))]
                while "c" not in [path.stem for path in site.loads]:
                    await asyncio.sleep(0.01)
                for _ in range(12):
                    await asyncio.sleep(0.05)
                    requests.append(asyncio.create_task(one.told("/v1/completions", model="c", **LONG)))
            await asyncio.gather(*requests)

    asyncio.run(run())


def test_constant_use_of_one_model_does_not_keep_another_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "FAIR_SECONDS", 0.2)
    monkeypatch.setattr(residents, "ROOM_SECONDS", 8)

    async def run() -> None:
        site = Three(tmp_path)
        async with site.client(OFFERS) as one:
            stop = asyncio.Event()

            async def again() -> None:
                while not stop.is_set():
                    await one.told("/v1/completions", model="a", prompt="a", max_tokens=200, ignore_eos=True)

            others = [asyncio.create_task(again()) for _ in range(3)]
            await asyncio.sleep(0.3)
            await one.said("c")
            await one.said("a")
            await one.said("c")
            stop.set()
            await asyncio.gather(*others)

    asyncio.run(run())


def test_a_load_that_gets_no_room_holds_others_up_only_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FAIR_SECONDS": 0.1, "HOLD_SECONDS": 0.5, "ROOM_SECONDS": 3, "LOOK_SECONDS": 0.05}.items():
        monkeypatch.setattr(residents, name, value)

    async def run() -> None:
        site = Three(tmp_path)
        async with site.client(OFFERS) as one, site.registry.using("a"):
            waiting = asyncio.create_task(one.told("/v1/chat/completions", 429, model="c", **HELLO))
            await asyncio.sleep(0.3)
            assert site.entries["a"].held
            began = time.monotonic()
            await one.said("a")
            assert time.monotonic() - began > 0.05
            assert not waiting.done()
            await waiting
            again = asyncio.create_task(one.told("/v1/chat/completions", 429, model="c", **HELLO))
            await asyncio.sleep(0.3)
            assert site.entries["a"].held < time.monotonic()  # not again so soon
            await again

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_is_not_tried_again_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        site = Three(tmp_path, fails=0.2)
        async with site.client(OFFERS) as one:
            for _ in range(5):
                await asyncio.gather(*(one.told("/v1/chat/completions", 503, model="c", **HELLO) for _ in range(3)))
            await one.said("b")
            assert [path.stem for path in site.loads] == ["c", "b"]
            site.fails = 0
            site.entries["c"].retry = 0.0  # the time is over
            await one.said("c")

    asyncio.run(run())


def test_a_request_that_arrives_as_a_model_is_unloaded_loads_it_again(tmp_path: Path) -> None:
    async def run() -> None:
        site = Three(tmp_path)
        async with site.client(OFFERS) as one:
            await one.said("b")
            site.registry._residents._expire(site.entries["b"])
            async with site.registry.using("b") as served:
                await asyncio.sleep(0.3)
                assert site.entries["b"].served is served
                await one.said("b")

    asyncio.run(run())
