"""Helpers of the conversion tests: write safetensors, compute a checkpoint's logits, and write a GGUF."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

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


def check_refused(folder: Path, message: str) -> None:
    """Check that opening the checkpoint fails with a one-line error that begins with its path."""
    import pytest  # the data generators run without pytest

    with pytest.raises(ConvertError, match=message) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(folder))


def write_f32(model: Checkpoint, path: Path) -> None:
    """Write the checkpoint as a GGUF with all tensors in F32."""
    tensors = [NewTensor(x.name, "F32", x.shape, lambda x=x: values(x).view(np.uint8)) for x in model.tensors.values()]
    write_gguf(path, {**model.stored, "general.file_type": 0, "general.quantization_version": 2}, tensors)


def values(tensor: LazyTensor) -> np.ndarray:
    """Return the tensor's values as float32 in the tensor's shape."""
    return quant.dequantize(tensor.read(0, tensor.rows), tensor.format).reshape(tensor.shape)


def blob(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


_DTYPES = {
    "float32": "F32", "float16": "F16", "uint8": "U8", "int8": "F8_E4M3", "int32": "I32", "int64": "I64",
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
