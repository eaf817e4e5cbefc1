"""The input of a quantization: a GGUF file or a converted checkpoint, with metadata and tensors that are read by
rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from localllm.convert import EncoderCheckpoint, open_checkpoint
from localllm.gguf import GGUFFile, open_gguf
from localllm.gguf.header import Stored
from localllm.loading.resolve import resolve
from localllm.plan import Tensor
from localllm.quant.mixes import ALIASES, MIXES, Geometry

_TYPE_SUFFIX = re.compile(rf"[-._]({'|'.join([*MIXES, *ALIASES])})$", re.IGNORECASE)
_PART_SUFFIX = re.compile(r"-00001-of-\d{5}$")


class Source(Protocol):
    """An open model: a `localllm.gguf.GGUFFile`, or a checkpoint opened by `localllm.convert`."""

    @property
    def path(self) -> Path: ...
    @property
    def stored(self) -> Mapping[str, Stored]: ...  # metadata for `write_gguf`, with every number in its stored type
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    def __enter__(self) -> Any: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_source(name: str, encoders: bool = False) -> Source:
    """Open the model that IN names: a GGUF file (or its first part), a bundled model, or a Hugging Face checkpoint.

    With `encoders`, open the encoders of a checkpoint, which become an mmproj file.
    """
    path = resolve(name, folders=True)
    if encoders:
        return EncoderCheckpoint(path)
    if path.is_dir():
        return open_checkpoint(path)
    file: GGUFFile = open_gguf(path)
    return file


def geometry_of(stored: Mapping[str, Stored]) -> Geometry:
    """Return the properties that the rules of a mix use. A per-layer number is represented by its value in the first
    layer."""
    architecture = str(stored.get("general.architecture", ""))

    def first(key: str, default: int) -> int:
        value = stored.get(f"{architecture}.{key}", default)
        if isinstance(value, np.ndarray):
            value = value[0] if value.size else default
        return int(value) if isinstance(value, int | np.integer) else default

    heads = first("attention.head_count", 0)
    return Geometry(
        architecture, first("block_count", 0), heads, first("attention.head_count_kv", heads), first("expert_count", 0)
    )


def mmproj_target(target: Path) -> Path:
    """Return the path at which a model's mmproj file is found."""
    stem = _TYPE_SUFFIX.sub("", target.name.removesuffix(".gguf"))
    return target.with_name(f"mmproj-{stem}-F16.gguf")


def default_target(path: Path, kind: str) -> Path:
    """Return the default output: next to the input, with the new type in place of the old type in the name."""
    stem = path.name if path.is_dir() else path.name.removesuffix(".gguf")
    stem = _TYPE_SUFFIX.sub("", _PART_SUFFIX.sub("", stem))
    return path.with_name(f"{stem}-{kind}.gguf")


def values_of(tensor: Tensor) -> int:
    """Return the number of values in a tensor."""
    return int(np.prod(tensor.shape, dtype=np.int64))
