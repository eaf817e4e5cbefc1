"""Metadata keys of feed-forwards: widths, activations and expert routing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from localllm.models.architecture import Architecture
from localllm.models.config import ExpertConfig
from localllm.models.errors import ModelError
from localllm.models.reading.bounds import MAX_EXPERT_GROUPS, MAX_EXPERTS, MAX_FACTOR, MAX_USED, MAX_WIDTH, REASON
from localllm.models.reading.keys import Keys, found
from localllm.plan import Activation, Gating

TOP_TWENTIETH = 1.6448533535003662  # standard deviations above the mean that 5 % of a normal distribution exceed
_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "silu": "silu"}
# in the order of GGUF's gating ids, which start at 1
_GATINGS: tuple[Gating, ...] = ("softmax", "sigmoid", "softmax_of_chosen", "sqrt_softplus")


def read_ffn_width(keys: Keys, row: Architecture, blocks: int) -> tuple[int, ...]:
    """Return the number of rows of the gate (or up) matrix, per layer."""
    least = 0 if row.recurrent is not None else 1
    experts = keys.integer("expert_feed_forward_length", 0, MAX_WIDTH, default=0)
    widths = keys.per_layer(
        "feed_forward_length", blocks, least, MAX_WIDTH, default=(experts,) * blocks if experts else None
    )
    return tuple([width // 2 for width in widths]) if row.halves else widths


def read_activation(keys: Keys, row: Architecture) -> Activation | Literal["xielu"]:
    """Return the activation of dense feed-forwards; some GGUFs store its Transformers name."""
    key = "hidden_activation"
    name = keys.metadata.get(keys.prefix + key, "") if row.activation_key else ""
    if name and name not in _ACTIVATIONS:
        raise ModelError(f"{keys.prefix}{key}: supported are {', '.join(_ACTIVATIONS)}, {found(name)}")
    return _ACTIVATIONS[name] if name else row.activation


def read_limits(keys: Keys, row: Architecture, which: str, blocks: int) -> tuple[float, ...]:
    """Return activation limits per layer, of experts ("exp") or other feed-forwards ("shexp"); values near 0 mean no
    limit.
    """
    if row.limits is None or f"swiglu_clamp_{which}" in row.ignored:
        return (0.0,) * blocks
    if row.limits == "situ":
        return (read_caps(keys)[0],) * blocks
    default = keys.metadata.get(f"{keys.prefix}swiglu_clamp_exp", 0.0) if row.limits_of_all else 0.0
    limits = keys.reals(f"swiglu_clamp_{which}", blocks, 0.0, MAX_FACTOR, default=default)
    return tuple([limit if limit > 1e-6 else 0.0 for limit in limits])


def read_caps(keys: Keys) -> tuple[float, float]:
    """Return the caps of gate and up for the activation "situ"."""
    gate, gated = (keys.real(f"activation.{name}", 1e-3, MAX_FACTOR) for name in ("situ_beta", "situ_linear_beta"))
    return gate, gated


def read_xielu(keys: Keys, layers: int) -> tuple[tuple[float, float, float, float], ...]:
    """Return the xIELU parameters per layer; GGUFs store the raw parameters, before the functions
    that constrain them."""
    own = replace(keys, prefix="")
    bounds = {"alpha_p": -MAX_FACTOR, "alpha_n": -MAX_FACTOR, "beta": 0.0, "eps": -1.0}
    found = [own.reals(f"xielu.{key}", layers, low, MAX_FACTOR) for key, low in bounds.items()]
    return tuple(
        [(_softplus(p), beta + _softplus(n), beta, min(eps, 0.0)) for p, n, beta, eps in zip(*found, strict=True)]
    )


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def read_sparsity(keys: Keys, row: Architecture, layers: int) -> tuple[float | None, ...]:
    if not row.altup:
        return (None,) * layers
    default = tuple([TOP_TWENTIETH if layer < 10 else -math.inf for layer in range(layers)])
    values = keys.reals("activation_sparsity_scale", layers, -math.inf, MAX_FACTOR, default)
    return tuple([None if value < -MAX_FACTOR else value for value in values])


def read_experts(keys: Keys, row: Architecture, blocks: int) -> ExpertConfig | None:
    routing = row.routing
    count = keys.integer("expert_count", 0, MAX_EXPERTS, default=0, reason=REASON)
    if not count:
        return None
    if routing is None:
        raise ModelError(f"{keys.prefix}expert_count: {keys.prefix[:-1]} has no mixture of experts, found {count}")
    gating, normalize, scale = routing.gating, routing.normalize, 0.0
    biased = routing.biased or gating
    if routing.from_file:
        number = keys.integer("expert_gating_func", 0, len(_GATINGS), default=0)
        gating, biased = (_GATINGS[number - 1],) * 2 if number else (gating, biased)
        if routing.from_file is True:
            normalize = keys.flag("expert_weights_norm", normalize)
        if routing.from_file != "gating":
            scale = keys.real("expert_weights_scale", 0.0, MAX_FACTOR, default=0.0)
    used = keys.integer("expert_used_count", 1, min(count, MAX_USED), reason=REASON if count > MAX_USED else "")
    limits = read_limits(keys, row, "exp", blocks)
    return ExpertConfig(
        count, used, gating, normalize, scale or 1.0, routing.activation, routing.scales, routing.beside, limits,
        *_groups(keys, count, used), biased, *(_adjugates(keys, count) if routing.adjugate else (0, 0.0)),
    )  # fmt: skip


def _adjugates(keys: Keys, count: int) -> tuple[int, float]:
    """Return the number of experts that share an adjugate expert, and the scale of the adjugate experts' sum."""
    group = keys.integer("experts_per_group", 1, count)
    if count % group:
        raise ModelError(f"{keys.prefix}experts_per_group: expected a divisor of expert_count {count}, found {group}")
    return group, keys.real("expert_group_scale", 0.0, MAX_FACTOR)


def _groups(keys: Keys, count: int, used: int) -> tuple[int, int]:
    """Return the number of expert groups, and of groups from which experts are selected; (1, 1) without groups."""
    groups = keys.integer("expert_group_count", 0, min(count, MAX_EXPERT_GROUPS), default=0)
    if groups < 2:
        return 1, 1
    kept = keys.integer("expert_group_used_count", 1, groups)
    if count % groups or kept * (count // groups) < used:
        raise ModelError(
            f"{keys.prefix}expert_group_count: {count} experts are expected in equal groups, {kept} of which hold the "
            f"{used} that are used, found {groups} groups"
        )
    return groups, kept
