"""Derived models: a name for another model on this computer, with a system prompt, parameters and first messages.

Each is a JSON file in the folder `.localllm` of the hub cache, so that it is moved and deleted with the cache. It names
its base and holds no weights. Like the files of other programs, it is checked when it is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from localllm.base.files.atomic import NewFile
from localllm.base.printable import printable
from localllm.hub.errors import StoreError
from localllm.hub.reading import MAX_JSON, Unusable, files_below, read_object
from localllm.hub.stored_model import DerivedModel, StoredModel

MOST = 1000  # maximum number of derived models
MOST_BYTES = 32 << 20  # maximum bytes of all derived models, which every scan reads
MOST_NAME = 200  # maximum characters of a name; most file systems allow 255 bytes with the ending
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"(?:{_PART}/){{0,2}}{_PART}(?::{_PART})?")
LATEST = 253_402_300_799  # seconds from 1970 to the end of the year 9999, the last that dates can have
_ENDING, _LATEST = ".json", ":latest"
_FILE = str.maketrans("/:", "+@")  # neither occurs in a name


def derived_name(text: str) -> str:
    """Return a new model's name without `:latest`; raise StoreError for an invalid name."""
    name = text[: -len(_LATEST)] if text.lower().endswith(_LATEST) else text
    if not _NAME.fullmatch(name) or ".." in name or len(name) > MOST_NAME or name.lower().endswith(_LATEST):
        raise StoreError(
            f"{printable(text, 100)!r} cannot be a model's name; use up to {MOST_NAME} letters, digits, . _ and -, "
            "such as NAME:TAG"
        )
    return name


def scan(root: Path, store: str, models: Sequence[StoredModel]) -> Iterator[StoredModel]:
    """Yield the derived models of a folder. `models` are the others, which may be their bases."""
    bases = {each.name: each for each in reversed(models)}
    taken = {each.name.lower() for each in models if not each.problem}
    for file in files_below(root, depth=1):
        if file.endswith(_ENDING) and not file.startswith("."):
            found = _described(root, store, file, bases)
            if found.name.lower() in taken:  # it was downloaded later
                found = replace(found, problem="a downloaded model has the same name; delete one of them")
            yield found


def _described(root: Path, store: str, file: str, bases: Mapping[str, StoredModel]) -> StoredModel:
    name = file.removesuffix(_ENDING).translate(str.maketrans("+@", "/:"))
    try:
        derived = _parsed(name, read_object(root, root / file))
    except Unusable as reason:
        return StoredModel(name, store, (root / file,), problem=str(reason))
    base = bases.get(derived.base)
    if base is None or base.problem:
        missing = f"its base {printable(derived.base)} is not on this computer; pull it, or delete this model"
        return StoredModel(name, store, (root / file,), derived=derived, problem=missing)
    return replace(base, name=name, store=store, repo="", file="", derived=derived)


def _parsed(name: str, content: Mapping[str, Any]) -> DerivedModel:
    base, system, parameters = content.get("base"), content.get("system"), content.get("parameters")
    messages, licence, created = content.get("messages"), content.get("license"), content.get("created")
    if not (
        content.get("name") == name
        and isinstance(base, str)
        and isinstance(system, str)
        and isinstance(parameters, dict)
        and isinstance(messages, list)
        and all(isinstance(each, dict) and all(isinstance(text, str) for text in each.values()) for each in messages)
        and isinstance(licence, str)
        and isinstance(created, int | float)
        and 0 <= created <= LATEST
    ):
        raise Unusable("is not a derived model of localllm; delete it")
    return DerivedModel(name, base, system, parameters, tuple(messages), licence, created)


def save_derived(root: Path, model: DerivedModel) -> None:
    """Write a derived model; an older one of the same name is replaced. Raise StoreError if it cannot be written."""
    data = json.dumps(asdict(model), indent=1).encode()
    if len(data) > MAX_JSON:
        raise StoreError(f"the model {model.name} has {len(data)} bytes of texts; the limit is {MAX_JSON}")
    path = _path(root, model.name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        sizes = {file: os.lstat(root / file).st_size for file in files_below(root, depth=1)}
        before = sizes.pop(path.name, None)
        if before is None and len(sizes) >= MOST:
            raise StoreError(f"there are {MOST} derived models, which is the limit; delete some")
        if sum(sizes.values()) + len(data) > MOST_BYTES:
            raise StoreError(
                f"the derived models have {MOST_BYTES >> 20} MiB of texts, which is the limit; delete some"
            )
        with NewFile(path) as new:
            new.file.write(data)
            new.commit()
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from None


def delete_derived(root: Path, name: str) -> int:
    """Delete a derived model, but not its base. Return the bytes freed."""
    path = _path(root, name)
    try:
        size = os.lstat(path).st_size
        path.unlink()
    except OSError as error:
        raise StoreError(f"{path} cannot be removed: {error.strerror or error}") from None
    return size


def _path(root: Path, name: str) -> Path:
    return root / f"{derived_name(name).translate(_FILE)}{_ENDING}"
