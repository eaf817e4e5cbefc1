"""The models behind one port: loaded on request, and unloaded in LRU order when memory is needed.

Models load one at a time. A model with running requests is never unloaded; requests that need its memory wait. The list
of models follows the files: `refresh` finds new ones, and drops deleted ones once their requests have ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic, time

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.base.printable import printable
from localllm.hub import NotHere, StoredModel
from localllm.hub.search import models_named
from localllm.models import ModelError
from localllm.server.bridge import in_daemon
from localllm.server.catalogue import Scan
from localllm.server.errors import TooManyRequests, UnknownModel, Unloadable
from localllm.server.info import ModelInfo, info_of
from localllm.server.served import Served

log = logging.getLogger("localllm.server")
Load = Callable[[Path], Served]
SCAN_SECONDS = 2.0  # minimum time between two scans
SCAN_SHARE = 0.05  # maximum share of the time that is spent in scans
PATIENCE = 1.0  # seconds that a request waits for a scan
ROOM_SECONDS = 60  # time that a load waits for busy models to end
LOOK_SECONDS = 0.5  # time after which it looks again


@dataclass(eq=False, slots=True)
class _Entry:
    """A model file, loaded or not."""

    model: StoredModel
    stamp: tuple[int, int]  # modification time and size of the file
    info: ModelInfo
    served: Served | None = None
    bytes: int = 0  # weights, KV cache and scratch; before the first load, the file size
    users: int = 0
    used: float = 0.0
    loading: asyncio.Task[None] | None = None
    keep: float | None = None  # seconds to stay loaded without requests; None: until memory is needed
    expiry: asyncio.TimerHandle | None = None
    gone: bool = False  # the file was deleted or replaced


class ModelRegistry:
    """Finds, loads and unloads models. Use it from the event loop only."""

    def __init__(
        self,
        scan: Scan,
        load: Load,
        memory: int = 0,
        embeds: bool = False,
        default: str = "",
        live: bool = False,
        strict: bool = False,
        hidden: StoredModel | None = None,
        extra: StoredModel | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Create a registry. `scan` returns the models, and `load` opens one; both may block. `memory` is the number of
        bytes for weights and caches; 0 means unlimited.

        `embeds` is true if `load` opens models for embeddings. `default` names the model of requests that name none. If
        `live`, the models may change. Unless `strict`, a single model matches every name. `hidden` is listed while
        it is loaded, and if the list is empty otherwise. `extra` is always listed. `names` are the user's short names.
        """
        self.default, self.memory = default, memory
        self._scan, self._load, self._embeds, self._live, self._strict = scan, load, embeds, live, strict
        self._entries: dict[str, _Entry] = {}
        self._left: list[_Entry] = []  # entries without a file that are still in memory
        self._told: set[tuple[str, str]] = set()  # unusable models that the log has
        self._loading: list[_Entry] = []  # entries that are being loaded; the loading threads change the list
        self._turn = asyncio.Lock()  # one load at a time
        self._freed = asyncio.Condition()
        self._scanning: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # keeps them from being collected
        self._next_scan = 0.0
        self._hidden = hidden.name if hidden is not None else ""
        self._always = [each for each in (extra, hidden) if each is not None]
        self._names = names or {}
        self._follow(self._look({}))

    # -- the list --------------------------------------------------------------------------------------------------

    @property
    def infos(self) -> list[ModelInfo]:
        """The models that clients see."""
        return [self._info(entry) for entry in self._listed()]

    def _listed(self) -> list[_Entry]:
        entries = list(self._entries.values())
        shown = [each for each in entries if each.info.id != self._hidden or each.served or each.loading]
        return shown or entries

    def _info(self, entry: _Entry) -> ModelInfo:
        """Return a model's description. A derived model has the state of its base."""
        at = self._base(entry)
        if at.keep is not None and at.served is not None:
            at.info.expires = time() + at.keep - (0 if at.users else monotonic() - at.used)
        if at is entry:
            return entry.info
        derived = entry.model.derived
        assert derived is not None
        created = int(derived.created)
        return replace(at.info, id=entry.info.id, created=created, digest=entry.info.digest, derived=derived)

    def _base(self, entry: _Entry) -> _Entry:
        """Return the entry that is loaded for this one."""
        derived = entry.model.derived
        return entry if derived is None else self._entries.get(derived.base, entry)

    async def refresh(self, now: bool = False) -> None:
        """Follow changes of the files. Without `now`, scan at most every few seconds, and wait for at most one."""
        if not self._live or (not now and monotonic() < self._next_scan):
            return
        if now and self._scanning is not None:  # it may have begun before the change
            await asyncio.wait([self._scanning])
        if self._scanning is None:
            self._scanning = asyncio.create_task(self._rescan())
        await asyncio.wait([self._scanning], timeout=None if now else PATIENCE)

    async def _rescan(self) -> None:
        began = monotonic()
        try:
            known = {id: (entry.stamp, entry.info) for id, entry in self._entries.items()}
            self._follow(await in_daemon(partial(self._look, known), lambda found: None))
        except (OSError, LocalLLMError) as error:
            log.warning("the models cannot be listed: %s", error)
        finally:
            ended = monotonic()
            self._next_scan = ended + max(SCAN_SECONDS, (ended - began) / SCAN_SHARE)
            self._scanning = None

    def _look(self, known: dict[str, tuple[tuple[int, int], ModelInfo]]) -> dict[str, _Entry]:
        """Return the models of a scan, each with its description. Runs in a thread."""
        found: dict[str, _Entry] = {}
        for model in [*self._scan(), *self._always]:
            if model.problem:
                if (model.name, model.problem) not in self._told:
                    self._told.add((model.name, model.problem))
                    log.warning("%s is skipped: %s", printable(model.name), printable(model.problem))
                continue
            if model.name in found:
                continue
            stamp = _stamp(model)
            before, info = known.get(model.name, ((0, 0), None))
            if info is None or before != stamp or info.path != str(model.path):
                info = info_of(model.name, model.path, embeds=self._embeds)
                if info.state == "failed" and self._live:  # a fixed model fails with the reason
                    log.warning("%s cannot be read: %s", printable(model.name), model.path)
            found[model.name] = _Entry(model, stamp, info, bytes=info.file_bytes)
        return found

    def _follow(self, found: dict[str, _Entry]) -> None:
        """Replace the list. Entries of unchanged files stay, with their loaded models."""
        for id, entry in found.items():
            old = self._entries.get(id)
            if old is not None and old.stamp == entry.stamp and old.model.path == entry.model.path:
                old.model = entry.model
                found[id] = old
        for id, old in self._entries.items():
            if found.get(id) is not old:
                old.gone = True
                if old.served is not None or old.loading is not None:
                    self._left.append(old)
                    self._expire_later(old)
        self._entries = found

    # -- names -----------------------------------------------------------------------------------------------------

    def find(self, name: str) -> ModelInfo:
        """Return the model with this name. Unless names are strict, a single model matches every name."""
        return self._info(self._entry(name))

    def stored(self, name: str) -> StoredModel:
        """Return the files of the model with this name."""
        return self._entry(name).model

    def loaded(self, name: str) -> Served | None:
        """Return a model if it is loaded now."""
        return self._base(self._entry(name)).served

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name) or self._entries.get(name.removesuffix(":latest"))
        if entry is None and not name:
            entry = self._unnamed()
        name = self._names.get(name.lower().removesuffix(":latest"), name)
        if entry is None and not self._strict and len(self._entries) == 1:
            [entry] = self._entries.values()
        if entry is None and name:
            with suppress(NotHere):  # an ambiguous name raises StoreError with the choices
                entry = self._entries.get(models_named(name, [each.model for each in self._entries.values()]).name)
        if entry is None:
            listed = [each.info.id for each in self._listed()]
            known = ", ".join(printable(each, 200) for each in listed[:20]) or "no models"
            asked = f"model {printable(name, 100)!r} is unknown" if name else "name a model"
            raise UnknownModel(f"{asked}; this server has {known}")
        return entry

    def _unnamed(self) -> _Entry | None:
        """Return the model of a request that names none: the default, the only loaded one, or the only one."""
        if self.default:
            return self._entry(self.default)
        loaded = [each for each in self._entries.values() if each.served is not None or each.loading is not None]
        for some in (loaded, self._listed()):
            if len(some) == 1:
                return some[0]
        return None

    # -- loading ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Served]:
        """Load a model if needed, and keep it loaded inside the `with`."""
        try:
            async with self._kept(name) as served:
                yield served
        except Unloadable as error:
            expected = isinstance(error.reason, LocalLLMError | ModelError | OSError)
            log.warning("%s", error.reason, exc_info=None if expected else error.reason)
            raise

    @asynccontextmanager
    async def _kept(self, name: str) -> AsyncIterator[Served]:
        entry = self._base(self._entry(name))
        entry.users += 1
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        try:
            if entry.served is None:
                await self._loaded(entry)
            assert entry.served is not None
            yield entry.served
        finally:
            entry.users -= 1
            entry.used = monotonic()
            self._expire_later(entry)
            async with self._freed:
                self._freed.notify_all()

    async def load(self, name: str) -> None:
        """Load a model now. Unlike `using`, raise the detailed error if the model cannot be loaded."""
        try:
            async with self._kept(name):
                pass
        except Unloadable as error:
            raise error.reason from None

    def keep(self, name: str, seconds: float | None) -> None:
        """Set how long a model stays loaded after its next requests. None: until memory is needed."""
        entry = self._base(self._entry(name))
        entry.keep, entry.info.expires = seconds, 0.0

    def unload(self, name: str) -> None:
        """Unload a model once its requests have ended."""
        entry = self._base(self._entry(name))
        entry.keep = 0.0
        self._expire_later(entry)

    def begin(self, name: str) -> None:
        """Begin to load a model, and return at once."""
        task = asyncio.create_task(self.load(self._entry(name).info.id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_logged)

    def end(self) -> bool:
        """Free all models after the event loop has ended. Return whether a model is still being loaded."""
        for entry in self._in_memory():
            assert entry.served is not None
            entry.served.close()
            entry.served = None
        return bool(self._loading)

    def _expire_later(self, entry: _Entry) -> None:
        """Unload an idle model when its time is over."""
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        keep = 0.0 if entry.gone else entry.keep
        if keep is None or entry.users or entry.served is None:
            return
        left = max(0.0, entry.used + keep - monotonic())
        entry.expiry = asyncio.get_running_loop().call_later(left, self._expire, entry)

    def _expire(self, entry: _Entry) -> None:
        entry.expiry = None
        if not entry.users and entry.served is not None:
            entry.loading = asyncio.create_task(self._unload(entry))  # a request that comes now waits for it
            entry.loading.add_done_callback(partial(_settled, entry))

    def _opened(self, entry: _Entry) -> Served:
        self._loading.append(entry)
        try:
            return self._load(entry.model.path)
        except Exception as error:  # the message may have the path, and quote the file
            raise Unloadable(f"{entry.info.id} cannot be loaded; the server's log says why", error) from None
        finally:
            self._loading.remove(entry)

    async def _loaded(self, entry: _Entry) -> None:
        """Wait until a model is loaded. All requests for it share one load, which outlives a client that leaves."""
        while entry.served is None:
            if entry.loading is None:
                entry.loading = asyncio.create_task(self._fetch(entry))
                entry.loading.add_done_callback(partial(_settled, entry))
            await asyncio.shield(entry.loading)

    async def _fetch(self, entry: _Entry) -> None:
        try:
            async with asyncio.timeout(ROOM_SECONDS) as limit:
                while True:
                    async with self._turn:
                        if not entry.users:  # all clients have left while the load waited
                            return
                        if await self._make_room(entry):
                            limit.reschedule(None)
                            await self._open(entry)
                            return
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_SECONDS), self._freed:
                            await self._freed.wait()
        except TimeoutError:
            raise TooManyRequests("all loaded models are busy; try again later", 10) from None

    async def _open(self, entry: _Entry) -> None:
        entry.info = replace(entry.info, state="loading")
        served: Served | None = None
        try:
            served = await in_daemon(partial(self._opened, entry), Served.close)
            entry.bytes = served.bytes
            entry.served = served
            if not await self._make_room(entry):  # with its KV cache, the model may exceed the memory limit
                raise TooManyRequests("all loaded models are busy; try again later", 10)
            info = await in_daemon(partial(info_of, entry.info.id, entry.model.path, served.model), lambda info: None)
            entry.info = replace(info, state="loaded")
        except BaseException as error:
            entry.served = None
            if entry in self._left:
                self._left.remove(entry)
            if served is not None:
                await asyncio.to_thread(served.close)
            busy = isinstance(error, TooManyRequests | asyncio.CancelledError)
            entry.info = replace(entry.info, state="unloaded" if busy else "failed")
            raise
        entry.used = monotonic()
        self._expire_later(entry)
        log.info("loaded %s", entry.info.id)

    async def _make_room(self, wanted: _Entry) -> bool:
        """Unload models, least recently used first, until `wanted` fits. Return False if only busy ones are left."""
        if not self.memory:
            return True
        if wanted.bytes > self.memory:
            problem = f"{wanted.info.id} needs {wanted.bytes >> 20} MiB, the server may use {self.memory >> 20} MiB ("
            raise LocalLLMError(
                Notice(problem, Setting("memory_limit"), "); a smaller context (", Setting("ctx_size"), ") needs less")
            )
        while wanted.bytes + sum(entry.bytes for entry in self._in_memory() if entry is not wanted) > self.memory:
            idle = [entry for entry in self._in_memory() if not entry.users and entry is not wanted]
            if not idle:
                return False
            await self._unload(min(idle, key=lambda entry: entry.used))
        return True

    def _in_memory(self) -> list[_Entry]:
        return [entry for entry in (*self._entries.values(), *self._left) if entry.served is not None]

    async def _unload(self, entry: _Entry) -> None:
        served, entry.served = entry.served, None
        entry.keep = None
        if entry in self._left:
            self._left.remove(entry)
        if served is not None:
            entry.info = replace(entry.info, state="unloaded")
            await asyncio.to_thread(served.close)
            log.info("unloaded %s", entry.info.id)


def _logged(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("%s", error)


def _settled(entry: _Entry, task: asyncio.Task[None]) -> None:
    entry.loading = None
    if not task.cancelled():
        task.exception()  # its waiters have it; without one, it is in the log


def _stamp(model: StoredModel) -> tuple[int, int]:
    """Return the modification time and the size of a model's file, or zeros."""
    try:
        facts = os.stat(model.path)
    except OSError:
        return 0, 0
    return facts.st_mtime_ns, facts.st_size
