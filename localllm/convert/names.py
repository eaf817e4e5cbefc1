"""GGUF names of a checkpoint's tensors by the gguf package's map, and their order in a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass

_LAYER = re.compile(r"((?:.*?\.)?)([0-9]{1,5})\.")
# Names of norm parameters in checkpoints of 2019.
_OLD_SUFFIXES = {"gamma": "weight", "beta": "bias"}
_BARE = (".ssm_a", ".ssm_d")  # names without a suffix in GGUF files
# Names of Meta's files, whose rows have another order.
_PLAIN_LLAMA = ("attention.wq", "attention.wk")


@dataclass(frozen=True, slots=True)
class NameMap:
    """The GGUF names of one architecture by checkpoint names, without suffixes; `{bid}` is the number of a layer."""

    whole: Mapping[str, str]
    inner: Mapping[str, str]  # the parts of both names after the number of the layer
    places: Set[str]  # what names of tensors in layers begin with
    has_output: bool  # whether the package knows an output matrix of the architecture

    @classmethod
    def of(cls, names: str) -> NameMap:
        """Return the map for architectures, separated by spaces. Llama replaces an architecture that gguf lacks."""
        from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS, TENSOR_NAMES, TensorNameMap

        numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        known = {tensor for name in names.split() for tensor in MODEL_TENSORS[numbers.get(name, MODEL_ARCH.LLAMA)]}
        has_output = MODEL_TENSOR.OUTPUT in known
        known.add(MODEL_TENSOR.OUTPUT)  # checkpoints may store a tied output matrix
        tables = (TensorNameMap.mappings_cfg, TensorNameMap.block_mappings_cfg)
        whole = {
            name: TENSOR_NAMES[tensor]
            for table in tables
            for tensor, several in table.items()
            for name in several
            if tensor in known and not name.endswith(_PLAIN_LLAMA)
        }
        pairs = [(name.partition("{bid}."), key.partition("{bid}.")) for name, key in whole.items() if "{bid}" in name]
        inner: dict[str, str] = {}
        for name, key in pairs:
            inner[name[2]] = key[2] if inner.get(name[2], key[2]) == key[2] else ""  # "": the name is ambiguous
        # `TensorRegistry` renames what begins with transformer.
        places = {name[0] for name, _ in pairs}
        places |= {"model.layers.", *(name.replace("transformer.", "model.", 1) for name in places)}
        return cls(whole, inner, places, has_output)

    def find(self, name: str, layers: int) -> str | None:
        """Return the GGUF name of a tensor outside of layers or in one of this number of layers, or None."""
        name = name.replace(".dt_bias", ".dt_proj.bias")
        base, _, suffix = name.rpartition(".")
        suffix = _OLD_SUFFIXES.get(suffix, suffix)
        if key := self._key(name, layers):
            return key if key.endswith(_BARE) else f"{key}.bias" if name.endswith("_bias") else f"{key}.weight"
        if suffix in ("weight", "bias") and (key := self._key(base, layers)):
            return f"{key}.{suffix}"
        key = self._key(name.removesuffix("_bias"), layers)
        return f"{key}.bias" if key else None

    def _key(self, name: str, layers: int) -> str | None:
        """Return the GGUF name without suffix. Checkpoints of models with a head have one more component in front."""
        layer = _LAYER.match(name)
        if layer is not None and int(layer[2]) < layers:
            rest = name[layer.end() :]
            places = [before for before in (layer[1], layer[1].partition(".")[2]) if before in self.places]
            forms = [f"{before}{{bid}}.{rest}" for before in places]
            key = next((self.whole[form] for form in forms if form in self.whole), "")
            if key or (places and self.inner.get(rest)):
                return (key or f"blk.{{bid}}.{self.inner[rest]}").replace("{bid}", str(int(layer[2])))
        return self.whole.get(name) or self.whole.get(name.partition(".")[2])


def natural(name: str) -> list[str | int]:
    """Return a sort key by which layer 2 comes before layer 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]
