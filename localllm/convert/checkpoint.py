"""An open Hugging Face checkpoint with the interface of an open GGUF file: metadata keys, and tensors that are read on
demand."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from localllm.base.closing import Closing
from localllm.base.printable import printable
from localllm.convert.assembly import Assembly
from localllm.convert.card import general_keys, sampling_keys
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig, class_of, read_config
from localllm.convert.hyperparameters import shape_keys, shape_notes
from localllm.convert.modules import dense_shards, dense_tensors, dropped, pooling_of, read_modules
from localllm.convert.opening import opening, plain
from localllm.convert.quantized import read_packing
from localllm.convert.recipe import Recipe, evaluated
from localllm.convert.recipes.pocket_tts import told_by_tensors
from localllm.convert.recipes.table import BY_CLASS
from localllm.convert.rope_scaling import rope_of
from localllm.convert.safetensors import open_shards
from localllm.convert.tensor_registry import TensorRegistry
from localllm.convert.tokenizer_keys import tokenizer_keys
from localllm.models import ARCHITECTURES, ModelError, record
from localllm.models import read_config as read_gguf_config
from localllm.models.reading.bounds import MAX_LAYERS
from localllm.plan import summarize

_PURPOSE = re.compile(r"(Model)?(For\w+|LM|LMHeadModel|Model)$")  # suffixes of class names


class Checkpoint(Closing):
    """An open checkpoint; `with open_checkpoint(folder) as model:` closes it. `notes` lists what the GGUF file leaves
    out."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        if not folder.is_dir():
            raise ConvertError(f"{folder}: not a folder; give a model folder as saved by transformers")
        config = told_by_tensors(folder) or read_config(folder)
        recipe, packing = _recipe(config), read_packing(config)
        config = recipe.said(config)
        layers, heads = config.layers, config.heads
        config.integer("num_key_value_heads")  # check it, even if the recipe has its own number
        if layers > MAX_LAYERS:
            raise ConvertError(f"{config.path}: num_hidden_layers is {layers}; supported: at most {MAX_LAYERS}")
        self._shards = open_shards(folder)
        with opening(folder, self.close):
            modules = read_modules(folder)
            dense = dense_shards(modules) if recipe.dense else []
            shards, self._shards = self._shards, [*self._shards, *dense]
            self.size = sum(shard.size for shard in self._shards)  # total size of all shards in bytes
            head_dim = config.integer("head_dim") or config.width // heads
            if recipe.head_dim is not None:
                head_dim = recipe.head_dim(config)
            rope = rope_of(config, head_dim, recipe.rope_tensors)
            registry = TensorRegistry(
                shards, layers, packing, recipe.inside, recipe.others, lambda raw: recipe.raw(raw, config)
            )
            values = {} if recipe.values is None else recipe.values(registry.take, config)
            assembly, behind = Assembly(registry, recipe, config, rope.tensors), list(dense_tensors(dense))
            self.tensors = assembly.tensors | {tensor.name: tensor for tensor in behind}
            rows = self.tensors["token_embd.weight"].shape[0]
            behind_keys = recipe.dense(behind) if recipe.dense and behind else {}
            keys = shape_keys(config, recipe, rope, rows, pooling_of(modules), behind_keys) | values
            parameters = self._verify(keys, recipe, assembly)
            further = {} if recipe.tokens is None else recipe.tokens(config)
            vocabulary = tokenizer_keys(folder, config, rows, recipe.tokenizer, recipe.templates, further)
            general, card_notes = general_keys(folder, parameters)
            stored = {
                "general.architecture": recipe.name,
                **general,
                **sampling_keys(folder),
                **keys,
                **vocabulary.keys,
            }
            stored |= evaluated(recipe.whole_keys, config, stored, self.tensors)
            stored = {key: value for key, value in stored.items() if value is not None}
            if "token_types.weight" in self.tensors:
                stored["tokenizer.ggml.token_type_count"] = self.tensors["token_types.weight"].shape[0]
        self.stored: Mapping[str, Any] = MappingProxyType(stored)
        self.metadata: Mapping[str, Any] = MappingProxyType(plain(stored))
        left = () if recipe.dense else dropped(modules, recipe.name)
        self.has_encoders = registry.senses > 0  # of pictures or sound, for an mmproj file
        self.notes = (*registry.notes, *left, *shape_notes(config, recipe), *rope.notes, *vocabulary.notes, *card_notes)

    def _verify(self, keys: Mapping[str, Any], recipe: Recipe, assembly: Assembly) -> int:
        """Return the number of parameters; raise ConvertError if a tensor is missing, has the wrong shape or is not
        read."""
        metadata, row = {"general.architecture": recipe.name, **keys}, ARCHITECTURES[recipe.name]
        try:
            plan = record(read_gguf_config(metadata, recipe.name), row, self.tensors)
        except ModelError as error:
            origin = assembly.origin(str(error).split(":")[0])
            made = f" (it is made of {origin})" if origin else ""
            raise ConvertError(f"{self.path}: {error}{made}") from None
        assembly.check_read({*plan.tensors, *row.ignored})
        return summarize(plan).parameters

    def close(self) -> None:
        """Close the file descriptors. No other thread may be reading."""
        for shard in self._shards:
            shard.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {str(self.path)!r}: {len(self.stored)} keys, {len(self.tensors)} tensors>"


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint written by `save_pretrained`, and check everything except the weights.

    The check covers the metadata keys, the tokenizer, and the tensor names and shapes that the architecture's forward
    pass expects. Raises ConvertError with a one-line message if the checkpoint is incomplete or unsupported.
    """
    return Checkpoint(Path(folder))


def _recipe(config: HfConfig) -> Recipe:
    name = class_of(config)
    rows = BY_CLASS.get(name)
    if rows is None:
        near = _similar(name[:80])
        similar = f"similar supported classes: {', '.join(near)}; " if near else ""
        raise ConvertError(
            f"{config.path}: class '{printable(name)}' cannot be converted; use a GGUF file of the model ({similar}"
            "docs/architectures.md lists all)"
        )
    return next(row for row in rows if row.when is None or row.when(config))


def _similar(name: str) -> list[str]:
    """Return up to three model classes with similar names, for any task."""
    by_model: dict[str, list[str]] = {}
    for known in BY_CLASS:
        by_model.setdefault(_PURPOSE.sub("", known), []).append(known)
    return [known for near in get_close_matches(_PURPOSE.sub("", name), by_model, 3) for known in by_model[near]][:3]
