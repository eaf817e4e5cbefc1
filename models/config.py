"""What a model file says about its shape: metadata keys in, one frozen and checked `Config` out.

Every count is bounded here, so that a hostile file ends in a message and never in a huge loop or allocation. Zero means
"not set" where llama.cpp treats it so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, cast, get_args

from models.errors import ModelError

RopeScaling = Literal["none", "linear", "yarn"]

_MAX_LAYERS = 1024
_MAX_WIDTH = 1 << 20  # of a row of activations, and of one head
_MAX_VOCABULARY = 1 << 24
_MAX_CONTEXT = 1 << 30
_MAX_FACTOR = 1e6  # of anything that stretches positions


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How far positions rotate (RoPE, arXiv:2104.09864; YaRN, arXiv:2309.00071); `models.rope` turns it into angles."""

    n_rot: int  # rotated dimensions of a head, even
    base: float
    scaling: RopeScaling
    factor: float  # how much longer the context is than the one trained on
    original_context: int  # the context trained on
    attention_factor: float  # multiplies cosine and sine
    extrapolation: float  # yarn: 1 mixes interpolated and plain angles, 0 interpolates all
    beta_fast: float  # yarn: rotations over the original context above which an angle stays as it is
    beta_slow: float  # yarn: rotations below which an angle is interpolated fully
    log_multiplier: float  # yarn: mscale_all_dim of the model's own configuration
    temperature: float  # Ministral 3: growth of the queries per e-fold of original contexts


@dataclass(frozen=True, slots=True)
class Config:
    """The shape of a dense transformer; tuples hold one number per layer."""

    architecture: str
    layers: int
    width: int  # of the residual stream
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int
    ffn_width: tuple[int, ...]
    vocabulary: int
    context_length: int
    eps: float
    rope: RopeConfig


def read_config(metadata: Mapping[str, Any], architecture: str) -> Config:
    """The `Config` of a model whose keys start with `architecture + "."`; ModelError names the key that is wrong."""
    keys = _Keys(metadata, architecture + ".")
    if experts := keys.integer("expert_count", 0, _MAX_WIDTH, default=0):
        raise ModelError(
            f"{architecture}.expert_count: mixture-of-experts models are not supported, found {experts} experts"
        )
    causal = metadata.get(architecture + ".attention.causal")
    if isinstance(causal, bool) and not causal:
        raise ModelError(f"{architecture}.attention.causal: only causal models (true) are supported, found false")
    layers = keys.integer("block_count", 1, _MAX_LAYERS)
    width = keys.integer("embedding_length", 1, _MAX_WIDTH)
    context_length = keys.integer("context_length", 1, _MAX_CONTEXT)
    heads = keys.per_layer("attention.head_count", layers)
    kv_heads = keys.per_layer("attention.head_count_kv", layers, default=heads)
    for layer, (many, few) in enumerate(zip(heads, kv_heads, strict=True)):
        if many % few:
            raise ModelError(
                f"{architecture}.attention.head_count_kv: {many} heads are not a multiple of {few} key-value heads "
                f"(layer {layer})"
            )
    head_dim = _head_dim(keys, width, heads)
    return Config(
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_width=keys.per_layer("feed_forward_length", layers),
        vocabulary=_vocabulary(keys),
        context_length=context_length,
        eps=keys.real("attention.layer_norm_rms_epsilon", 1e-20, 1.0),
        rope=_rope(keys, head_dim, context_length),
    )


def _head_dim(keys: _Keys, width: int, heads: tuple[int, ...]) -> int:
    default = width // heads[0] if width % heads[0] == 0 else None
    head_dim = keys.integer("attention.key_length", 1, _MAX_WIDTH, default=default)
    value_dim = keys.integer("attention.value_length", 1, _MAX_WIDTH, default=head_dim)
    if value_dim != head_dim:
        raise ModelError(
            f"{keys.prefix}attention.value_length: {value_dim}, but keys are {head_dim} wide; "
            "value heads of another width than key heads are not supported"
        )
    if head_dim * max(heads) > _MAX_WIDTH:
        raise ModelError(f"{keys.prefix}attention.key_length: {max(heads)} heads of {head_dim} exceed {_MAX_WIDTH}")
    return head_dim


