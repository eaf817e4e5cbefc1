"""The models behind one port: loaded on request, and unloaded in LRU order when memory is needed.

Models load one at a time. A model with running requests is never unloaded; requests that need its memory wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic

from localllm.base.errors import LocalLLMError
from localllm.base.files.regular import inside
from localllm.base.notices import Notice, Setting
from localllm.base.printable import printable
from localllm.server.bridge import in_daemon
from localllm.server.errors import TooManyRequests, UnknownModel, Unloadable
from localllm.server.info import ModelInfo, info_of
from localllm.server.served import Served

log = logging.getLogger("localllm.server")


@dataclass(eq=False, slots=True)
class _Entry:
    """A model file, loaded or not."""

    path: Path
    info: ModelInfo
    served: Served | None = None
    bytes: int = 0  # weights, KV cache and scratch; before the first load, the file size
    users: int = 0
    used: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ModelRegistry:
    """Finds, loads and unloads models. Use it from the event loop only."""

    def __init__(
        self, models: Iterable[tuple[str, Path]], load: Callable[[Path], Served], memory: int = 0, embeds: bool = False
    ) -> None:
        """Create a registry. `models` has names and files. `load` opens a file and may block. `memory` is the number of
        bytes for weights and caches; 0 means unlimited.

        `embeds` is true if `load` opens models for embeddings.
        """
        infos = [(path, info_of(name, path, embeds=embeds)) for name, path in models]
        self._entries = {info.id: _Entry(path, info, bytes=info.file_bytes) for path, info in infos}
        self._load, self._memory = load, memory
        self._loading: list[_Entry] = []  # entries that are being loaded; the loading threads change the list
        self._turn = asyncio.Lock()  # one load at a time
        self._freed = asyncio.Condition()

    @property
    def infos(self) -> list[ModelInfo]:
        return [entry.info for entry in self._entries.values()]

    def find(self, name: str) -> ModelInfo:
        """Return the model with this name. A single model matches every name."""
        return self._entry(name).info

    def loaded(self, name: str) -> Served | None:
        """Return a model if it is loaded now."""
        return self._entry(name).served

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Served]:
        """Load a model if needed, and keep it loaded inside the `with`."""
        try:
            async with self._kept(name) as served:
                yield served
        except Unloadable as error:
            log.warning("%s", error.reason)
            raise

    @asynccontextmanager
    async def _kept(self, name: str) -> AsyncIterator[Served]:
        entry = self._entry(name)
        entry.users += 1
        try:
            if entry.served is None:
                await self._fetch(entry)
            assert entry.served is not None
            yield entry.served
        finally:
            entry.users -= 1
            entry.used = monotonic()
            async with self._freed:
                self._freed.notify_all()

    async def load(self, name: str) -> None:
        """Load a model now. Unlike `using`, raise the detailed error if the model cannot be loaded."""
        try:
            async with self._kept(name):
                pass
        except Unloadable as error:
            raise error.reason from None

    def end(self) -> bool:
        """Free all models after the event loop has ended. Return whether a model is still being loaded."""
        for entry in self._in_memory():
            assert entry.served is not None
            entry.served.close()
            entry.served = None
        return bool(self._loading)

    def _opened(self, entry: _Entry) -> Served:
        self._loading.append(entry)
        try:
            return self._load(entry.path)
        except LocalLLMError as error:  # the message has the path, and may quote the file
            raise Unloadable(f"{entry.info.id} cannot be loaded; the server's log says why", error) from None
        finally:
            self._loading.remove(entry)

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name) or self._entries.get(name.removesuffix(":latest"))
        if entry is None and len(self._entries) == 1:
            [entry] = self._entries.values()
        if entry is None:
            known = ", ".join(sorted(self._entries)[:20])
            asked = f"model {printable(name, 100)!r} is unknown" if name else "name a model"
            raise UnknownModel(f"{asked}; this server has {known}")
        return entry

    async def _fetch(self, entry: _Entry) -> None:
        async with self._turn:
            if entry.served is not None:
                return
            await self._make_room(entry)
            entry.info = replace(entry.info, state="loading")
            try:
                entry.served = await in_daemon(partial(self._opened, entry), Served.close)
                entry.bytes = entry.served.bytes
                await self._make_room(entry)  # the loaded model, with its KV cache, may exceed the memory limit
            except BaseException:
                opened, entry.served = entry.served, None
                if opened is not None:
                    await asyncio.to_thread(opened.close)
                entry.info = replace(entry.info, state="failed")
                raise
            entry.info = replace(info_of(entry.info.id, entry.path, entry.served.model), state="loaded")
            log.info("loaded %s", entry.info.id)

    async def _make_room(self, wanted: _Entry) -> None:
        """Unload models, least recently used first, until `wanted` fits."""
        if not self._memory:
            return
        if wanted.bytes > self._memory:
            problem = f"{wanted.info.id} needs {wanted.bytes >> 20} MiB, the server may use {self._memory >> 20} MiB ("
            raise LocalLLMError(
                Notice(problem, Setting("memory_limit"), "); a smaller context (", Setting("ctx_size"), ") needs less")
            )
        while wanted.bytes + sum(entry.bytes for entry in self._in_memory() if entry is not wanted) > self._memory:
            idle = [entry for entry in self._in_memory() if not entry.users]
            if idle:
                await self._unload(min(idle, key=lambda entry: entry.used))
                continue
            try:
                async with asyncio.timeout(60), self._freed:
                    await self._freed.wait()
            except TimeoutError:
                raise TooManyRequests("all loaded models are busy; try again later", 10) from None

    def _in_memory(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.served is not None]

    async def _unload(self, entry: _Entry) -> None:
        served, entry.served = entry.served, None
        if served is not None:
            entry.info = replace(entry.info, state="unloaded")
            await asyncio.to_thread(served.close)
            log.info("unloaded %s", entry.info.id)


def models_in(folder: Path) -> list[tuple[str, Path]]:
    """Return the names and files of the models in a folder and its subfolders. A split model counts once, and mmproj
    files are skipped."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.gguf")):
        name = path.relative_to(folder).as_posix().removesuffix(".gguf")
        if not inside(path, folder):
            log.warning("%s is skipped: it is a link to a file outside %s", name, folder)
            continue
        if path.name.startswith("mmproj") or not path.is_file():
            continue
        first, _, parts = name.rpartition("-00001-of-")
        if first and parts.isdigit():
            name = first
        elif _is_part(name):
            continue
        found.setdefault(name, path)
    if not found:
        raise LocalLLMError(f"{folder}: no GGUF files in this folder; give a folder with models")
    return list(found.items())


def _is_part(name: str) -> bool:
    rest, _, count = name.rpartition("-of-")
    return count.isdigit() and rest.rpartition("-")[2].isdigit() and len(count) == 5
