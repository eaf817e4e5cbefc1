"""Assemble the tensors of a GGUF file: the sources that a recipe gives, then all others by the gguf package's name map.

A tensor of the checkpoint that neither of them names, or that the forward pass does not read, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

from localllm.base.printable import printable
from localllm.convert import tensor as t
from localllm.convert.changes import decay, flat, in_turn, share, squeezed, stacked
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.names import NameMap, natural
from localllm.convert.recipe import Change, Layer, Recipe, listed, only
from localllm.convert.tensor import LazyTensor
from localllm.convert.tensor_registry import TensorRegistry

_SUFFIXES = (".weight", ".bias")
_WHOLE = (*_SUFFIXES, ".", ".scale", ".ssm_a", ".ssm_d", ".exp_probs_b", ".z_l_init")  # of complete tensor names
_EXACT = (
    *("ffn_gate_inp", "ssm_conv1d", "ple_conv1d", "shortconv.conv", "altup_correct_coef", "altup_predict_coef"),
    *("position_embd", "token_types", "hc_attn_", "hc_ffn_", "output_hc_", "indexer_compressor_"),
    *("indexer.proj", "indexer.q_proj", "indexer.k_proj", "time_mix_first", "time_mix_lerp_fused"),
    *("time_mix_w1", "time_mix_w2", "time_mix_decay_w"),
)
_TABLES = (".ffn_gate_tid2eid.weight",)  # tables of integers
_LAYER = re.compile(r"^(?:(?:enc|dec)\.)?blk\.(\d+)\.")
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_EXPERTS = re.compile(r"model\.layers\.([0-9]+)\..*\bexperts\.(gate_up|gate|up|down)_proj(?:\.weight)?")
# What all architectures change, unless the recipe says otherwise.
_CHANGES: Mapping[str, Change] = {
    "ssm_conv1d.weight": squeezed, "shortconv.conv.weight": squeezed, "ssm_a": decay,
    "ffn_gate_inp_shexp.weight": flat,
}  # fmt: skip


class Taken:
    """The tensors that rows of a recipe name: `made`, by their GGUF names, of the tensors in `sources`."""

    def __init__(self, registry: TensorRegistry, config: HfConfig) -> None:
        self._registry, self._config = registry, config
        self.made: dict[str, LazyTensor] = {}
        self.sources: dict[str, LazyTensor] = {}  # the first tensor that each is made of
        self.names: dict[str, str] = {}  # in the checkpoint, of all tensors that the rows name

    def take(self, row: Layer, prefix: str = "", before: str = "") -> None:
        """Make the tensors of a row. Names in the checkpoint begin with `prefix`, GGUF names with `before`."""
        for key, sources in row.items():
            for suffix in ("",) if f".{key}".endswith(_WHOLE) else _SUFFIXES:
                self.names[before + key.removesuffix(".") + suffix] = prefix + listed(sources)[0].names[0] + suffix
                for source in listed(sources):
                    parts = self._registry.take(prefix, tuple(name + suffix for name in source.names))
                    if parts is not None:
                        self.put(before + key.removesuffix(".") + suffix, parts, source.change)
                        break

    def put(self, name: str, parts: list[LazyTensor], change: Change) -> None:
        self.made[name], self.sources[name] = t.renamed(change(parts, self._config), name), parts[0]


class Assembly(Taken):
    """The `tensors` of a GGUF file by name, in the order of the file."""

    def __init__(
        self, registry: TensorRegistry, recipe: Recipe, config: HfConfig, computed: tuple[LazyTensor, ...] = ()
    ) -> None:
        """Take all tensors of the registry. `computed` are further tensors."""
        super().__init__(registry, config)
        self._recipe = recipe
        self._layers = max(layers := config.layers, config.integer("num_decoder_layers") or 0)
        self._mapped: set[str] = set()  # GGUF names that the recipe does not name
        self.take(recipe.top)
        for layer in range(layers):
            self.take(recipe.layer, f"model.layers.{layer}.", f"blk.{layer}.")
        self._map()
        if "token_embd.weight" not in self.made:
            raise ConvertError("the tensor of token embeddings is missing; download the model again")
        made = recipe.output(self.made | {tensor.name: tensor for tensor in computed}, config)
        self.tensors = {name: made[name] for name in sorted(made, key=natural)}

    def check_read(self, read: Set[str]) -> None:
        """Raise ConvertError for a mapped tensor whose kind is read in no layer: it is not among these names."""
        known = {_LAYER.sub("", name) for name in read}
        if self._has_output:
            known.add("output.weight")  # an encoder made of a decoder does not read it
        mapped = [name for name in self.tensors if name in self._mapped and _LAYER.sub("", name) not in known]
        self._refuse([self.sources[name].name for name in mapped])

    def origin(self, name: str) -> str:
        """Return the checkpoint's name for a missing or unsuitable GGUF tensor, for an error message."""
        found = _LAYER.match(name)
        if name in self.sources or found is None:
            return printable(self.sources[name].name) if name in self.sources else ""
        key, layer = name[found.end() :], int(found[1])
        near = min((n for n in range(self._layers) if f"blk.{n}.{key}" in self.sources), default=None,
                   key=lambda n: abs(n - layer))  # fmt: skip
        if near is not None:  # the names of the layers differ in their numbers
            like = printable(self.sources[f"blk.{near}.{key}"].name)
            return _NUMBER.sub(lambda number: str(int(number[0]) + layer - near), like, count=1)
        sources = listed(self._recipe.layer.get(key) or self._recipe.layer.get(key.rpartition(".")[0]) or ())
        return " or ".join(f"model.layers.{layer}.{source.names[0]}" for source in sources)

    def put(self, name: str, parts: list[LazyTensor], change: Change) -> None:
        super().put(name, parts, change)
        plain = name.removesuffix(".weight").endswith(self._recipe.plain_norms)
        self.made[name] = _stored(self.made[name], 0.0 if plain else self._recipe.norm_offset)

    def _map(self) -> None:
        """Take the tensors that the recipe does not name."""
        names, unknown = NameMap.of(self._recipe.like or self._recipe.name), []
        self._has_output = names.has_output
        for name in self._registry.rest():
            if self._registry.is_taken(name):  # with another tensor of its group
                continue
            prefix, inner = self._registry.group(name)
            change: Change = only
            if targets := self._targets(names, name):
                parts = self._registry.take("", (name,))
            elif targets := self._targets(names, prefix + inner.replace(".{}", "")):
                parts, change = self._registry.take(prefix, (inner,)), stacked
            else:
                unknown.append(self._registry.stored(name))
                continue
            for target, own in targets.items():
                self._put_once(target, parts or [], in_turn(change, own))
        self._refuse(unknown)

    def _targets(self, names: NameMap, name: str) -> dict[str, Change]:
        """Return the GGUF names of a tensor, usually one, with its changes."""
        experts, target = _EXPERTS.fullmatch(name), names.find(name, self._layers)
        if experts and experts[2] == "gate_up":
            return {f"blk.{experts[1]}.ffn_{x}_exps.weight": share(which) for which, x in enumerate(("gate", "up"))}
        if target is None:
            key = f"ffn_{experts[2]}_exps" if experts else ""
            return {f"blk.{experts[1]}.{key}.weight": only} if experts and key in names.inner.values() else {}
        key, changes = _LAYER.sub("", target), self._recipe.changes
        return {target: changes.get(key) or changes.get(key.rpartition(".")[0]) or _CHANGES.get(key, only)}

    def _put_once(self, target: str, parts: list[LazyTensor], change: Change) -> None:
        """Make a mapped tensor. If the checkpoint stores it twice with the same bytes, it is written once."""
        other = self.sources.get(target)
        if other is None:
            self.put(target, parts, change)
            self._mapped.add(target)
        elif not t.alike(other, parts[0]):
            both = f"'{printable(other.name)}' and '{printable(parts[0].name)}'"
            raise ConvertError(f"tensors {both} are both {target}")

    def _refuse(self, names: list[str]) -> None:
        if names:
            raise ConvertError(
                f"tensor '{printable(names[0])}' cannot be stored in GGUF files of {self._recipe.name}"
                + (f", nor can {len(names) - 1} others" if names[1:] else "")
            )


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