def _vocabulary(keys: _Keys) -> int:
    """Tokens in the tokenizer, which is what llama.cpp goes by; files without one must say `vocab_size`."""
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return keys.integer("vocab_size", 1, _MAX_VOCABULARY)
    if isinstance(tokens, str) or not hasattr(tokens, "__len__") or not 1 <= len(tokens) <= _MAX_VOCABULARY:
        raise ModelError(f"tokenizer.ggml.tokens: expected a list of 1 to {_MAX_VOCABULARY} tokens, {_found(tokens)}")
    return len(tokens)


def _rope(keys: _Keys, head_dim: int, context_length: int) -> RopeConfig:
    n_rot = keys.integer("rope.dimension_count", 2, head_dim, default=head_dim)
    if n_rot % 2:
        raise ModelError(f"{keys.prefix}rope.dimension_count: expected an even number, found {n_rot}")
    scaling = keys.metadata.get(keys.prefix + "rope.scaling.type", "linear")
    if not isinstance(scaling, str) or scaling not in get_args(RopeScaling):
        supported = ", ".join(get_args(RopeScaling))
        raise ModelError(f"{keys.prefix}rope.scaling.type: supported are {supported}, {_found(scaling)}")
    old_factor = keys.real("rope.scale_linear", 0.0, _MAX_FACTOR, default=0.0)  # the key's name in files of 2023
    factor = keys.real("rope.scaling.factor", 0.0, _MAX_FACTOR, default=old_factor)
    extrapolation = keys.real("rope.scaling.yarn_ext_factor", -_MAX_FACTOR, _MAX_FACTOR, default=-1.0)
    original = keys.integer("rope.scaling.original_context_length", 0, _MAX_CONTEXT, default=0)
    return RopeConfig(
        n_rot=n_rot,
        base=keys.real("rope.freq_base", 1.001, 1e30, default=10000.0),
        scaling=cast(RopeScaling, scaling),
        factor=1.0 if factor == 0.0 or scaling == "none" else factor,
        original_context=original or context_length,
        attention_factor=keys.real("rope.scaling.attn_factor", 0.0, _MAX_FACTOR, default=1.0),
        extrapolation=extrapolation if extrapolation >= 0.0 else 1.0,  # negative: not set
        beta_fast=keys.real("rope.scaling.yarn_beta_fast", 1e-6, _MAX_FACTOR, default=32.0),
        beta_slow=keys.real("rope.scaling.yarn_beta_slow", 1e-6, _MAX_FACTOR, default=1.0),
        log_multiplier=keys.real("rope.scaling.yarn_log_multiplier", 0.0, _MAX_FACTOR, default=0.0),
        temperature=keys.real("attention.temperature_scale", 0.0, _MAX_FACTOR, default=0.0),
    )


@dataclass(frozen=True, slots=True)
class _Keys:
    """Checked reading of the keys below one prefix; a default makes a key optional."""

    metadata: Mapping[str, Any]
    prefix: str

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(self.prefix + key, default)
        if value is None:
            raise ModelError(f"{self.prefix}{key}: the file does not hold this key, which the model needs")
        return value

    def _integer(self, key: str, value: Any, low: int, high: int) -> int:
        try:
            number = None if isinstance(value, bool) else index(value)
        except TypeError:
            number = None
        if number is None or not low <= number <= high:
            raise ModelError(f"{self.prefix}{key}: expected an integer from {low} to {high}, {_found(value)}")
        return number

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        return self._integer(key, self._value(key, default), low, high)

    def per_layer(self, key: str, layers: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """One positive integer per layer, from a number for all or an array of one each."""
        value = self._value(key, default)
        if isinstance(value, str) or not hasattr(value, "__len__"):
            return (self._integer(key, value, 1, _MAX_WIDTH),) * layers
        if len(value) != layers:
            raise ModelError(f"{self.prefix}{key}: expected {layers} numbers, one per layer, found {len(value)}")
        return tuple(self._integer(key, item, 1, _MAX_WIDTH) for item in value)

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self._value(key, default)
        try:
            number = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not low <= number <= high:
            raise ModelError(f"{self.prefix}{key}: expected a number from {low:g} to {high:g}, {_found(value)}")
        return number


def _found(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool) else f"a {type(value).__name__}"
    return f"found {text if len(text) <= 60 else text[:60] + '...'}"
