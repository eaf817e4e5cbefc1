"""Create model stores of other programs, in each program's directory layout."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from localllm.hub import StoreFolders

GGUF = b"GGUF of a test, which nobody opens "
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def places(root: Path) -> StoreFolders:
    """Return the paths of all stores below one root."""
    return StoreFolders.of({}, root, "linux")


def hub_model(root: Path, repo: str, *names: str, commit: str = COMMIT, data: bytes = GGUF, main: bool = True) -> Path:
    """Create files in a Hugging Face cache, and return the repository's directory."""
    folder = root / ".cache/huggingface/hub" / ("models--" + repo.replace("/", "--"))
    for name in names:
        content = data + name.encode()
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        place = folder / "snapshots" / commit / name
        for path in (blob, place):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        place.symlink_to(Path(*[".."] * (1 + len(Path(name).parts)), "blobs", blob.name))
    if main:
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return folder


def llama_model(root: Path, repo: str, file: str, tag: str = "latest") -> Path:
    """Create a model in the cache layout of early llama.cpp versions."""
    folder = root / ".cache/llama.cpp"
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {"schemaVersion": 2, "ggufFile": {"rfilename": file, "size": len(GGUF)}}
    (folder / f"manifest={repo.replace('/', '=')}={tag}.json").write_text(json.dumps(manifest))
    place = folder / f"{repo}_{file}".replace("/", "_")
    place.write_bytes(GGUF + file.encode())
    return place


def blob(models: Path, data: bytes) -> str:
    """Create an Ollama layer, and return its digest."""
    found = hashlib.sha256(data).hexdigest()
    (models / "blobs").mkdir(parents=True, exist_ok=True)
    (models / "blobs" / f"sha256-{found}").write_bytes(data)
    return f"sha256:{found}"


def ollama_model(root: Path, name: str, quantization: str = "Q4_K_M", layer: dict[str, Any] | None = None) -> Path:
    """Create an Ollama model with the path HOST/NAMESPACE/MODEL/TAG, and return its manifest."""
    models = root / ".ollama/models"
    weights = {"mediaType": "application/vnd.ollama.image.model", "digest": blob(models, GGUF + name.encode())}
    template = {"mediaType": "application/vnd.ollama.image.template", "digest": blob(models, b"{{ .Prompt }}")}
    config = {"digest": blob(models, json.dumps({"model_format": "gguf", "file_type": quantization}).encode())}
    manifest = models / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [template, weights if layer is None else layer]
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": layers}))
    return manifest


def lm_studio_model(root: Path, place: str) -> Path:
    """Create a model file of LM Studio with the path PUBLISHER/REPO/FILE."""
    path = root / ".lmstudio/models" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(GGUF + place.encode())
    return path
