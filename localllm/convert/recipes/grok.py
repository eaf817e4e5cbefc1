"""The recipes of Grok 1, with the tensor names of its port to transformers, and of Grok 2, with the names that SGLang
loads.

transformers supports neither model. Grok 2 is published as eight tensor-parallel shards, which `_merged` joins.
"""

from __future__ import annotations

from typing import Any

from localllm.convert import tensor as t
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Keys, Raw, Recipe, by_name
from localllm.convert.recipes.minicpm import ratio
from localllm.convert.recipes.shared import head_width

_ROPES = ("original", "yarn")  # type "original": rope_theta alone applies
_TOP = {"token_embd": "model.in_out_embed", "output_norm": "model.rms_norm"}


def _merged(raw: Raw, config: HfConfig) -> Raw:
    """Merge the experts of a tensor-parallel checkpoint, whose files hold shares of their inner values."""
    ways = {"w1.weight": t.concatenated, "w3.weight": t.concatenated, "w2.weight": t.side_by_side}
    return {
        name: [ways[end](parts)] if len(parts) > 1 and (end := name[-9:]) in ways else parts
        for name, parts in raw.items()
    }


def _stretched(config: HfConfig) -> bool:
    """Return whether rope is scaled (YaRN)."""
    kind = config.get("rope_type")
    if kind is not None and kind not in _ROPES:
        raise config.error("rope_type", kind, " or ".join(_ROPES))
    return bool(kind == "yarn")


def _words(config: HfConfig) -> dict[str, Any]:
    """Return the rope parameters in transformers' format. SGLang scales only the angles, not the magnitude."""
    if not _stretched(config):
        return {}
    factor, context = config.real("scaling_factor"), config.needed("original_max_position_embeddings")
    if factor is None or factor < 1.0:
        raise config.error("scaling_factor", factor, "a number from 1 up")
    bounds = {name: config.real(name) for name in ("beta_fast", "beta_slow")}
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context, **bounds}
    return {"rope_parameters": {**rope, "attention_factor": 1.0}}


def _extrapolation(config: HfConfig) -> float | None:
    return config.real("extrapolation_factor") if _stretched(config) else None


def _temperature_length(config: HfConfig) -> int | None:
    """Return the position from which attention scores are scaled up, or None if config.json has -1 or 0."""
    return None if config.get("attn_temperature_len") in (-1, 0) else config.integer("attn_temperature_len")


def _score_scale(config: HfConfig) -> float:
    return config.real("attn_output_multiplier") or head_width(config) ** -0.5


_KEYS: Keys = {
    "expert_count": by_name("num_local_experts", "num_experts"),
    "expert_used_count": "num_experts_per_tok",
    "attention.output_scale": _score_scale,
    "attention.temperature_length": _temperature_length,
    "embedding_scale": ratio("embedding_multiplier_scale"),
    "logit_scale": ratio("output_multiplier_scale"),
    "final_logit_softcapping": lambda config: config.real("final_logit_softcapping", "final_logit_softcap") or None,
    "router_logit_softcapping": lambda config: config.real("router_logit_softcapping") or 30.0,
    "rope.scaling.yarn_ext_factor": _extrapolation,
}
_FIXED: dict[str, Any] = {
    "sliding_window_size": -1,
    "global_attn_every_n": 1,
    "rope_rotate_half_dims": False,
    "attn_logit_softcapping_method": "tanh",
}

ROWS = (
    Recipe(
        "grok", ("GrokForCausalLM", "Grok1ForCausalLM"), top=_TOP, keys=_KEYS, fixed=_FIXED, words=_words,
        defaults={"attn_logit_softcapping": lambda config: config.real("max_attn_value") or 30.0}, raw=_merged,
    ),
)  # fmt: skip
