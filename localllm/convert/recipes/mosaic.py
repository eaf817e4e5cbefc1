"""The recipes of MPT and DBRX."""

from __future__ import annotations

import math

from localllm.convert import tensor as t
from localllm.convert.changes import height, in_turn, numbered, turned
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Recipe, Tensors
from localllm.convert.recipes.shared import NOT_ROTATED
from localllm.convert.tensor import LazyTensor


def _attention(config: HfConfig) -> HfConfig:
    """Return the attention settings of DBRX and MPT."""
    return config.inner("attn_config")


def _experts(config: HfConfig) -> HfConfig:
    """Return DBRX's expert settings."""
    return config.inner("ffn_config")


def _by_expert(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Split the stacked rows of all experts into one matrix per expert."""
    config = _experts(config)
    count = config.needed("moe_num_experts")
    numbered(parts[0], height(parts[0]), count, config.needed("ffn_hidden_size"))
    return t.divided(parts[0], count)


def _one_base(config: HfConfig) -> str | None:
    """Refuse DBRX with two rope bases: transformers 5 adds its default base next to the trained one."""
    rope = config.inner("rope_parameters")
    own, other = _attention(config).real("rope_theta"), rope.real("rope_theta")
    if own is None or other in (None, own):
        return None
    return f"rope_theta is {other:g} in rope_parameters and {own:g} in attn_config, and there is one for both"


def _sum_of_one(config: HfConfig) -> str | None:
    """Require router weights that are normalized to a sum of 1."""
    found = config.table("ffn_config").get("moe_normalize_expert_weights", 1)
    if found == 1:
        return None
    return f"ffn_config.moe_normalize_expert_weights is {found}; the GGUF architecture requires 1"


def _root_of_width(config: HfConfig) -> str | None:
    """Require MPT's attention scores to be scaled by 1/sqrt(head width)."""
    scale, width = _attention(config).real("softmax_scale"), config.width
    fixed = (width / config.heads) ** -0.5
    if scale is None or math.isclose(scale, fixed, rel_tol=1e-6):
        return None
    return f"attn_config.softmax_scale is {scale:g}; the GGUF architecture requires {fixed:g}"


ROWS = (
    Recipe(
        "dbrx", ("DbrxForCausalLM",),
        keys={
            "attention.head_count_kv": lambda config: _attention(config).integer("kv_n_heads") or 1,
            "attention.clamp_kqv": lambda config: _attention(config).real("clip_qkv"),
            "feed_forward_length": lambda config: _experts(config).needed("ffn_hidden_size"),
            "expert_count": lambda config: _experts(config).needed("moe_num_experts"),
            "expert_used_count": lambda config: _experts(config).needed("moe_top_k"),
        },
        fixed={"ffn_config.ffn_act_fn.name": "silu"}, checks=(_sum_of_one, _one_base),
        defaults={"rope_theta": lambda config: _attention(config).real("rope_theta")},
        changes={"ffn_gate_exps": _by_expert, "ffn_up_exps": _by_expert, "ffn_down_exps": in_turn(_by_expert, turned)},
    ),
    Recipe(
        "mpt", ("MptForCausalLM", "MPTForCausalLM"),
        keys={
            **NOT_ROTATED, "attention.head_count_kv": "num_attention_heads",
            "feed_forward_length": lambda config: 4 * config.width,
            "attention.clamp_kqv": lambda config: _attention(config).real("clip_qkv") or None,
            "attention.max_alibi_bias": lambda config: float(_attention(config).integer("alibi_bias_max") or 8),
        },
        fixed={
            "attn_config.alibi": True, "attn_config.attn_type": "multihead_attention", "attn_config.qk_ln": False,
            "attn_config.prefix_lm": False, "no_bias": True, "expansion_ratio": 4, "logit_scale": 1,
        },
        checks=(_root_of_width,),
    ),
)  # fmt: skip
