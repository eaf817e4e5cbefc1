"""RoPE metadata keys: the rotated dimensions, the base, and the scaling of angles."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from typing import Any, cast, get_args

from localllm.models.config import RopeConfig, RopeScaling
from localllm.models.errors import ModelError
from localllm.models.properties import Properties
from localllm.models.reading.bounds import MAX_CONTEXT, MAX_FACTOR
from localllm.models.reading.keys import Keys, found


def read_rope(keys: Keys, row: Properties, head_dim: int, context_length: int) -> RopeConfig:
    scaling = keys.metadata.get(keys.prefix + "rope.scaling.type", "linear")
    if not isinstance(scaling, str) or scaling not in get_args(RopeScaling):
        supported = ", ".join(get_args(RopeScaling))
        raise ModelError(f"{keys.prefix}rope.scaling.type: supported are {supported}, {found(scaling)}")
    old_factor = keys.real("rope.scale_linear", 0.0, MAX_FACTOR, default=0.0)  # the key's name in GGUFs of 2023
    factor = keys.real("rope.scaling.factor", 0.0, MAX_FACTOR, default=old_factor)
    extrapolation = keys.real("rope.scaling.yarn_ext_factor", -MAX_FACTOR, MAX_FACTOR, default=-1.0)
    original = keys.integer("rope.scaling.original_context_length", 0, MAX_CONTEXT, default=0) or context_length
    logarithmic = keys.real("rope.scaling.yarn_log_multiplier", 0.0, MAX_FACTOR, default=0.0)
    told = keys.metadata.get(keys.prefix + "rope.scaling.yarn_log_multiplier") is not None
    if row.latent:  # these GGUFs store 0.1 * mscale_all_dim, and their models also use mscale_all_dim as mscale
        logarithmic *= 10.0
    temperature_length = keys.integer("attention.temperature_length", 0, MAX_CONTEXT, default=0) if row.latent else 0
    n_rot, least = head_dim, 0 if row.latent and row.rope_style is None else 2
    if "rope.dimension_count" not in row.ignored:
        n_rot = _n_rot(keys, "rope.dimension_count", head_dim, head_dim, least)
    return RopeConfig(
        n_rot=n_rot,
        base=_stretched(keys, keys.real("rope.freq_base", 1.001, 1e30, default=10000.0), head_dim),
        scaling=cast(RopeScaling, scaling),
        factor=1.0 if factor == 0.0 or scaling == "none" else factor,
        original_context=original,
        attention_factor=keys.real("rope.scaling.attn_factor", 0.0, MAX_FACTOR, default=1.0),
        extrapolation=extrapolation if extrapolation >= 0.0 else 1.0,  # negative: not set
        beta_fast=keys.real("rope.scaling.yarn_beta_fast", 1e-6, MAX_FACTOR, default=32.0),
        beta_slow=keys.real("rope.scaling.yarn_beta_slow", 1e-6, MAX_FACTOR, default=1.0),
        multiplier=logarithmic if row.latent and logarithmic else 1.0,
        log_multiplier=logarithmic,
        score_multiplier=1.0 if row.yarn_scores and not told else logarithmic,
        temperature=keys.real("attention.temperature_scale", 0.0, MAX_FACTOR, default=0.0),
        temperature_length=temperature_length or original,
        sections=_sections(keys),
    )


def _stretched(keys: Keys, base: float, head_dim: int) -> float:
    """Return the base after NTK-aware scaling by a fixed alpha, a key of Hunyuan VL GGUFs."""
    alpha = keys.real("rope.scaling.alpha", 0.0, MAX_FACTOR, default=0.0)
    if 0.0 < alpha < 1.0:
        raise ModelError(f"{keys.prefix}rope.scaling.alpha: expected 0 or a number from 1 up, found {alpha:g}")
    return base * alpha ** (head_dim / (head_dim - 2)) if alpha and head_dim > 2 else base


def read_window_rope(keys: Keys, row: Properties, rope: RopeConfig, head_dim: int) -> RopeConfig:
    if row.sliding is None:
        return rope
    rope = replace(rope, n_rot=_n_rot(keys, "rope.dimension_count_swa", head_dim, rope.n_rot))
    base = keys.real("rope.freq_base_swa", 1.001, 1e30, default=row.sliding.rope_base or rope.base)
    if row.sliding.stretched:
        return replace(rope, base=base)
    return replace(rope, base=base, scaling="none", factor=1.0, attention_factor=1.0)


def read_rotated(row: Properties, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Return whether each layer uses RoPE; `windows` has one entry per layer."""
    every = row.no_rope_every
    if row.rope_style is None:
        return (False,) * len(windows)
    if row.sliding is not None and row.sliding.only_rope and any(windows):
        return tuple([window > 0 for window in windows])
    if row.sliding is not None and row.sliding.only_rope:
        return (True,) * len(windows)
    return tuple([not every or (layer + 1) % every != 0 for layer in range(len(windows))])


def _n_rot(keys: Keys, key: str, head_dim: int, default: int, least: int = 2) -> int:
    n_rot = keys.integer(key, least, head_dim, default=default)
    if n_rot % 2:
        raise ModelError(f"{keys.prefix}{key}: expected an even number, found {n_rot}")
    return n_rot


def _sections(keys: Keys) -> tuple[int, ...]:
    value: Any = keys.metadata.get(keys.prefix + "rope.dimension_sections", ())
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) < 2 or not (value[0] and value[1]):
        return ()
    counts = tuple([max(int(count), 0) if isinstance(count, Integral) else 0 for count in value])[:4]
    return counts if any(counts) else ()
