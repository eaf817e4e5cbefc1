"""`quantize FOLDER --mmproj OUT` writes llama.cpp's bytes, and the encoders give the embeddings of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from localllm.backends.reference import ReferenceBackend
from localllm.gguf import open_gguf
from tests.localllm.convert.mmproj_cases import DATA, TYPES, convert, digests, given, stored
from tests.models.encoders.support import bound

SPECS = stored()
EMBEDDED = dict(np.load(DATA / "mmproj.npz"))
CONVERTED = [name for name, spec in SPECS.items() if "llama_cpp" in spec]
CLOSE = 1e-4  # relative error of embeddings in F32
KINDS: dict[str, Literal["vision", "audio"]] = {"vision": "vision", "audio": "audio"}
# Encoders whose merger computes GELU by its definition in transformers, and by an approximation in llama.cpp.
APPROXIMATED = (
    *("qwen2vl", "qwen2.5vl", "qwen3vl", "qwen3.5", "pixtral", "mistral3", "internvl-hf", "lfm2", "paddleocr"),
)


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


@pytest.mark.parametrize("key", sorted(key.removesuffix(":out") for key in EMBEDDED if key.endswith(":out")))
def test_embeddings_of_transformers(key: str, tmp_path: Path) -> None:
    """With the checkpoint's own formats, the encoder gives the embeddings of the checkpoint's own program.

    Where the model has the exact GELU and llama.cpp its approximation, so have we: with the approximation in
    transformers, too, the results agree closely, and without it nearly.
    """
    name, kind = key.split(":")
    with open_gguf(convert(SPECS[name], tmp_path, "COPY")) as file:
        with bound(ReferenceBackend(), file.metadata, file.tensors, KINDS[kind]) as encoder:
            own = given(kind, EMBEDDED[f"{key}:shape"])
            found = encoder.encode(list(own) if kind == "vision" else [own])
        if key + ":rows" in EMBEDDED:
            found = found[EMBEDDED[f"{key}:rows"]]
        exact = relative(found, EMBEDDED[f"{key}:out"])
        if name in APPROXIMATED:
            assert relative(found, EMBEDDED[f"{key}:tanh"]) < 5e-6
            assert CLOSE / 3 < exact < 3e-4, f"{exact:.1e}"
        else:
            assert exact < 5e-6, f"{exact:.1e}"


def relative(found: np.ndarray, truth: np.ndarray) -> float:
    assert found.shape == truth.shape
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
