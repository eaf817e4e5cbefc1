"""Helpers of the conversion tests: write safetensors, compute a checkpoint's logits, and write a GGUF."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from localllm import quant
from localllm.convert import Checkpoint, ConvertError, LazyTensor, open_checkpoint
from localllm.gguf.writer import NewTensor, write_gguf
from localllm.models import architecture_of, read_config, record
from tests.models.support import Driver, bind_reference

HF = Path(__file__).parent / "data" / "hf"


def logits_of(model: Checkpoint, ids: Sequence[int]) -> np.ndarray:
    """Return logits (T, vocabulary) in float32, computed by the reference backend from the open checkpoint."""
    architecture = architecture_of(model.metadata)
    config = read_config(model.metadata, architecture.name)
    plan = record(config, architecture, model.tensors, len(ids))
    return Driver(bind_reference(plan)).step([(0, ids)])


def save_zeros(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write a safetensors file of zeros in F32, which takes no space on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    path.write_bytes(blob(header))
    os.truncate(path, path.stat().st_size + end)


def check_refused(folder: Path, message: str) -> None:
    """Check that opening the checkpoint fails with a one-line error that begins with its path."""
    import pytest  # the data generators run without pytest

    with pytest.raises(ConvertError, match=message) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(folder))


def edit_json(path: Path, **new: Any) -> None:
    """Replace some keys of a JSON file, or remove them if None."""
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in {**old, **new}.items() if value is not None}))


def edit_tensors(path: Path, change: Callable[[dict[str, Any]], Any], more: bytes = b"") -> None:
    """Change the tensor table in the header of a safetensors file, and append data."""
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    change(header)
    path.write_bytes(blob(header, data[size:] + more))


def write_modules(folder: Path, modules: Mapping[str, tuple[str, dict[str, Any]]]) -> None:
    """Write the files of sentence-transformers modules behind the model: type and settings by their folders."""
    named = [("", "sentence_transformers.models.Transformer"), *((path, kind) for path, (kind, _) in modules.items())]
    entries = [{"idx": i, "path": path, "type": kind} for i, (path, kind) in enumerate(named)]
    (folder / "modules.json").write_text(json.dumps(entries))
    for path, (_, settings) in modules.items():
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(settings))


def write_f32(model: Checkpoint, path: Path) -> None:
    """Write the checkpoint as a GGUF with all tensors in F32."""
    tensors = [NewTensor(x.name, "F32", x.shape, lambda x=x: values(x).view(np.uint8)) for x in model.tensors.values()]
    write_gguf(path, {**model.stored, "general.file_type": 0, "general.quantization_version": 2}, tensors)


def values(tensor: LazyTensor) -> np.ndarray:
    """Return the tensor's values as float32 in the tensor's shape."""
    return quant.dequantize(tensor.read(0, tensor.rows), tensor.format).reshape(tensor.shape)


def digest(values: np.ndarray) -> str:
    """Return a digest of the values in F32. Bytes and int32 are hashed unconverted."""
    kept = values.dtype if values.dtype in (np.uint8, np.int32) else np.float32
    return hashlib.sha256(np.ascontiguousarray(values, kept).tobytes()).hexdigest()[:16]


def sample(values: np.ndarray) -> list[Any]:
    """Return every n-th row, starting at the last. The reference stores some tensors as such rows."""
    found: list[Any] = values[:: -1 - len(values) // 32].tolist()
    return found


def blob(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


_DTYPES = {
    "float32": "F32", "float16": "F16", "uint8": "U8", "int8": "F8_E4M3", "int16": "I16", "int32": "I32",
    "int64": "I64",
}  # fmt: skip


def save(path: Path, tensors: dict[str, np.ndarray], types: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write a safetensors file. int8 arrays are stored as FP8 unless `types` says otherwise."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        dtype = types.get(name) or _DTYPES[str(array.dtype)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    path.write_bytes(blob(header, data))
