"""An open checkpoint with the interface of an open mmproj file: the encoders of pictures and sound of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from localllm import quant
from localllm.base.closing import Closing
from localllm.base.printable import printable
from localllm.convert import tensor as t
from localllm.convert.assembly import Taken
from localllm.convert.card import general_keys
from localllm.convert.encoders.keys import keys_of, width_of_text
from localllm.convert.encoders.row import Encoder, EncoderRow, Settings
from localllm.convert.encoders.table import ROWS_BY_CLASS
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig, class_of, read_config
from localllm.convert.jsonfile import read_json
from localllm.convert.opening import opening, plain
from localllm.convert.quantized import read_packing
from localllm.convert.recipe import Change
from localllm.convert.recipes.table import BY_CLASS
from localllm.convert.safetensors import open_shards
from localllm.convert.tensor import LazyTensor
from localllm.convert.tensor_registry import COMPUTED, TensorRegistry
from localllm.models import ModelError
from localllm.models.encoders import encoder_of
from localllm.models.reading.bounds import MAX_LAYERS
from localllm.quant.mixes import allows

ARCHITECTURE = "clip"
# Types whose formats are the same for all matrices, as llama.cpp's converter offers them.
_PLAIN = ("F32", "F16", "BF16", "Q8_0")
# Kernels over pixels, which no type stores in another format than F16 and F32.
_KERNELS = re.compile(r"\.(patch_embd|patch_merger)\.weight")
_PREPARING = (("preprocessor_config.json", "media_proc_cfg"), ("processor_config.json", "image_processor"))


class EncoderCheckpoint(Closing):
    """The encoders of a checkpoint; `with EncoderCheckpoint(folder) as model:` closes it."""

    notes: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.path = folder
        if not folder.is_dir():
            raise ConvertError(f"{folder}: not a folder; give a model folder as saved by transformers")
        merged = read_config(folder)
        config = HfConfig(merged.path, read_json(merged.path), {})
        self._row = _row(config)
        self._shards = open_shards(folder)
        with opening(folder, self.close):
            if problem := self._row.check and self._row.check(config):
                raise ConvertError(f"{config.path}: {problem}")
            preparing, width = _preparing(folder), width_of_text(_with_defaults(merged))
            self.size = sum(shard.size for shard in self._shards)
            registry = TensorRegistry(self._shards, MAX_LAYERS, read_packing(merged), called=self._called)
            keys: dict[str, Any] = {}
            names: dict[str, str] = {}
            found: dict[str, LazyTensor] = {}
            kinds = []
            for encoder in self._row.encoders:
                if (own := _table(config, encoder)) is None:
                    continue
                settings = Settings(folder, config, own, preparing, width)
                taken = _tensors_of(encoder, registry, settings)  # first, because it limits the number of layers
                keys |= keys_of(encoder, settings)
                found |= taken.made
                names |= taken.names
                kinds.append(encoder.kind)
            self._refuse(registry)
            self.tensors = {name: self._exact(found[name]) for name in sorted(found)}
            self._check(keys, kinds, names)
            general, self.notes = general_keys(folder, sum(prod(tensor.shape) for tensor in self.tensors.values()))
        self.stored: Mapping[str, Any] = MappingProxyType(
            {"general.architecture": ARCHITECTURE, **general, "general.type": "mmproj", **keys}
        )
        self.metadata: Mapping[str, Any] = MappingProxyType(plain(self.stored))

    def fixed(self, format: str) -> dict[str, str]:
        """Return the formats that do not follow from a type with this main format, by tensor."""
        return {name: fixed for name, tensor in self.tensors.items() if (fixed := self._fixed(tensor, format))}

    def close(self) -> None:
        """Close the file descriptors. No other thread may be reading."""
        for shard in self._shards:
            shard.close()

    def _called(self, stored: str) -> str | None:
        """Return the name by which rows call a tensor of the encoders; None for all other tensors."""
        row, names = self._row, [stored, *(stored.removeprefix(p) for p in self._row.inside if stored.startswith(p))]
        name = next((name for name in names if name.startswith(row.starts)), None)
        if name is None or name.endswith(COMPUTED) or (row.skipped and re.search(row.skipped, name)):
            return None
        for pattern, spelling in row.spellings:
            name = re.sub(pattern, spelling, name)
        return name

    def _fixed(self, tensor: LazyTensor, format: str) -> str:
        """Return a tensor's format if it does not follow from the type, else ""."""
        name = tensor.name
        if len(tensor.shape) < 2 or name.endswith("_norm.weight"):
            return "F32"
        if named := next((f for pattern, f in self._row.formats if re.search(pattern, name)), ""):
            return named
        if _KERNELS.search(name):
            return "F16" if format == "F16" else "F32"
        if name.endswith("position_embd.weight") or not name.endswith(".weight"):
            return "F32"
        if allows(name, tensor.shape, ARCHITECTURE):
            return ""
        fits = tensor.shape[-1] % quant.FORMATS[format].block_values == 0
        return format if format in _PLAIN and fits else "F16"

    def _exact(self, tensor: LazyTensor) -> LazyTensor:
        """Return a tensor in F32, if every type stores it so."""
        exact = all(self._fixed(tensor, format) == "F32" for format in _PLAIN)
        return t.as_float32(tensor) if exact or tensor.format == "F64" else tensor

    def _refuse(self, registry: TensorRegistry) -> None:
        if unknown := [name for name in registry.rest() if not registry.is_taken(name)]:
            more = f", nor can {len(unknown) - 1} others" if unknown[1:] else ""
            raise ConvertError(
                f"tensor '{printable(registry.stored(unknown[0]))}' cannot be stored in an mmproj file of "
                f"{self._row.classes[0]}{more}"
            )

    def _check(self, keys: Mapping[str, Any], kinds: list[Any], names: Mapping[str, str]) -> None:
        """Raise ConvertError if a tensor is missing or has the wrong shape."""
        metadata = plain(keys)
        for kind in kinds:
            try:
                encoder_of(metadata, self.tensors, kind)
            except ModelError as error:
                source = names.get(str(error).split(":")[0])
                made = f" (it is made of {printable(source)})" if source else ""
                raise ConvertError(f"{self.path}: {error}{made}") from None

    def __repr__(self) -> str:
        return f"<EncoderCheckpoint {str(self.path)!r}: {len(self.stored)} keys, {len(self.tensors)} tensors>"


