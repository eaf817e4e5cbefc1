"""The models in memory: loaded on request, one at a time, and unloaded in LRU order when memory is needed.

A model with running requests is never unloaded. A load that needs its memory waits; after a while, new requests for
that model wait too, so that constant use of one model cannot keep another one out. A model that cannot be loaded is
tried again only after some time, so that it costs the others a small share of their time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.hub import StoredModel
from localllm.server.bridge import in_daemon
from localllm.server.errors import TooManyRequests, Unloadable
from localllm.server.info import ModelInfo, State, info_of
from localllm.server.served import Served

log = logging.getLogger("localllm.server")
Load = Callable[[Path], Served]
ROOM_SECONDS = 60  # time that a load waits for busy models to end
FAIR_SECONDS = 5  # time after which a waiting load keeps new requests from the models in its way
HOLD_SECONDS = 10  # maximum time that such requests wait
LOOK_SECONDS = 0.5  # time after which a waiting load looks again
FAILED_SHARE = 0.1  # maximum share of the time that is spent on a model that cannot be loaded


@dataclass(eq=False, slots=True)
class Entry:
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
    held: float = 0.0  # until when new requests wait, so that another model can be loaded
    failure: Unloadable | None = None  # why the last load failed
    retry: float = 0.0  # when to try again


class Residents:
    """Loads and unloads models within a memory limit. Use it from the event loop only."""

    def __init__(self, load: Load, memory: int, listed: Callable[[], Iterable[Entry]]) -> None:
        """Create an empty set. `load` opens a model and may block, `memory` is the limit in bytes (0: none), and
        `listed` returns the models with a file."""
        self._load, self.memory, self._listed = load, memory, listed
        self.left: list[Entry] = []  # entries without a file that are still in memory
        self._loading: list[Entry] = []  # entries that are being loaded; the loading threads change the list
        self._turn = asyncio.Lock()  # one load at a time
        self._changed = asyncio.Condition()  # a request has ended, or a load
        self._closing: set[asyncio.Task[None]] = set()  # models that are being freed
        self._begun: dict[Entry, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def using(self, entry: Entry) -> AsyncIterator[Served]:
        """Load a model if needed, and keep it loaded inside the `with`."""
        while entry.served is not None and monotonic() < entry.held:
            await self._wait(entry.held - monotonic())
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
            self.expire_later(entry)
            async with self._changed:
                self._changed.notify_all()

    def begin(self, entry: Entry) -> None:
        """Begin to load a model, and return at once."""
        if entry not in self._begun:
            self._begun[entry] = asyncio.create_task(self._first_use(entry))
            self._begun[entry].add_done_callback(partial(self._began, entry))

    async def _first_use(self, entry: Entry) -> None:
        async with self.using(entry):
            pass

    def _began(self, entry: Entry, task: asyncio.Task[None]) -> None:
        del self._begun[entry]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s", error.reason if isinstance(error, Unloadable) else error)

    def end(self) -> bool:
        """Free all models after the event loop has ended. Return whether a model is still being loaded."""
        for entry in self._in_memory():
            assert entry.served is not None
            entry.served.close()
            entry.served = None
        return bool(self._loading)

    def leave(self, entry: Entry) -> None:
        """Drop a model whose file is gone, once its requests have ended."""
        entry.gone = True
        if entry.served is not None or entry.loading is not None:
            self.left.append(entry)
            self.expire_later(entry)

    def expire_later(self, entry: Entry) -> None:
        """Unload an idle model when its time is over."""
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        keep = 0.0 if entry.gone else entry.keep
        if keep is None or entry.users or entry.served is None:
            return
        left = max(0.0, entry.used + keep - monotonic())
        entry.expiry = asyncio.get_running_loop().call_later(left, self._expire, entry)

    def _expire(self, entry: Entry) -> None:
        entry.expiry = None
        if not entry.users and entry.served is not None:
            self._unload(entry)

    # -- loading ---------------------------------------------------------------------------------------------------

    async def _loaded(self, entry: Entry) -> None:
        """Wait until a model is loaded. All requests for it share one load, which outlives a client that leaves."""
        while entry.served is None:
            if entry.failure is not None and monotonic() < entry.retry:
                raise Unloadable(str(entry.failure), entry.failure.reason, told=True)
            if entry.loading is None:
                entry.loading = asyncio.create_task(self._fetch(entry))
                entry.loading.add_done_callback(partial(_settled, entry))
            await asyncio.shield(entry.loading)

    async def _fetch(self, entry: Entry) -> None:
        began = monotonic()
        held: dict[Entry, float] = {}
        try:
            async with asyncio.timeout(ROOM_SECONDS) as limit:
                while True:
                    async with self._turn:
                        if not entry.users:  # all clients have left while the load waited
                            return
                        if await self._make_room(entry):
                            limit.reschedule(None)
                            if await self._open(entry):
                                return
                            limit.reschedule(asyncio.get_running_loop().time() + ROOM_SECONDS)
                    if monotonic() - began > FAIR_SECONDS and not held:
                        held = {each: monotonic() + HOLD_SECONDS for each in self._in_the_way(entry)}
                        for each, until in held.items():
                            each.held = until
                    await self._wait(LOOK_SECONDS)
        except TimeoutError:
            raise TooManyRequests("all loaded models are busy; try again later", 10) from None
        finally:
            for each, until in held.items():
                if each.held == until:
                    each.held = 0.0 if entry.served is not None else min(until, monotonic())
            async with self._changed:
                self._changed.notify_all()

    async def _wait(self, seconds: float) -> None:
        """Wait for the end of a request or load, or this long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)), self._changed:
                await self._changed.wait()

    def _opened(self, entry: Entry) -> Served:
        self._loading.append(entry)
        try:
            return self._load(entry.model.path)
        except Exception as error:  # the message may have the path, and quote the file
            raise Unloadable(f"{entry.info.id} cannot be loaded; the server's log says why", error) from None
        finally:
            self._loading.remove(entry)

    async def _open(self, entry: Entry) -> bool:
        """Load a model that seems to fit. Return False if it does not fit with its KV cache."""
        entry.info, entry.failure = replace(entry.info, state="loading"), None
        served: Served | None = None
        state: State = "failed"
        began = monotonic()
        try:
            served = await in_daemon(partial(self._opened, entry), Served.close)
            entry.bytes = served.bytes
            if await self._make_room(entry):
                info = await in_daemon(
                    partial(info_of, entry.info.id, entry.model.path, served.model), lambda info: None
                )
                entry.info, entry.served, served = info, served, None
                log.info("loaded %s", entry.info.id)
            state = "unloaded" if entry.served is None else "loaded"
        except Unloadable as error:
            ended = monotonic()
            entry.failure, entry.retry = error, ended + (ended - began) / FAILED_SHARE
            raise
        except asyncio.CancelledError:
            state = "unloaded"
            raise
        finally:
            entry.info, entry.used = replace(entry.info, state=state), monotonic()
            if served is not None:
                await asyncio.to_thread(served.close)
            if entry.served is None and entry in self.left:
                self.left.remove(entry)
            self.expire_later(entry)
        return entry.served is not None

    # -- memory ----------------------------------------------------------------------------------------------------

    async def _make_room(self, wanted: Entry) -> bool:
        """Unload models, least recently used first, until `wanted` fits. If it cannot, unload nothing and return
        False."""
        if self._closing:
            await asyncio.wait(self._closing)
        if not self.memory:
            return True
        if wanted.bytes > self.memory:
            problem = f"{wanted.info.id} needs {wanted.bytes >> 20} MiB, the server may use {self.memory >> 20} MiB ("
            raise LocalLLMError(
                Notice(problem, Setting("memory_limit"), "); a smaller context (", Setting("ctx_size"), ") needs less")
            )
        others = [entry for entry in self._in_memory() if entry is not wanted]
        if wanted.bytes + sum(entry.bytes for entry in others if entry.users) > self.memory:
            return False
        idle = sorted((entry for entry in others if not entry.users), key=lambda entry: -entry.used)
        used = wanted.bytes + sum(entry.bytes for entry in others)
        while used > self.memory:
            used -= idle[-1].bytes
            self._unload(idle.pop())
        if self._closing:
            await asyncio.wait(self._closing)
        return True

    def _in_the_way(self, wanted: Entry) -> list[Entry]:
        """Return busy models that have to end before `wanted` fits. Models that were held lately are left alone."""
        found: list[Entry] = []
        busy = [entry for entry in self._in_memory() if entry is not wanted and entry.users]
        used = wanted.bytes + sum(entry.bytes for entry in busy)
        for entry in sorted(busy, key=lambda entry: -entry.bytes):
            if used > self.memory and monotonic() > entry.held + ROOM_SECONDS:
                found.append(entry)
                used -= entry.bytes
        return found if used <= self.memory else []

    def _in_memory(self) -> list[Entry]:
        return [entry for entry in (*self._listed(), *self.left) if entry.served is not None]

    def _unload(self, entry: Entry) -> None:
        """Take an idle model out of use at once, and free it in a thread."""
        assert entry.served is not None
        task = asyncio.create_task(self._close(entry, entry.served))
        entry.served, entry.keep = None, None
        entry.info = replace(entry.info, state="unloaded")
        if entry in self.left:
            self.left.remove(entry)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, entry: Entry, served: Served) -> None:
        await asyncio.to_thread(served.close)
        log.info("unloaded %s", entry.info.id)


def _settled(entry: Entry, task: asyncio.Task[None]) -> None:
    if entry.loading is task:
        entry.loading = None
    if not task.cancelled():
        task.exception()  # its waiters have it; without one, it is in the log
