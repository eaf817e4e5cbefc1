"""The reference kit of pictures and sound (`../shared/data/multimodal`): text models, prompts, llama.cpp's logits.

Embeddings come from the kit's float64 encoders. `kit` is None without the reference data.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from localllm.engine import MediaSpan
from localllm.models import MediaInput

FOLDER = Path(__file__).parents[2].parent / "shared" / "data" / "multimodal"
# case -> what the text model takes, and the largest normalized mean squared error of its logits
CASES = {
    "llava15": (MediaInput(), 1e-3),
    "llava16": (MediaInput(), 1e-3),
    "gemma3": (MediaInput(span=16), 1e-3),
    "qwen2vl": (MediaInput(), 1e-3),
    "qwen3vl": (MediaInput(streams=3), 1e-3),
    "ultravox": (MediaInput(), 1e-3),
    "qwen3.5": (MediaInput(), 1e-3),
    "gemma4v-31b": (MediaInput(span=1120), 1e-2),
    "gemma4v-e2b": (MediaInput(span=1120), 1e-2),
    "qwen2.5o": (MediaInput(), 1e-3),
}


class Encoded:
    """An encoding in segments whose result is known. Counts its segments."""

    def __init__(self, embeddings: np.ndarray, segments: int = 3) -> None:
        self._embeddings, self.left = np.ascontiguousarray(embeddings, np.float32), segments
        self.segments = 0

    @property
    def embeddings(self) -> np.ndarray:
        assert not self.left, "read before the last segment"
        return self._embeddings

    def advance(self, seconds: float = 0.0) -> bool:
        assert self.left, "advanced beyond the end"
        self.left, self.segments = self.left - 1, self.segments + 1
        return not self.left


def span(
    embeddings: np.ndarray, positions: np.ndarray | None = None, advance: int = 0, causal: bool = True
) -> MediaSpan:
    """Return a picture with these embeddings (tokens, width), by default with the positions of a text."""
    count = len(embeddings)
    where = np.arange(count, dtype=np.int32) if positions is None else np.asarray(positions, np.int32)
    how = f"{advance} {causal}".encode()
    key = hashlib.sha256(np.asarray(embeddings, np.float32).tobytes() + where.tobytes() + how).digest()
    return MediaSpan(key, count, where, advance or count, causal, lambda: Encoded(embeddings))


@dataclass(frozen=True)
class Prompt:
    """A prompt of the kit, and the logits after it and after each of the tokens that follow."""

    name: str
    chunks: tuple[list[int] | MediaSpan, ...]
    following: list[int]
    logits: np.ndarray

    @property
    def tokens(self) -> list[int | MediaSpan]:
        found: list[int | MediaSpan] = []
        for chunk in self.chunks:
            found += [chunk] if isinstance(chunk, MediaSpan) else chunk
        return found


@cache
def kit() -> Any:
    """Return the kit's modules (make_mmproj, reference_numpy), or None."""
    if not (FOLDER / "make_mmproj.py").exists():
        return None
    sys.path.insert(0, str(FOLDER))
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        importlib.import_module("reference_more")
        importlib.import_module("reference_rest")
        return importlib.import_module("make_mmproj"), importlib.import_module("reference_numpy")
    finally:
        sys.path.remove(str(FOLDER))
        sys.dont_write_bytecode = written


def write_text_model(case: str, folder: Path) -> Path:
    """Write the text model of a case as a GGUF."""
    make, _ = kit()
    with np.load(FOLDER / f"{case}.npz") as z:
        name, seed = str(z["text_model"]), int(z["seed"])
    path = folder / f"{name}.gguf"
    make.build(str(FOLDER / f"{name}.npz"), str(path), seed)
    return path


def prompts(case: str, names: Sequence[str] = ()) -> Iterator[Prompt]:
    """Yield the prompts of a case, by default all of them."""
    make, reference = kit()
    z = np.load(FOLDER / f"{case}.npz")
    metadata, weights = reference.load(str(FOLDER / f"{case}.npz"), int(z["seed"]))
    for name, kind, data in make.inputs(z):
        if names and name not in names:
            continue
        given = _embeddings(case, kind, data, metadata, weights, reference)
        chunks: list[list[int] | MediaSpan] = []
        for k, (type_, count, advance, start, *_, apart) in enumerate(z[f"{name}.layout"].tolist()):
            if not type_:
                chunks.append(z[f"{name}.{k}.text"].tolist())
                continue
            rows, where = next(given), None
            assert len(rows) == count
            if f"{name}.{k}.pos" in z:
                where = z[f"{name}.{k}.pos"][:, [0, 2, 1, 3]] - [start, start, start, 0]  # t, x, y, z -> t, y, x, z
            chunks.append(span(rows, where, advance, not apart))
        yield Prompt(name, tuple(chunks), z[f"{name}.next_tokens"].tolist(), z[f"{name}.logits"])


def _embeddings(case: str, kind: str, data: Any, metadata: Any, weights: Any, reference: Any) -> Iterator[np.ndarray]:
    """Yield the embeddings of each media chunk, as the kit's float64 encoder computes them."""
    audio = kind == "audio"
    prepare, forward = reference.MODELS[
        "qwen2a" if audio and case == "qwen2.5o" else "qwen2.5vl" if case == "qwen2.5o" else case
    ]
    if kind == "pair":
        pieces = [[prepare(each, metadata)[0] for each in data]]
    elif kind == "two":
        pieces = [[piece] for each in data for piece in prepare(each, metadata)]
    else:
        pieces = [[piece] for piece in prepare(data.astype(np.float64) if audio else data, metadata)]
    if case == "llava16":  # the overview comes last
        pieces = pieces[1:] + pieces[:1]
    for each in pieces:
        net = reference.Net(metadata, weights, "audio" if audio else "vision")
        net.viewsep, net.lead_pad, net.anyres = 0, 0, [0] * 4
        yield forward(net, each if forward in (reference.qwen25, reference.qwen3) else each[0])
