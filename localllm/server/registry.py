"""The models behind one port, by name. `residents.py` loads and unloads them.

The list follows the files: `refresh` finds new models, and drops deleted ones once their requests have ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from time import monotonic, time

from localllm.base.errors import LocalLLMError
from localllm.base.printable import printable
from localllm.hub import StoredModel
from localllm.hub.search import only_match
from localllm.models import ModelError
from localllm.server.bridge import in_daemon
from localllm.server.catalogue import Scan
from localllm.server.errors import UnknownModel, Unloadable
from localllm.server.info import ModelInfo, info_of
from localllm.server.residents import Entry, Load, Residents
from localllm.server.served import Served

log = logging.getLogger("localllm.server")
SCAN_SECONDS = 2.0  # minimum time between two scans
SCAN_SHARE = 0.05  # maximum share of the time that is spent in scans
PATIENCE = 1.0  # seconds that a request waits for a scan
MOST_NAME = 1000  # maximum characters of a name that is compared with all models


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
        self.default = default
        self._scan, self._embeds, self._live, self._strict = scan, embeds, live, strict
        self._entries: dict[str, Entry] = {}
        self._residents = Residents(load, memory, lambda: self._entries.values())
        self._told: set[tuple[str, str]] = set()  # unusable models that the log has
        self._scanning: asyncio.Task[None] | None = None
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

    def _listed(self) -> list[Entry]:
        entries = list(self._entries.values())
        shown = [each for each in entries if each.info.id != self._hidden or each.served or each.loading]
        return shown or entries

    def _info(self, entry: Entry) -> ModelInfo:
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

    def _base(self, entry: Entry) -> Entry:
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

    def _look(self, known: dict[str, tuple[tuple[int, int], ModelInfo]]) -> dict[str, Entry]:
        """Return the models of a scan, each with its description. Runs in a thread."""
        found: dict[str, Entry] = {}
        described: dict[tuple[str, int, int], ModelInfo] = {}  # of each file, which derived models share
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
            file = (str(model.path), *stamp)
            if info is None or before != stamp or info.path != str(model.path):
                shared = described.get(file)
                info = (
                    info_of(model.name, model.path, embeds=self._embeds)
                    if shared is None
                    else replace(shared, id=model.name)
                )
                described[file] = info
                if info.state == "failed" and self._live:  # a fixed model fails with the reason
                    log.warning("%s cannot be read: %s", printable(model.name), model.path)
            found[model.name] = Entry(model, stamp, info, bytes=info.file_bytes)
        return found

    def _follow(self, found: dict[str, Entry]) -> None:
        """Replace the list. Entries of unchanged files stay, with their loaded models."""
        for id, entry in found.items():
            old = self._entries.get(id)
            if old is not None and old.stamp == entry.stamp and old.model.path == entry.model.path:
                old.model = entry.model
                found[id] = old
        for id, old in self._entries.items():
            if found.get(id) is not old:
                self._residents.leave(old)
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

    def _entry(self, name: str) -> Entry:
        entry = self._entries.get(name) or self._entries.get(name.removesuffix(":latest"))
        if entry is None and not name:
            entry = self._unnamed()
        name = self._names.get(name.lower().removesuffix(":latest"), name)
        if entry is None and not self._strict and len(self._entries) == 1:
            [entry] = self._entries.values()
        if entry is None and 0 < len(name) <= MOST_NAME:
            found = only_match(name, [each.model for each in self._entries.values()])
            entry = None if found is None else self._entries.get(found.name)
        if entry is None:
            listed = [each.info.id for each in self._listed()]
            known = ", ".join(printable(each, 200) for each in listed[:20]) or "no models"
            asked = f"model {printable(name, 100)!r} is unknown" if name else "name a model"
            raise UnknownModel(f"{asked}; this server has {known}")
        return entry

    def _unnamed(self) -> Entry | None:
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
            async with self._residents.using(self._base(self._entry(name))) as served:
                yield served
        except Unloadable as error:
            expected = isinstance(error.reason, LocalLLMError | ModelError | OSError)
            if not error.told:
                log.warning("%s", error.reason, exc_info=None if expected else error.reason)
            error.told = True  # the other requests that waited for the same load have the same error
            raise

    async def load(self, name: str) -> None:
        """Load a model now. Unlike `using`, raise the detailed error if the model cannot be loaded."""
        try:
            async with self._residents.using(self._base(self._entry(name))):
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
        self._residents.expire_later(entry)

    def begin(self, name: str) -> None:
        """Begin to load a model, and return at once."""
        self._residents.begin(self._base(self._entry(name)))

    def end(self) -> bool:
        """Free all models after the event loop has ended. Return whether a model is still being loaded."""
        return self._residents.end()


def _stamp(model: StoredModel) -> tuple[int, int]:
    """Return the modification time and the size of a model's file, or zeros."""
    try:
        facts = os.stat(model.path)
    except OSError:
        return 0, 0
    return facts.st_mtime_ns, facts.st_size
