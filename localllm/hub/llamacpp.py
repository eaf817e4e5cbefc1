"""llama.cpp's download cache: files named USER_REPO_FILE, and manifest=USER=REPO=TAG.json, which names FILE.

Newer versions use the Hugging Face cache's layout, in the same folder if LLAMA_CACHE is set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from localllm.hub import hub_cache
from localllm.hub.folder import models_of
from localllm.hub.labels import is_model
from localllm.hub.reading import Unusable, files_below, read_object
from localllm.hub.stored_model import StoredModel

_MANIFEST = re.compile(r"manifest=([^=/]+)=([^=/]+)=([^=/]+)\.json")


def scan(root: Path, store: str) -> Iterator[StoredModel]:
    """Yield the models that llama.cpp has downloaded."""
    names = list(files_below(root, depth=1))
    rest = {name for name in names if is_model(name)}
    prefixes: dict[str, str] = {}  # file name prefix of a repository -> the repository
    for name in names:
        manifest = _MANIFEST.fullmatch(name)
        if not manifest:
            continue
        repo = f"{manifest[1]}/{manifest[2]}"
        try:
            file = read_object(root, root / name).get("ggufFile")
            if not isinstance(file, dict) or not isinstance(file.get("rfilename"), str):
                raise Unusable(f"{name} names no GGUF file")
        except Unusable as reason:
            yield StoredModel(f"{repo}:{manifest[3]}", store, (root / name,), repo=repo, problem=str(reason))
            continue
        prefixes[f"{manifest[1]}_{manifest[2]}_"] = repo
        if os.path.basename(stored := _stored(repo, file["rfilename"])) not in rest:
            problem = f"its file is missing ({stored}); fetch it again"
            yield StoredModel(f"{repo}:{manifest[3]}", store, (root / name,), repo=repo, problem=problem)
    for prefix, repo in prefixes.items():
        own = sorted(name for name in rest if name.startswith(prefix))
        rest -= set(own)
        yield from models_of(root, store, repo, [(name.removeprefix(prefix), root / name) for name in own])
    yield from models_of(root, store, "", [(name, root / name) for name in sorted(rest)])
    yield from hub_cache.scan(root, store)


def _stored(repo: str, file: str) -> str:
    """Return the name under which a file of a repository is stored."""
    return f"{repo}_{file}".replace("/", "_").replace("\\", "_")
