"""The reference kit of projectors: files with weights by rule, preprocessed inputs, and the expected embeddings."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tests.models.support import MemoryWeight

FOLDER = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "multimodal"


@cache
def module(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


@dataclass(frozen=True)
class Chunk:
    """An input of the encoder, and what is expected."""

    name: str
    number: int  # in the layout
    kind: str  # "vision" or "audio"
    tensors: tuple[np.ndarray, ...]
    flags: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    name: str

    def stored(self) -> Any:
        return np.load(FOLDER / f"{self.name}.npz")

    def loaded(self) -> tuple[dict[str, Any], dict[str, MemoryWeight]]:
        make = module("make_mmproj")
        with self.stored() as z:
            metadata, listed, _, _ = make.parse_header(z["header"].tobytes())
            seed = int(z["seed"])
        tensors = {}
        for name, shape, kind, _ in listed:
            values = make.clip_values(name, shape, seed).reshape(shape[::-1])
            tensors[name] = MemoryWeight.of(name, values, "F16" if kind else "F32")
        return metadata, tensors

    def chunks(self, wanted: str = "") -> Iterator[Chunk]:
        """Yield the media chunks of the inputs, as the kit's reference programs preprocess them."""
        make, reference = module("make_mmproj"), module("reference_rest")
        metadata, tensors = self.loaded()
        metadata["tensors"] = {name: tensor.values().astype(np.float64) for name, tensor in tensors.items()}
        prepare, _ = reference.MODELS[self.name]
        with self.stored() as z:
            for name, kind, data in make.inputs(z):
                if wanted and name != wanted:
                    continue
                if kind == "pair":
                    groups = [[prepare(each, metadata)[0] for each in data]]
                elif kind == "two":
                    groups = [[each] for picture in data for each in prepare(picture, metadata)]
                else:
                    own = data if kind == "image" else data.astype(np.float64)
                    groups = [[each] for each in prepare(own, metadata)]
                if self.name == "llava16":
                    groups = groups[1:] + groups[:1]
                for number, group in zip(make.media_chunks(z, name), groups, strict=True):
                    flags = f"{name}.{number}.pre0.flags"
                    own_flags = tuple(int(n) for n in z[flags]) if flags in z else (0,) * 8
                    arrays = tuple(np.asarray(each, np.float32) for each in group)
                    yield Chunk(name, number, "audio" if kind == "audio" else "vision", arrays, own_flags)

    def errors(self, chunk: Chunk, embeddings: np.ndarray) -> dict[str, float]:
        """Return `rows` and `centered`; where the kit has the original model's order, that is what counts."""
        make = module("make_mmproj")
        with self.stored() as z:
            base = f"{chunk.name}.{chunk.number}"
            if f"{base}.hf.rows" in z:
                rows = z[f"{base}.hf.rows"].astype(np.float64)
                own = np.asarray(embeddings, np.float64)[make.sample_index(len(embeddings), len(rows))]
                spread = ((rows - rows.mean(0)) ** 2).sum()
                return {"rows": make.nmse(own, rows), "centered": float(((own - rows) ** 2).sum() / spread)}
            found = make.check_media(z, chunk.name, chunk.number, embeddings)
            return {key: found[key] for key in ("rows", "centered")}
