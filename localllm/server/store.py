"""Change the models on this computer for clients: download, delete, copy and create.

Only `localllm serve` without MODEL has a store. Downloads come from the configured hub alone, and only what `pull` or
this server made is deleted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from localllm.hub import NotHere, StoredModel, StoreError, StoreFolders, everything
from localllm.hub.derived import derived_name, save_derived
from localllm.hub.owned import is_owned, remove_model
from localllm.hub.reference import Reference
from localllm.hub.search import matches, models_named
from localllm.hub.short_names import wanted_reference
from localllm.hub.store_folders import DERIVED
from localllm.hub.stored_model import DerivedModel
from localllm.server.errors import BadRequest, Forbidden, TooManyRequests, UnknownModel
from localllm.server.pulls import Pulls
from localllm.server.registry import ModelRegistry
from localllm.server.turn import Json

MOST_NAME = 300  # maximum characters of a name


class ModelStore:
    """The stores of this computer, for the clients of a server. Use it from the event loop only."""

    def __init__(
        self,
        places: StoreFolders,
        registry: ModelRegistry,
        free: Callable[[], int],
        reference: Callable[[str], Reference] = wanted_reference,
        endpoint: str | None = None,
    ) -> None:
        """Create a store. `free` returns the bytes of free memory, and `reference` parses a name of the hub.

        Downloads come from `endpoint`, or else HF_ENDPOINT.
        """
        self._places, self._registry, self._reference = places, registry, reference
        self.pulls = Pulls(places.hub, free, endpoint)
        self._changing = asyncio.Lock()  # one change at a time, so that its checks hold

    def pull(self, name: str) -> AsyncGenerator[Json, None]:
        """Download a model unless it is here, and yield the progress; raise BadRequest for an invalid name."""
        _check(name)
        try:
            asked = self._reference(name)
        except StoreError as error:
            if self._here(name) is not None:
                return _success()
            raise BadRequest(str(error), "model") from None
        here = self._here(name) if asked.quant else None
        return _success() if here is not None and here.derived is None else self._pulled(asked)

    async def _pulled(self, asked: Reference) -> AsyncGenerator[Json, None]:
        followed = self.pulls.follow(asked)
        try:
            async for line in followed:
                yield line
        finally:
            await followed.aclose()
        await self._registry.refresh(now=True)
        yield {"status": "success"}

    def _here(self, name: str) -> StoredModel | None:
        try:
            return self._registry.stored(name)
        except (UnknownModel, StoreError):
            return None

    async def delete(self, name: str) -> None:
        """Delete a model that `pull` or this server made; raise UnknownModel or StoreError. A loaded model stays in
        memory until its requests have ended."""
        _check(name)
        async with self._changing:
            model = await asyncio.to_thread(self._exactly, name)
            if not is_owned(model, self._places.hub):
                raise Forbidden(
                    f"{model.name} is a model of {model.store} and was not downloaded by localllm; delete it there"
                )
            if self.pulls.running(model.repo):
                raise TooManyRequests(f"{model.name} is being downloaded; delete it afterwards", 10)
            await asyncio.to_thread(remove_model, model, self._places.hub)
        await self._registry.refresh(now=True)

    async def copy(self, source: str, destination: str) -> None:
        """Give a model a second name, which shares its file."""
        _check(source, destination)
        derived = self._derived(source)
        await self._save(replace(derived, name=derived_name(destination), created=time.time()))

    async def create(self, name: str, base: str, **changes: Any) -> None:
        """Create a derived model of `base`. `changes` are fields of DerivedModel; others stay as in the base."""
        _check(name, base)
        derived = self._derived(base)
        given = {key: value for key, value in changes.items() if value}
        if "parameters" in given:
            given["parameters"] = {**derived.parameters, **given["parameters"]}
        await self._save(replace(derived, name=derived_name(name), created=time.time(), **given))

    def _derived(self, base: str) -> DerivedModel:
        """Return a model as a derived one without a name; raise BadRequest for a file outside the stores."""
        found = self._registry.stored(base)
        if not found.store:
            problem = f"{found.name} is not a downloaded model, so it cannot be a base; pull one"
            raise BadRequest(problem, "from")
        return found.derived or DerivedModel("", found.name)

    async def _save(self, model: DerivedModel) -> None:
        async with self._changing:
            model = replace(model, name=await asyncio.to_thread(self._new_name, model.name))
            await asyncio.to_thread(save_derived, self._places.derived, model)
        await self._registry.refresh(now=True)

    def _new_name(self, name: str) -> str:
        """Return the name of a new derived model: the spelling of the model that it replaces, or the given one. Raise
        BadRequest if the name already means another model."""
        models = everything(self._places)
        others = [each for each in models if each.store != DERIVED]
        downloaded = next((each.name for each in matches(name, others) if not each.problem), "")
        if not downloaded and (found := self._here(name)) is not None and not found.store:
            downloaded = found.name  # the bundled model, or the default model's file
        if downloaded:
            known = f" ({downloaded})" if downloaded != name else ""
            raise BadRequest(f"{name} is the name of a model that was downloaded{known}; choose another name", "model")
        if "/" not in name:
            with suppress(StoreError):
                meaning = self._reference(name)
                raise BadRequest(f"{name} is the short name of {meaning}; choose another name", "model")
        return next((each.name for each in models if each.store == DERIVED and _same(each.name, name)), name)

    def _exactly(self, name: str) -> StoredModel:
        """Return the model with this full name or hub name, even if it is damaged."""
        models = everything(self._places)
        try:
            found = models_named(name, models)
        except NotHere:
            raise UnknownModel(f"model {name!r} is not here") from None
        if not _same(found.name, name):
            try:
                repo = self._reference(name).repo
            except StoreError:
                repo = ""
            if repo.lower() != found.repo.lower() or not repo:
                raise UnknownModel(f"model {name!r} is not here; give the full name, such as {found.name}")
        return found


def _same(name: str, other: str) -> bool:
    first, second = (each.lower().removesuffix(":latest") for each in (name, other))
    return first == second


def _check(*names: str) -> None:
    for name in names:
        if not name or len(name) > MOST_NAME:
            raise BadRequest(f"a model's name has 1 to {MOST_NAME} characters", "model")


async def _success() -> AsyncGenerator[Json, None]:
    yield {"status": "pulling manifest"}
    yield {"status": "success"}