class _Taken(Taken):
    """Tensors of an encoder, which are made of floats."""

    def put(self, name: str, parts: list[LazyTensor], change: Change) -> None:
        for part in parts:
            if part.format not in t.FLOATS:
                problem = f"is stored as {part.format}; supported: F32, F16, BF16, F64 and FP8"
                raise ConvertError(f"{printable(part.name)}: {problem}")
        super().put(name, parts, change)


def _tensors_of(encoder: Encoder, registry: TensorRegistry, settings: Settings) -> Taken:
    taken = _Taken(registry, settings.own)
    taken.take(encoder.top)
    for stack in encoder.stacks:
        numbers = stack.numbers(settings)
        if len(numbers) > MAX_LAYERS:
            raise ConvertError(f"{settings.config.path}: has {len(numbers)} layers; supported: at most {MAX_LAYERS}")
        for source, number in enumerate(numbers):
            taken.take(stack.layer, stack.source.format(source), stack.target.format(number))
    if encoder.made is not None:
        taken.made.update({tensor.name: tensor for tensor in encoder.made(settings)})
    return taken


def _row(config: HfConfig) -> EncoderRow:
    name = class_of(config)
    row = ROWS_BY_CLASS.get(name)
    if row is None:
        raise ConvertError(
            f"{config.path}: the encoders of class '{printable(name)}' cannot be converted; use an mmproj file of the "
            "model (docs/media.md lists the supported classes)"
        )
    return row


def _with_defaults(config: HfConfig) -> HfConfig:
    """Return the settings of the text model, with transformers' defaults if it can be converted."""
    recipes = BY_CLASS.get(class_of(config), ())
    recipe = next((row for row in recipes if row.when is None or row.when(config)), None)
    return config if recipe is None else recipe.said(config)


def _table(config: HfConfig, encoder: Encoder) -> HfConfig | None:
    """Return an encoder's table of config.json, or None if it lacks an encoder that is optional."""
    for place in encoder.tables:
        found = config
        for name in place.split("."):
            found = found.inner(name)
        if found.values:
            return HfConfig(found.path, found.values, encoder.defaults)
    if encoder.optional:
        return None
    raise config.error(encoder.tables[0], None, "the settings of the encoder")


def _preparing(folder: Path) -> HfConfig:
    """Return the settings of the preprocessor: both files, and the tables in them that hold a picture's settings."""
    found: dict[str, Any] = {}
    path = folder / _PREPARING[0][0]
    for name, inner in _PREPARING:
        if (folder / name).is_file():
            path = folder / name
            values = read_json(path)
            table = values.get(inner)
            found |= values | (table if isinstance(table, dict) else {})
    return HfConfig(path, found, {})
