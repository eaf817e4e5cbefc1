"""Download a model from the hub to huggingface_hub's cache, which other programs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from localllm.base.files.atomic import NewFile
from localllm.base.printable import printable
from localllm.base.units import size
from localllm.hub import hub_cache
from localllm.hub.choose import choose_encoders, choose_variant
from localllm.hub.client import Hub, Listing, Remote
from localllm.hub.errors import StoreError
from localllm.hub.fetch import FetchHooks, check_room, fetch, verify
from localllm.hub.labels import Variant, titles, variants
from localllm.hub.owned import remember
from localllm.hub.reference import Reference
from localllm.hub.store_folders import HUB

_SECONDS = 1.0  # time to wait for another program's lock before reporting it


class Pulled(NamedTuple):
    """A model that is now in the cache."""

    name: str
    path: Path  # path of the first file
    bytes: int
    fetched: bool  # False: the model was already in the cache


def pull_model(hub: Hub, asked: Reference, cache: Path, free: int, watch: FetchHooks) -> Pulled:
    """Download all parts of the model that `asked` names, and its mmproj file, except files already present.

    `free` is the free memory in bytes, which determines the quantization. Raises StoreError.
    """
    listing = hub.listing(asked.repo)
    given = variants(listing.files)
    if not given:
        raise StoreError(_without_models(listing))

    def size_of(variant: Variant) -> int:
        return sum(listing.files[part].size for part in variant.parts)

    here = [each.label for each in hub_cache.scan(cache, HUB) if each.repo == listing.repo and not each.problem]
    chosen = choose_variant(listing.repo, given, asked.quant, size_of, free, here)
    name, total = titles(listing.repo, given)[chosen.variant], size_of(chosen.variant)
    if chosen.reason:
        watch.tell(f"{name} ({size(total)}): {chosen.reason}")
    parts = [listing.files[part] for part in chosen.variant.parts]
    if encoders := choose_encoders(listing.files, parts[0].path):
        parts.append(listing.files[encoders])
        watch.tell(f"with {printable(encoders)} ({size(parts[-1].size)}), which reads pictures or sound")
        total += parts[-1].size
    repo = cache / hub_cache.repo_folder(listing.repo)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        check_room(cache, sum(_missing(part, repo) for part in parts), watch.spare)
        fetched = [_bring(hub, listing, part, cache, watch) for part in parts]
        _name_commit(repo, listing.commit)
    except OSError as error:
        raise StoreError(f"{error.filename or cache} cannot be written: {error.strerror or error}") from None
    return Pulled(name, repo / "snapshots" / listing.commit / parts[0].path, total, any(fetched))


def _missing(file: Remote, repo: Path) -> int:
    """Return the bytes of a file that are still to come."""
    for name in (file.digest, f"{file.digest}.incomplete"):
        try:
            return max(0, file.size - (repo / "blobs" / name).stat().st_size)
        except OSError:
            continue
    return file.size


def _bring(hub: Hub, listing: Listing, file: Remote, cache: Path, watch: FetchHooks) -> bool:
    """Ensure that a file is in the cache, under its name in the listing's commit. Return whether it was downloaded."""
    repo = cache / hub_cache.repo_folder(listing.repo)
    place, blob = repo / "snapshots" / listing.commit / file.path, repo / "blobs" / file.digest
    if place.exists():
        _check_size(place, file)
        return False
    hub.check(listing, file)
    with _locked(cache, listing.repo, file.digest, lambda: watch.tell(_waiting(file))):
        missing, large = not blob.exists(), file.size > hub.limit
        if missing and not large:
            fetch(hub, listing, file, blob.parent, watch)
    hub.whole(listing, file, cache)
    if missing and large:
        verify(hub, file, blob)
    _check_size(place, file)
    if missing:
        with _locked(cache, listing.repo, "localllm"):
            remember(repo, file.path, file.digest)
    return missing


def _waiting(file: Remote) -> str:
    return f"another program is fetching {printable(file.path)}; waiting for it"


def _check_size(place: Path, file: Remote) -> None:
    found = place.stat().st_size
    if found != file.size:
        raise StoreError(f"{place} has {found} bytes, and {file.size} at the hub; delete it and pull again")


@contextmanager
def _locked(cache: Path, repo: str, what: str, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold huggingface_hub's lock for a blob, so that only one program downloads it. Call `waits` if another program
    holds the lock."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    path = cache / ".locks" / hub_cache.repo_folder(repo) / f"{what}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = WeakFileLock(path, timeout=_SECONDS)
    try:
        lock.__enter__()
    except TimeoutError:  # filelock's Timeout
        waits()
        lock = WeakFileLock(path)
        lock.__enter__()
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def _name_commit(repo: Path, commit: str) -> None:
    """Write refs/main, from which programs learn the commit without asking the hub."""
    if hub_cache.main_commit(repo) == commit:
        return
    path = repo / "refs" / "main"
    path.parent.mkdir(parents=True, exist_ok=True)
    with NewFile(path) as new:
        new.file.write(commit.encode())
        new.commit()


def _without_models(listing: Listing) -> str:
    """Return advice for a repository without GGUF files."""
    names = list(listing.files)
    model = listing.repo.rpartition("/")[2]
    if any(name.endswith(".safetensors") for name in names):
        return (
            f"{listing.repo} has safetensors files but no GGUF files; look for a repository {model}-GGUF, or fetch the "
            f"folder with `hf download {listing.repo} --local-dir {model}` and run `localllm quantize {model} OUT.gguf "
            "Q4_K_M`"
        )
    found = ", ".join(printable(name) for name in names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{listing.repo} has no GGUF files, only {found or 'nothing'}; look for a repository {model}-GGUF"
