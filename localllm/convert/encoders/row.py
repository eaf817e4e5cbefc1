"""The form of a row: which tensors and settings of a checkpoint become the encoders of an mmproj file.

llama.cpp's converter of mmproj files writes the same names, formats and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Layer
from localllm.convert.tensor import LazyTensor


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a checkpoint, for one of its encoders."""

    folder: Path
    config: HfConfig  # config.json
    own: HfConfig  # the encoder's table in it
    preparing: HfConfig  # preprocessor_config.json and processor_config.json
    text_width: int


Read = Callable[[Settings], Any]


def layers_of(settings: Settings) -> Sequence[int]:
    """Return the numbers of an encoder's layers."""
    return range(settings.own.needed(*LAYERS))


LAYERS = ("num_hidden_layers", "depth", "encoder_layers")


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers with the same tensors. `{}` is the layer's number, counted from 0 in the checkpoint."""

    source: str  # what names in the checkpoint begin with
    target: str  # what names in the mmproj file begin with
    layer: Layer
    numbers: Callable[[Settings], Sequence[int]] = layers_of  # in the mmproj file


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """One encoder of a row."""

    kind: Literal["vision", "audio"]
    projector: str
    tables: tuple[str, ...]  # where config.json has its settings, the first that exists; tables in tables have dots
    stacks: tuple[Stack, ...]
    top: Layer
    # Further keys below "clip."; None removes a key that all encoders have.
    keys: Mapping[str, Any | Read] = field(default_factory=dict)
    # Values that transformers assumes for keys that the encoder's table lacks.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    made: Callable[[Settings], list[LazyTensor]] | None = None  # tensors that the checkpoint does not store
    own_key: bool = False  # the projector type is a key of this encoder, for files with two types
    optional: bool = False  # some checkpoints lack it


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRow:
    """The encoders of one model class."""

    classes: tuple[str, ...]
    encoders: tuple[Encoder, ...]
    # Tensors whose names begin so belong to encoders, after one of `inside` is removed; all others to the text model.
    starts: tuple[str, ...]
    inside: tuple[str, ...] = ("model.",)
    # Regular expressions and their replacements, applied in order to the names of the tensors.
    spellings: tuple[tuple[str, str], ...] = ()
    skipped: str = ""  # regular expression of names that the encoders do not use
    # Regular expression of names in the mmproj file, and the format that every type gives these tensors.
    formats: tuple[tuple[str, str], ...] = ()
    check: Callable[[HfConfig], str | None] | None = None  # returns why a checkpoint of the class cannot be converted
