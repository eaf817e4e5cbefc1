"""Find a model by name in all stores. Nothing is copied or downloaded.

Rules are tried in order: a full name as `everything` returns it, then USER/REPO[:QUANT], then short names (a repository
without its user, a file name, or a name of the tables in `short_names.py`). Each rule searches the stores in the order
of `STORES`. The first store with a usable match decides. If that store has several matches, an error lists them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from localllm.base.printable import printable
from localllm.base.spelling import closest, either
from localllm.hub import derived, hub_cache, llamacpp, lm_studio, ollama
from localllm.hub.errors import NotHere, StoreError
from localllm.hub.labels import ENDING, matching
from localllm.hub.reference import REFERENCE
from localllm.hub.short_names import full_name, known_like
from localllm.hub.store_folders import DERIVED, HUB, LLAMA, LM_STUDIO, OLLAMA, StoreFolders
from localllm.hub.stored_model import StoredModel

STORES = (DERIVED, HUB, LLAMA, OLLAMA, LM_STUDIO)
_SHOWN = 8  # maximum names in a list of matches
_ALIKE = 0.75  # difflib ratio from which a name counts as a misspelling


def everything(places: StoreFolders) -> list[StoredModel]:
    """Return the models of all stores. A file in two stores counts for the first store."""
    seen: dict[str, str] = {}
    found = []
    for each in _scanned(places):
        store = seen.setdefault(os.path.realpath(each.path), each.store)
        if each.problem or store == each.store:  # Ollama may have several names for one file, and all are kept
            found.append(each)
    return [*derived.scan(places.derived, DERIVED, found), *found]


def _scanned(places: StoreFolders) -> Iterator[StoredModel]:
    yield from hub_cache.scan(places.hub, HUB)
    for scan, store, roots in (
        (llamacpp.scan, LLAMA, places.llama),
        (ollama.scan, OLLAMA, places.ollama),
        (lm_studio.scan, LM_STUDIO, places.lm_studio),
    ):
        for root in roots:
            yield from scan(root, store)


def locate(name: str, places: StoreFolders | None = None, others: Collection[str] = ()) -> Path:
    """Return the file to open for a model name; raise StoreError with advice unless exactly one model matches.

    `others` are further names that a misspelled one may mean.
    """
    return find(name, everything(places or StoreFolders.here()), others).path


def find(name: str, models: Sequence[StoredModel], others: Collection[str] = ()) -> StoredModel:
    """Return the model with this name. Raise NotHere without a usable match, and StoreError if several models match."""
    found = models_named(name, models, others)
    if found.problem:
        raise NotHere(f"{printable(found.name)} ({found.store}): {found.problem}")
    return found


def models_named(name: str, models: Sequence[StoredModel], others: Collection[str] = ()) -> StoredModel:
    """Return the model with this name, even if it is damaged. Raise StoreError for several models, and NotHere without
    any."""
    found = only_match(name, models)
    if found is None:
        raise _unknown(name, models, others)
    return found


def only_match(name: str, models: Sequence[StoredModel]) -> StoredModel | None:
    """Return the model with this name, even if it is damaged, or None. Raise StoreError for several models."""
    found = matches(name, models)
    whole = [each for each in found if not each.problem] or found
    if len(whole) > 1:  # names that differ only in capitals
        whole = [each for each in whole if each.name == name] or whole
    if len(whole) > 1:
        names = ", ".join(printable(each.name) for each in whole[:_SHOWN])
        more = f" and {len(whole) - _SHOWN} more" if len(whole) > _SHOWN else ""
        raise StoreError(f"{printable(name)} is ambiguous: give one of {names}{more}")
    return whole[0] if whole else None


def matches(name: str, models: Sequence[StoredModel]) -> list[StoredModel]:
    """Return the models in one store with this name, by the first rule that matches any model. A store whose matches
    are all damaged counts only if no other store has a match."""
    wanted = name.lower()
    base, _, quant = wanted.partition(":")

    def is_name(each: StoredModel) -> bool:
        return wanted in (each.name.lower(), each.name.lower().removesuffix(":latest"))

    def is_repo(each: StoredModel) -> bool:
        return base in (each.repo.lower(), f"hf.co/{each.repo.lower()}") and bool(each.repo)

    def is_short(each: StoredModel) -> bool:
        return base != "" and base in (each.repo.lower().rpartition("/")[2], _title(each.name))

    def is_file(each: StoredModel) -> bool:
        return wanted in {file.lower().rpartition("/")[2] for file in each.files}

    full = "" if "/" in name else full_name(name).lower()
    repo, _, full_quant = full.partition(":")

    def is_known(each: StoredModel) -> bool:
        return repo != "" and repo == each.repo.lower()

    rules: tuple[tuple[Callable[[StoredModel], bool], str], ...] = (
        (is_name, ""), (is_repo, quant), (is_short, quant), (is_file, ""), (is_known, full_quant),
    )  # fmt: skip
    for rule, asked in rules:
        damaged: list[StoredModel] = []
        for store in STORES:
            found = matching([each for each in models if each.store == store and rule(each)], asked)
            if any(not each.problem for each in found):
                return found
            damaged = damaged or found
        if damaged:
            return damaged
    return []


def _title(name: str) -> str:
    """Return a name without user and tag, in lower case."""
    return name.lower().partition(":")[0].rpartition("/")[2]


def nearest_models(name: str, models: Sequence[StoredModel]) -> str:
    """Return the name of the model with the closest spelling, or ""."""
    known = {form: each.name for each in models for form in (each.name.lower(), _title(each.name))}
    near = get_close_matches(name.lower(), list(known), 1, _ALIKE)
    return known[near[0]] if near else ""


def is_path(name: str) -> bool:
    """Return whether a text that is not an existing file looks like a path rather than a model name."""
    return name.endswith(ENDING) or name.startswith(("/", "./", "../", "~")) or name.count("/") > 2 or "\\" in name


def _unknown(name: str, models: Sequence[StoredModel], others: Collection[str]) -> NotHere:
    shown, near = printable(name, 300), nearest_models(name, models) or closest(name, others)
    hint = f"; did you mean {printable(near)}?" if near else ""
    reference = REFERENCE.fullmatch(name)
    if is_path(name) and not (reference and reference[2]):
        file = beside(Path(name))
        return NotHere(f"No such file: {shown}{f'; did you mean {printable(file, None)}?' if file else hint}")
    if reference is None and full_name(name):
        return NotHere(f"{shown} ({full_name(name)}) is not on this computer; `localllm pull {shown}` downloads it")
    if reference is None and not near and (known := known_like(name)):
        meant = f"did you mean {either(known)}? `localllm pull {known[0]}` downloads it"
        return NotHere(f"No such file or model: {shown}; {meant}")
    if reference is None:
        return NotHere(
            f"No such file or model: {shown}{hint or ';'} `localllm list` shows the models on this computer, "
            "`localllm pull USER/REPO` downloads one"
        )
    others = [each.name for each in models if each.repo.lower() == reference[1].lower()]
    here = f"; here is {', '.join(printable(each) for each in others[:_SHOWN])};" if others else hint or ";"
    return NotHere(f"{shown} is not on this computer{here} `localllm pull {shown}` downloads it")


def beside(path: Path) -> str:
    """Return the GGUF file in the same folder with the closest spelling, or ""."""
    try:
        names = [each for each in os.listdir(path.parent) if each.endswith(ENDING)]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, 1)
    return str(path.with_name(near[0])) if near else ""
