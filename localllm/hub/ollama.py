"""Ollama's store of models: manifests/HOST/NAMESPACE/MODEL/TAG is JSON that names layers, stored as blobs/sha256-HEX.

One layer is a GGUF file. Templates and parameters in other layers are ignored, since the GGUF file has its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localllm.hub.reading import Unusable, files_below, read_object, regular
from localllm.hub.stored_model import StoredModel

_HOST, _NAMESPACE = "registry.ollama.ai", "library"
_HUB_HOSTS = ("hf.co", "huggingface.co")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MODEL, _TENSOR = "application/vnd.ollama.image.model", "application/vnd.ollama.image.tensor"


def scan(root: Path, store: str) -> Iterator[StoredModel]:
    """Yield the models that Ollama has pulled or created."""
    for place in files_below(root / "manifests", depth=4):
        parts = place.split("/")
        if len(parts) == 4 and all(_NAME.fullmatch(part) for part in parts):
            yield _described(root, store, parts)


def _described(root: Path, store: str, parts: list[str]) -> StoredModel:
    host, namespace, model, tag = parts
    repo, short = f"{namespace}/{model}", f"{namespace}/{model}:{tag}"
    if host == _HOST:
        repo = "" if namespace == _NAMESPACE else repo
        name = short.removeprefix(f"{_NAMESPACE}/")
    else:
        name, repo = f"{host}/{short}", repo if host in _HUB_HOSTS else ""
    place = root.joinpath("manifests", *parts)
    try:
        manifest = read_object(root, place)
        path = _blob(root, _layer(manifest))
        facts = regular(root, path)
    except Unusable as reason:
        return StoredModel(name, store, (place,), repo=repo, file=model, problem=str(reason))
    label = _label(root, manifest) or (tag if host in _HUB_HOSTS else "")
    used = max(facts.st_atime, facts.st_mtime)
    return StoredModel(name, store, (path,), facts.st_size, label, used, repo, model)


def _layer(manifest: dict[str, Any]) -> object:
    """Return the digest of the layer with the weights."""
    layers = manifest.get("layers")
    given = [each for each in layers if isinstance(each, dict)] if isinstance(layers, list) else []
    found = [each.get("digest") for each in given if each.get("mediaType") == _MODEL]
    if len(found) == 1:
        return found[0]
    if found:
        raise Unusable(f"has {len(found)} GGUF files, and only models with one file are supported")
    if any(each.get("mediaType") == _TENSOR for each in given):
        raise Unusable("is stored as separate tensors, which only Ollama can read")
    raise Unusable("has no weights on this computer")


def _blob(root: Path, digest: object) -> Path:
    found = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if found is None:
        raise Unusable("its manifest has an invalid digest; pull it again with Ollama")
    return root / "blobs" / f"sha256-{found[1]}"


def _label(root: Path, manifest: dict[str, Any]) -> str:
    """Return the quantization in the model's configuration, or ""."""
    config = manifest.get("config")
    try:
        facts = read_object(root, _blob(root, config.get("digest") if isinstance(config, dict) else None))
    except Unusable:
        return ""
    kind = facts.get("file_type")
    known = isinstance(kind, str) and _NAME.fullmatch(kind) and kind != "unknown"
    return str(kind) if known else ""
