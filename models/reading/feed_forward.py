"""Metadata keys of feed-forwards: widths, activations and expert routing."""

from __future__ import annotations

from typing import Literal

from localllm.models.config import ExpertConfig
from localllm.models.errors import ModelError
from localllm.models.properties import Properties
from localllm.models.reading.bounds import MAX_EXPERT_GROUPS, MAX_EXPERTS, MAX_FACTOR, MAX_USED, MAX_WIDTH, REASON
from localllm.models.reading.keys import Keys, found
from localllm.plan import Activation, Gating, GluActivation

_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "silu": "silu"}
# in the order of GGUF's gating ids, which start at 1
_GATINGS: tuple[Gating, ...] = ("softmax", "sigmoid", "softmax_of_chosen", "sqrt_softplus")


def read_ffn_width(keys: Keys, row: Properties, blocks: int) -> tuple[int, ...]:
    """Return the number of rows of the gate (or up) matrix, per layer."""
    least = 0 if row.recurrent is not None else 1
    experts = keys.integer("expert_feed_forward_length", 0, MAX_WIDTH, default=0)
    return keys.per_layer(
        "feed_forward_length", blocks, least, MAX_WIDTH, default=(experts,) * blocks if experts else None
    )


def read_activation(keys: Keys, row: Properties) -> Activation | GluActivation | Literal["xielu"]:
    """Return the activation of dense feed-forwards; some GGUFs store its Transformers name."""
    key = "hidden_activation"
    name = keys.metadata.get(keys.prefix + key, "") if row.activation_key else ""
    if name and name not in _ACTIVATIONS:
        raise ModelError(f"{keys.prefix}{key}: supported are {', '.join(_ACTIVATIONS)}, {found(name)}")
    return _ACTIVATIONS[name] if name else row.activation


def read_limits(keys: Keys, row: Properties, which: str, blocks: int) -> tuple[float, ...]:
    """Return activation limits per layer, of experts ("exp") or other feed-forwards ("shexp"); values near 0 mean no
    limit.
    """
    if row.limits is None or f"swiglu_clamp_{which}" in row.ignored:
        return (0.0,) * blocks
    limits = keys.reals(f"swiglu_clamp_{which}", blocks, 0.0, MAX_FACTOR, default=0.0)
    return tuple([limit if limit > 1e-6 else 0.0 for limit in limits])


def with_limits_of_experts(keys: Keys) -> Keys:
    """Return keys that give the experts' limits to other feed-forwards, unless the GGUF sets theirs."""
    missing = not keys.holds("swiglu_clamp_shexp") and keys.holds("swiglu_clamp_exp")
    return keys.having(swiglu_clamp_shexp=keys.metadata[keys.prefix + "swiglu_clamp_exp"]) if missing else keys


def read_experts(keys: Keys, row: Properties, blocks: int) -> ExpertConfig | None:
    routing = row.routing
    count = keys.integer("expert_count", 0, MAX_EXPERTS, default=0, reason=REASON)
    if not count or "expert_count" in row.ignored:
        return None
    if routing is None:
        raise ModelError(f"{keys.prefix}expert_count: {keys.prefix[:-1]} has no mixture of experts, found {count}")
    gating, normalize, scale = routing.gating, routing.normalize, 0.0
    if routing.from_file:
        number = keys.integer("expert_gating_func", 0, len(_GATINGS), default=0)
        gating = _GATINGS[number - 1] if number else gating
        if routing.from_file is True:
            normalize = keys.flag("expert_weights_norm", normalize)
        if routing.from_file != "gating":
            scale = keys.real("expert_weights_scale", 0.0, MAX_FACTOR, default=0.0)
    used = keys.integer("expert_used_count", 1, min(count, MAX_USED), reason=REASON if count > MAX_USED else "")
    limits = read_limits(keys, row, "exp", blocks)
    return ExpertConfig(
        count, used, gating, normalize, scale or 1.0, routing.activation, routing.scales, limits,
        *_groups(keys, count, used), gating,
    )  # fmt: skip


def _groups(keys: Keys, count: int, used: int) -> tuple[int, int]:
    """Return the number of expert groups, and of groups from which experts are selected; (1, 1) without groups."""
    groups = keys.integer("expert_group_count", 0, min(count, MAX_EXPERT_GROUPS), default=0)
    if groups < 2:
        return 1, 1
    kept = keys.integer("expert_group_used_count", 1, groups)
    if count % groups or kept * (count // groups) < used:
        raise ModelError(
            f"{keys.prefix}expert_group_count: {count} experts must form equal groups, and {kept} groups must have at "
            f"least the {used} experts used, found {groups} groups"
        )
    return groups, kept
