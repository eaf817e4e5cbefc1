"""Tiny checkpoints with encoders: their settings and tensors (data/mmproj.json.gz), and how to write a folder.

The names of the tensors seed the weights. The file also has digests of llama.cpp's conversions, and data/mmproj.npz has
the embeddings by transformers (`mmproj_make`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from localllm import quant
from localllm.convert import EncoderCheckpoint
from localllm.gguf import open_gguf, write_gguf
from localllm.quant.mixes import MixOptions, find
from localllm.quantize.conversion import ConversionSettings, conversion
from localllm.quantize.jobs import copy_jobs, metadata, plan_jobs
from tests.localllm.convert.support import save
from tests.localllm.convert.weights import numbers

DATA = Path(__file__).parent / "data"
TYPES = ("F32", "F16", "BF16", "Q8_0")
# Tensors whose last bits depend on the program that computes them: sines, softplus.
COMPUTED = re.compile(r"a\.position_embd\.weight|per_dim_scale")
BREAK = 7  # id of [IMG_BREAK]


@cache
def stored() -> dict[str, Any]:
    """Return by case: config, preparing, and tensors as [name, shape, mean of the random values]; and `llama_cpp`."""
    path = DATA / "mmproj.json.gz"
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}
    return found


def given(kind: str, shape: Sequence[int]) -> np.ndarray:
    """Return an input: pixels of the frames, (frames, height, width, 3), or a spectrogram (bins, frames)."""
    random = np.random.RandomState(7)
    return (random.random_sample(shape) if kind == "vision" else random.standard_normal(shape)).astype(np.float32)


def tensors_of(spec: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: _values(name, shape, base) for name, shape, base in spec["tensors"]}


def _values(name: str, shape: list[int], base: Any) -> np.ndarray:
    if name.endswith(("_min", "_max")):  # limits of inputs and outputs
        return np.float32(-1.5 if name.endswith("_min") else 1.25).reshape(shape)
    return numbers(name, shape, base)


def write(spec: dict[str, Any], folder: Path, spelling: tuple[str, str] = ("", "")) -> Path:
    """Write a checkpoint, whose weights are of the type that its specification says."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(spec["config"]))
    (folder / "preprocessor_config.json").write_text(json.dumps(spec["preparing"]))
    tokens = [{"id": 0, "content": "<unk>"}, {"id": BREAK, "content": "[IMG_BREAK]"}]
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens, "model": {"vocab": {}}}))
    tensors = {re.sub(*spelling, name): x for name, x in tensors_of(spec).items()}
    types: dict[str, str] = {}
    if spec["dtype"] == "BF16":
        tensors = {name: (x.view(np.uint32) >> 16).astype(np.int16) for name, x in tensors.items()}
        types = dict.fromkeys(tensors, "BF16")
    save(folder / "model.safetensors", tensors, types)
    return folder


def convert(spec: dict[str, Any], folder: Path, kind: str) -> Path:
    """Write a checkpoint, and its encoders as an mmproj file of this type; return the path of the file."""
    out, mix = folder / "mmproj.gguf", None if kind == "COPY" else find(kind)
    with EncoderCheckpoint(write(spec, folder / "model")) as source:
        fixed = source.fixed(mix.format) if mix else {}
        jobs = plan_jobs(source, mix, MixOptions(), fixed) if mix else copy_jobs(source)
        with conversion(jobs, source.tensors, ConversionSettings(1)) as tensors:
            write_gguf(out, metadata(source.stored, mix.file_type if mix else None, None, ""), tensors)
    return out


def digests(path: Path) -> dict[str, Any]:
    """Return the keys and tensors of an mmproj file: format, shape, and a digest of the bytes or sampled values."""
    with open_gguf(path) as file:
        keys = {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in file.metadata.items()
            if key.startswith("clip.") or key in ("general.architecture", "general.type", "general.file_type")
        }
        tensors = {}
        for name, tensor in file.tensors.items():
            rows = tensor.read(0, tensor.rows)
            told: Any = hashlib.sha256(rows.tobytes()).hexdigest()[:16]
            if COMPUTED.search(name):
                told = quant.dequantize(rows, tensor.format).reshape(-1)[::97].tolist()
            tensors[name] = [tensor.format, list(tensor.shape), told]
        return {"keys": keys, "tensors": tensors}
