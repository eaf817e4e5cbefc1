"""Models in a folder of GGUF files, identified by file name. Stores that keep original file names share this module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from localllm.hub.labels import Variant, titles, variants
from localllm.hub.reading import Unusable, regular
from localllm.hub.stored_model import StoredModel


def models_of(root: Path, store: str, repo: str, files: Sequence[tuple[str, Path]]) -> Iterator[StoredModel]:
    """Yield the models among files of one repository, given as (path within it, path on disk)."""
    places = dict(files)
    given = variants(places)
    for variant, name in titles(repo, given).items():
        yield _found(root, store, repo, name, variant, tuple(places[part] for part in variant.parts))


def _found(root: Path, store: str, repo: str, name: str, variant: Variant, paths: tuple[Path, ...]) -> StoredModel:
    size, used, problem = 0, 0.0, ""
    for path in paths:
        try:
            facts = regular(root, path)
        except Unusable as reason:
            problem = problem or str(reason)
        else:
            size, used = size + facts.st_size, max(used, facts.st_atime, facts.st_mtime)
    if variant.missing:
        problem = problem or f"part {', '.join(map(str, variant.missing))} of the model is missing; fetch it again"
    return StoredModel(name, store, paths, size, variant.label, used, repo, variant.name, problem)
