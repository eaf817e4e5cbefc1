"""An open Hugging Face checkpoint with the interface of an open GGUF file: metadata keys, and tensors that are read on
demand."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from localllm import quant
from localllm.base.closing import Closing
from localllm.base.errors import LocalLLMError
from localllm.base.printable import printable
from localllm.convert import tensor as t
from localllm.convert.card import general_keys, sampling_keys
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig, class_of, read_config
from localllm.convert.hyperparameters import shape_keys, shape_notes
from localllm.convert.mapped import mapped_tensors
from localllm.convert.modules import (
    Module,
    dense_keys,
    dense_shards,
    dense_tensors,
    pooling_of,
    read_modules,
    width_keys,
)
from localllm.convert.quantized import read_packing
from localllm.convert.recipe import From, Recipe, Sizes
from localllm.convert.recipes.pocket_tts import told_by_tensors
from localllm.convert.recipes.table import BY_CLASS
from localllm.convert.rope_scaling import rope_of
from localllm.convert.safetensors import open_shards
from localllm.convert.special import untrained_keys
from localllm.convert.tensor import LazyTensor
from localllm.convert.tensor_registry import TensorRegistry
from localllm.convert.tokenizer_keys import tokenizer_keys
from localllm.models import ARCHITECTURES, ModelError, record
from localllm.models import read_config as read_gguf_config
from localllm.models.reading.bounds import MAX_LAYERS
from localllm.plan import summarize

_TOP = {"token_embd": From(("model.embed_tokens",)), "output_norm": From(("model.norm",)), "output": From(("lm_head",))}
_SUFFIXES = (".weight", ".bias")
_WHOLE = (*_SUFFIXES, ".", ".scale", ".ssm_a", ".ssm_d", ".exp_probs_b", ".z_l_init")  # of complete tensor names
_EXACT = (
    *("ffn_gate_inp", "ssm_conv1d", "ple_conv1d", "shortconv.conv", "altup_correct_coef", "altup_predict_coef"),
    *("position_embd", "token_types", "hc_attn_", "hc_ffn_", "output_hc_", "indexer_compressor_"),
    *("indexer.proj", "indexer.q_proj", "indexer.k_proj", "time_mix_first", "time_mix_lerp_fused"),
    *("time_mix_w1", "time_mix_w2", "time_mix_decay_w"),
)
_TABLES = (".ffn_gate_tid2eid.weight",)  # tables of integers
_PURPOSE = re.compile(r"(Model)?(For\w+|LM|LMHeadModel|Model)$")  # suffixes of class names
# Architectures whose GGUF files store the dense layers after pooling, and the functions that make the keys for them.
_WITH_DENSE = {"gemma-embedding": dense_keys, "lfm2": width_keys}


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
        layers, heads = config.needed("num_hidden_layers"), config.needed("num_attention_heads")
        if layers > MAX_LAYERS:
            raise ConvertError(f"{config.path}: num_hidden_layers is {layers}; supported: at most {MAX_LAYERS}")
        sizes = Sizes(layers, heads, config.integer("num_key_value_heads") or heads, config)
        self._shards = open_shards(folder)
        try:
            modules = read_modules(folder)
            dense = dense_shards(modules) if recipe.name in _WITH_DENSE else []
            self._shards += dense
            self.size = sum(shard.size for shard in self._shards)  # total size of all shards in bytes
            head_dim = config.integer("head_dim") or config.needed("hidden_size") // heads
            if recipe.head_dim is not None:
                head_dim = recipe.head_dim(config)
            rope = rope_of(config, head_dim, recipe.rope_tensors)
            numbers: dict[str, Any] = {}
            shards, notes = self._shards[: len(self._shards) - len(dense)], _dropped(modules, recipe)
            if recipe.mapped is not None:
                named = mapped_tensors(shards, recipe, recipe.mapped, sizes)
                whole = [_stored(tensor, recipe.norm_offset) for tensor in named]
                made = [*recipe.mapped.output(whole, config), *rope.tensors]
            else:
                registry = TensorRegistry(
                    shards,
                    layers,
                    packing,
                    recipe.pieces,
                    recipe.parts,
                    lambda codes, scales: recipe.scaled(codes, scales, config),
                )
                if (unread := recipe.unread) is not None:
                    registry.drop(lambda name: unread(name, config))
                numbers = {key: _numbers(registry, name, layers) for key, name in recipe.numbers.items()}
                numbers |= {key: _number(registry, "", name) for key, name in recipe.number.items()}
                numbers |= _integers(registry, recipe, layers)
                made, notes = list(_tensors(registry, recipe, sizes, rope.tensors)), [*registry.notes, *notes]
                _check_rest(registry.rest(), recipe)
            behind = list(dense_tensors(dense))
            self.tensors = {tensor.name: tensor for tensor in (*made, *behind)}
            if "token_embd.weight" not in self.tensors:
                raise ConvertError("the tensor of token embeddings is missing; download the model again")
            rows = self.tensors["token_embd.weight"].shape[0]
            pooling = pooling_of(modules)
            pooling = recipe.pooling if pooling is None else pooling
            behind_keys = _WITH_DENSE[recipe.name](behind) if behind else {}
            keys = shape_keys(config, recipe, rope, rows, pooling, behind_keys) | numbers
            parameters = _verify(folder, keys, recipe, self.tensors, recipe.prefixes(sizes))
            further = {} if recipe.tokens is None else recipe.tokens(config)
            vocabulary = tokenizer_keys(folder, config, rows, recipe.tokenizer, recipe.templates, further)
            general, card_notes = general_keys(folder, parameters)
            stored = {
                "general.architecture": recipe.name,
                **general,
                **sampling_keys(folder),
                **keys,
                **vocabulary.keys,
                **recipe.whole(config),
            }
            if recipe.zeros_unused:
                stored |= untrained_keys(self.tensors["token_embd.weight"], vocabulary.keys)
            stored = {key: value for key, value in stored.items() if value is not None}
            if "token_types.weight" in self.tensors:
                stored["tokenizer.ggml.token_type_count"] = self.tensors["token_types.weight"].shape[0]
            elif recipe.name == "bert":  # DistilBERT has no token types, but llama.cpp requires this key
                stored["tokenizer.ggml.token_type_count"] = 1
        except LocalLLMError as error:
            self.close()
            text = str(error)
            raise ConvertError(text if text.startswith(str(folder)) else f"{folder}: {text}") from None
        except BaseException:
            self.close()
            raise
        self.stored: Mapping[str, Any] = MappingProxyType(stored)
        self.metadata: Mapping[str, Any] = MappingProxyType(
            {key: value.item() if isinstance(value, np.generic) else value for key, value in stored.items()}
        )
        self.notes = (*notes, *shape_notes(config, recipe), *rope.notes, *vocabulary.notes, *card_notes)

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
        similar = f"similar classes that can be: {', '.join(near)}; " if near else ""
        raise ConvertError(
            f"{config.path}: class '{printable(name)}' cannot be converted; take a GGUF file of the model ({similar}"
            "docs/architectures.md lists all)"
        )
    return next(row for row in rows if row.when is None or row.when(config))


def _similar(name: str) -> list[str]:
    """Return up to three model classes with similar names, for any task."""
    by_model: dict[str, list[str]] = {}
    for known in BY_CLASS:
        by_model.setdefault(_PURPOSE.sub("", known), []).append(known)
    return [known for near in get_close_matches(_PURPOSE.sub("", name), by_model, 3) for known in by_model[near]][:3]


def _check_rest(rest: list[str], recipe: Recipe) -> None:
    if rest:
        raise ConvertError(
            f"tensor '{printable(rest[0])}' has no place in GGUF files of {recipe.name}"
            + (f", nor have {len(rest) - 1} others" if rest[1:] else "")
        )


def _dropped(modules: tuple[Module, ...], recipe: Recipe) -> list[str]:
    """Return notes about modules that a GGUF file cannot store."""
    if recipe.name in _WITH_DENSE:
        return []
    return [
        f"{module.folder.name} is left out: files of {recipe.name} hold no dense layer behind the pooling"
        for module in modules
        if module.kind == "Dense"
    ]


def _tensors(
    registry: TensorRegistry, recipe: Recipe, sizes: Sizes, extra: tuple[LazyTensor, ...]
) -> Iterator[LazyTensor]:
    """Yield all tensors of the GGUF file in order: the token embedding, computed tensors, the layers, the output
    matrix."""
    origins = {**_TOP, **recipe.top}
    top = {
        key: list(_made(registry, recipe, sizes, "", key, (origin,) if isinstance(origin, From) else origin))
        for key, origin in origins.items()
    }
    for key in ("token_embd", "output"):
        top[key] = top.pop(f"{key}.weight", []) or top[key]
    if not top["token_embd"]:
        raise ConvertError("tensor 'model.embed_tokens.weight' is missing; download the model again")
    if top["output"] and t.alike(top["output"][0], top["token_embd"][0]):
        top["output"] = []  # the output matrix is tied, but the checkpoint stores a copy
    yield from top["token_embd"]
    yield from extra
    for key, sources in recipe.lone.items():
        for prefix in recipe.prefixes(sizes):
            yield from _made(registry, recipe, sizes, prefix, key, sources)
    for layer, prefix in enumerate(recipe.prefixes(sizes)):
        for key, sources in recipe.layer.items():
            yield from _made(registry, recipe, sizes, prefix, f"blk.{layer}.{key}", sources)
    for key, tensors in top.items():
        if key != "token_embd":
            yield from tensors


def _numbers(registry: TensorRegistry, name: str, layers: int) -> np.ndarray:
    """Return the one-element tensor of each layer as a float32 array (layers,)."""
    return np.array([_number(registry, f"model.layers.{layer}.", name) for layer in range(layers)], np.float32)


def _number(registry: TensorRegistry, prefix: str, name: str) -> float:
    """Return the value of a one-element tensor."""
    parts = registry.take(prefix, (name,))
    if parts is None:
        raise ConvertError(f"tensor '{prefix}{name}' is missing; download the model again")
    if parts[0].format not in t.FLOATS or parts[0].nbytes != t.ITEM_BYTES[parts[0].format]:
        raise ConvertError(f"{prefix}{name}: is {parts[0].format} {parts[0].shape}; expected one number")
    return float(quant.dequantize(parts[0].read(0, 1), parts[0].format).item())


def _integers(registry: TensorRegistry, recipe: Recipe, layers: int) -> dict[str, np.ndarray]:
    """Return the integer tensors (uint64) for the given keys. A key whose tensor is missing is left out."""
    found = {}
    for key, name in recipe.integers.items():
        for layer in range(layers):
            parts = registry.take(f"model.layers.{layer}.", (name,))
            if parts is not None:
                if parts[0].format != "I64" or len(parts[0].shape) != 1:
                    raise ConvertError(f"{name}: is {parts[0].format} {parts[0].shape}; expected a vector of I64")
                found[key] = parts[0].read(0, 1)[0].view(np.int64).astype(np.uint64)
    return found


def _made(
    registry: TensorRegistry, recipe: Recipe, sizes: Sizes, prefix: str, key: str, sources: tuple[From, ...]
) -> Iterator[LazyTensor]:
    offset = 0.0 if key.endswith(recipe.plain_norms) else recipe.norm_offset
    for suffix in ("",) if key.endswith(_WHOLE) else _SUFFIXES:
        for source in sources:
            parts = registry.take(prefix, tuple(name + suffix for name in source.names))
            if parts is not None:
                yield _stored(t.renamed(source.change(parts, sizes), key.removesuffix(".") + suffix), offset)
                break


def _stored(tensor: LazyTensor, norm_offset: float) -> LazyTensor:
    """Choose the output format: F32 for vectors, norms, routers, convolutions, and other tensors that llama.cpp
    requires in F32."""
    if tensor.format == "I32" and tensor.name.endswith(_TABLES):
        return tensor
    if tensor.format not in (*t.FLOATS, "MXFP4"):
        raise ConvertError(f"{tensor.name}: is stored as {tensor.format}; supported: F32, F16, BF16, F64 and FP8")
    name = tensor.name
    if name.endswith("_norm.weight"):
        return t.as_float32(tensor, norm_offset)
    exact = len(tensor.shape) == 1 or not name.endswith(".weight") or any(part in name for part in _EXACT)
    return t.as_float32(tensor) if exact or tensor.format == "F64" else tensor


def _verify(
    folder: Path, keys: Mapping[str, Any], recipe: Recipe, tensors: Mapping[str, LazyTensor], prefixes: list[str]
) -> int:
    """Return the number of parameters; raise ConvertError if a tensor is missing or has the wrong shape."""
    metadata = {"general.architecture": recipe.name, **keys}
    try:
        plan = record(read_gguf_config(metadata, recipe.name), ARCHITECTURES[recipe.name], tensors)
    except ModelError as error:
        raise ConvertError(f"{folder}: {error}{_origin(str(error), recipe, prefixes)}") from None
    return summarize(plan).parameters


def _origin(error: str, recipe: Recipe, prefixes: list[str]) -> str:
    """Return the checkpoint's names for the GGUF tensor at the start of an error message. `prefixes` are the layer
    prefixes.
    """
    if recipe.mapped is not None:
        return ""
    name = error.split(":")[0]
    base, _, suffix = name.rpartition(".")
    layer = base.split(".")[1] if base.startswith("blk.") else ""
    key = base.split(".", 2)[-1]
    sources = recipe.layer.get(f"{key}.{suffix}") or recipe.layer.get(key) or (_TOP.get(base),)
    if sources[0] is None:
        return ""
    whole = f"{key}.{suffix}" in recipe.layer
    prefix = prefixes[int(layer)] if layer else ""
    origins = [prefix + source.names[0] + ("" if whole else f".{suffix}") for source in sources if source]
    return f" (it is made of {' or '.join(origins)})"
