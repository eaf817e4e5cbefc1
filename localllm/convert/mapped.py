"""Find the tensors of encoders by the gguf package's tensor name map, instead of names in a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from localllm.base.printable import printable
from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.recipe import Mapped, Recipe, Sizes
from localllm.convert.safetensors import Shard
from localllm.convert.tensor import LazyTensor

_COMPUTED = (
    *("position_ids", "token_type_ids", "rotary_emb.inv_freq"),
    *(".attention.bias", ".attention.masked_bias", ".attn.bias", ".attn.masked_bias"),  # causal masks (GPT-NeoX, GPT-2)
)
_OLD_SUFFIXES = {"gamma": "weight", "beta": "bias"}  # names of norm parameters in checkpoints of 2019
_SUFFIXES = ("weight", "bias")
_LAYER = re.compile(r"^(?:(enc|dec)\.)?blk\.(\d+)\.")
_STACKS = (None, "enc", "dec")


def mapped_tensors(shards: Iterable[Shard], recipe: Recipe, mapped: Mapped, sizes: Sizes) -> Iterator[LazyTensor]:
    """Yield the tensors of the GGUF file, starting with the tensors outside layers; raise ConvertError for a name
    without a mapping.

    If the checkpoint stores a tensor twice with the same bytes, it is written once.
    """
    found: dict[str, LazyTensor] = {}
    of = _names(recipe.name, max(sizes.layers, sizes.config.integer("num_decoder_layers") or 0))
    for shard in shards:
        for stored, tensor in shard.tensors.items():
            name = next((stored.removeprefix(p) for p in mapped.prefixes if stored.startswith(p)), stored)
            if name.startswith(mapped.skipped) or name.endswith(_COMPUTED):
                continue
            # The names of DBRX's expert tensors lack a suffix.
            base, _, suffix = (name, "", "weight") if name in of else name.rpartition(".")
            suffix, target = _OLD_SUFFIXES.get(suffix, suffix), mapped.names.get(base) or of.get(base)
            if target is None or suffix not in _SUFFIXES:
                raise ConvertError(f"tensor '{printable(stored)}' has no place in GGUF files of {recipe.name}")
            key = f"{target}.{suffix}"
            if key in found and t.alike(found[key], tensor):
                continue
            if key in found:
                raise ConvertError(f"tensors '{printable(found[key].name)}' and '{printable(stored)}' are both {key}")
            found[key] = tensor
    for key in sorted(found, key=_place):
        change = mapped.changes.get(_LAYER.sub("", key))
        yield t.renamed(found[key] if change is None else change([found[key]], sizes), key)


def _names(architecture: str, layers: int) -> dict[str, str]:
    """Return the gguf package's tensor name map, without suffixes."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return {name: target for name, (_, target) in get_tensor_name_map(number, layers).mapping.items()}


def _place(name: str) -> tuple[bool, int, int, str]:
    """Return the sort key: token embedding, other tensors, then layer by layer, with the encoder before the decoder."""
    layer = _LAYER.match(name)
    stack, number = (_STACKS.index(layer[1]), int(layer[2])) if layer else (0, -1)
    return not name.startswith("token_embd."), stack, number, name
