"""`quantize FOLDER --mmproj OUT` writes llama.cpp's bytes, and the encoders give the embeddings of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.backends.reference import ReferenceBackend
from localllm.gguf import open_gguf
from tests.localllm.convert.mmproj_cases import DATA, TYPES, convert, digests, stored
from tests.models.encoders.support import bound

SPECS = stored()
EMBEDDED = dict(np.load(DATA / "mmproj.npz"))
CONVERTED = [name for name, spec in SPECS.items() if "llama_cpp" in spec]
CLOSE = 1e-4  # relative error of embeddings in F32


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", CONVERTED)
def test_bytes_of_llama_cpp(name: str, kind: str, tmp_path: Path) -> None:
    ours, theirs = digests(convert(SPECS[name], tmp_path, kind)), SPECS[name]["llama_cpp"][kind]
    assert ours["keys"].keys() == theirs["keys"].keys()
    for key, value in theirs["keys"].items():
        assert ours["keys"][key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    assert ours["tensors"].keys() == theirs["tensors"].keys()
    for tensor, (format, shape, told) in theirs["tensors"].items():
        if isinstance(told, list):  # whose last bits depend on the program that computes them
            told = pytest.approx(told, rel=1e-3 if format != "F32" else 1e-5, abs=2e-4)
        assert ours["tensors"][tensor] == [format, shape, told], tensor


@pytest.mark.parametrize("name", sorted({key.partition(":")[0] for key in EMBEDDED}))
def test_embeddings_of_transformers(name: str, tmp_path: Path) -> None:
    with open_gguf(convert(SPECS[name], tmp_path, "F32")) as file:
        for kind in ("vision", "audio"):
            if (key := f"{name}:{kind}") + ":in" not in EMBEDDED:
                continue
            given, truth = EMBEDDED[f"{key}:in"], EMBEDDED[f"{key}:out"]
            with bound(ReferenceBackend(), file.metadata, file.tensors, kind) as encoder:
                found = encoder.encode(list(given))
            kept = EMBEDDED.get(f"{key}:rows", np.arange(len(found)))
            error = np.linalg.norm(found[kept] - truth) / np.linalg.norm(truth)
            assert found[kept].shape == truth.shape
            assert error < CLOSE, f"{error:.1e}"
