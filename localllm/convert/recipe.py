"""The form of a recipe: what differs in an architecture from the name map and from the general keys, and its readers of
config.json. `changes` holds changes of tensors, and `assembly` applies a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm import quant
from localllm.base.printable import printable
from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig, Reader
from localllm.convert.tensor import LazyTensor

Tensors = list[LazyTensor]
Change = Callable[[Tensors, HfConfig], LazyTensor]
Key = int | float | str | Callable[[HfConfig], Any] | None  # None: the key is not written
Keys = dict[str, Key]
TokenizerModel = Literal["", "gemma4", "llama"]
RopeTensors = bool | Literal["whole"]
Check = Reader[str | None]  # returns why the results would differ from transformers, or None


def only(parts: Tensors, config: HfConfig) -> LazyTensor:
    return parts[0]


@dataclass(frozen=True, slots=True)
class From:
    """The names of source tensors below `model.layers.N.`, and the change that combines them; `{}` in a name counts
    from 0.

    The key in the recipe's table is a name below `blk.N.`. A key without a suffix means both `.weight` and `.bias`. A
    key that ends with a dot has no suffix in the GGUF file.
    """

    names: tuple[str, ...]
    change: Change = only


Source = str | From  # a name alone: the tensor as it is
Sources = Source | tuple[Source, ...]  # the first source whose tensors exist is used
Layer = Mapping[str, Sources]


def taken(name: str, change: Change = only) -> From:
    return From((name,), change)


def listed(sources: Sources) -> tuple[From, ...]:
    """Return sources as a tuple of `From`."""
    several = sources if isinstance(sources, tuple) else (sources,)
    return tuple([taken(source) if isinstance(source, str) else source for source in several])


def number(take: Take, name: str) -> float:
    """Return the value of a one-element tensor."""
    parts = take("", (name,))
    if parts is None:
        raise ConvertError(f"tensor '{name}' is missing; download the model again")
    if parts[0].format not in t.FLOATS or parts[0].nbytes != t.ITEM_BYTES[parts[0].format]:
        raise ConvertError(f"{name}: is {parts[0].format} {parts[0].shape}; expected one number")
    return float(quant.dequantize(parts[0].read(0, 1), parts[0].format).item())


def by_name(*names: str) -> Reader[int]:
    """Return a reader that looks up several names in config.json and returns the first value found."""
    return lambda config: config.needed(*names)


def integer(*names: str) -> Reader[int | None]:
    return lambda config: config.integer(*names)


def real(*names: str) -> Reader[float | None]:
    return lambda config: config.real(*names)


def flag(*names: str) -> Reader[bool | None]:
    return lambda config: config.flag(*names)


def untied(tensors: dict[str, LazyTensor], config: HfConfig) -> dict[str, LazyTensor]:
    """Drop an output matrix that equals the token embedding."""
    output = tensors.get("output.weight")
    if output is None or not t.alike(output, tensors["token_embd.weight"]):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("output.")}


# Tensors by name; a tensor-parallel checkpoint stores parts of one in several files.
Raw = dict[str, list[LazyTensor]]
Take = Callable[[str, tuple[str, ...]], list[LazyTensor] | None]  # see `TensorRegistry.take`


def unchanged(raw: Raw, config: HfConfig) -> Raw:
    return raw


def without(*prefixes: str) -> Callable[[Raw, HfConfig], Raw]:
    """Return a function that drops the tensors whose names begin so."""
    return lambda raw, config: {name: parts for name, parts in raw.items() if not name.startswith(prefixes)}


def layers_at(prefix: str) -> Callable[[Raw, HfConfig], Raw]:
    """Return a function that names the layers `model.layers.N.`, whose names begin with this prefix."""
    start = re.compile(rf"{re.escape(prefix)}(?=[0-9])")
    return lambda raw, config: {start.sub("model.layers.", name): parts for name, parts in raw.items()}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One architecture in the table. `defaults` are the values that transformers assumes for missing keys, or functions
    that compute them."""

    name: str  # general.architecture
    classes: tuple[str, ...]  # `architectures` in config.json

    # Tensors. The name map gives all others, with the `changes` by GGUF names below `blk.N.`.
    layer: Layer = field(default_factory=dict)  # tensors of a layer
    top: Layer = field(default_factory=dict)  # tensors outside of layers
    changes: Mapping[str, Change] = field(default_factory=dict)
    # Architectures of the gguf package with the same names, if the package lacks this one.
    like: str = ""
    # Renames, merges or drops tensors of the checkpoint.
    raw: Callable[[Raw, HfConfig], Raw] = unchanged
    # Chooses the output matrix.
    output: Callable[[dict[str, LazyTensor], HfConfig], dict[str, LazyTensor]] = untied
    # In multimodal checkpoints: the prefix of the text model's tensors, unless it is saved alone, and the prefixes of
    # image and audio tensors, which are skipped.
    inside: str = ""
    others: tuple[str, ...] = ()
    norm_offset: float = 0.0  # added to the weights of norms
    plain_norms: tuple[str, ...] = ()  # norms to which it is not added
    # Whether GGUFs store frequency factors; "whole": padded to the whole head.
    rope_tensors: RopeTensors = False

    # Settings.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Key] = field(default_factory=dict)  # other keys, or their sources
    # Returns full keys, whose values are tensors.
    values: Callable[[Take, HfConfig], dict[str, Any]] | None = None
    # Keys without a prefix, or functions of config.json, all other keys and the tensors; None removes a key.
    whole_keys: Mapping[str, Any] = field(default_factory=dict)
    # Required values, unless a key is missing: one, a tuple of several, or a function of config.json. `outer.name` is a
    # key in a nested table.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    # Head width of full-attention layers, if it differs.
    head_dim: Reader[int] | None = None
    # Chooses among recipes of one class; the first match is used.
    when: Reader[bool] | None = None
    # Returns config values by transformers' key names.
    words: Callable[[HfConfig], Mapping[str, Any]] | None = None

    # Tokenizer, pooling and dense layers.
    tokenizer: TokenizerModel = ""  # if tokenizer.json does not determine it
    # Templates added to checkpoints without them.
    templates: Mapping[str, str] = field(default_factory=dict)
    # Tokens defined in config.json only.
    tokens: Callable[[HfConfig], Mapping[int, str]] | None = None
    # Makes the keys of dense layers after pooling, if GGUF files of the architecture store them.
    dense: Callable[[list[LazyTensor]], dict[str, Any]] | None = None

    def problems(self, config: HfConfig) -> Iterator[str]:
        """Yield the reasons why the results would differ from transformers."""
        for name, allowed in evaluated(self.fixed, config).items():
            *tables, key = name.split(".")
            inner = config
            for table in tables:
                inner = inner.inner(table)
            value, several = inner.get(key), allowed if isinstance(allowed, tuple) else (allowed,)
            if value is not None and value not in several:
                fixed = " or ".join(map(str, several))
                yield f"{name} is {printable(str(value))}; the GGUF architecture requires {fixed}"
        yield from filter(None, (check(config) for check in self.checks))

    def said(self, config: HfConfig) -> HfConfig:
        """Return config.json with the recipe's words, and defaults for missing keys."""
        values = {**config.values, **self.words(config)} if self.words is not None else config.values
        return HfConfig(config.path, values, evaluated(self.defaults, config))


def evaluated(table: Mapping[str, Any], *given: Any) -> dict[str, Any]:
    """Return a table whose functions are replaced by their values for these arguments."""
    return {key: value(*given) if callable(value) else value for key, value in table.items()}
