"""Recipes of model families of 2022 to 2024 with fused QKV, possibly interleaved by head; and MiniCPM 3."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from localllm.convert import tensor as t
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Key, Mapped, Recipe, Sizes, height, in_turn, must_be, numbered, of_groups, turned
from localllm.convert.tensor import LazyTensor

_NOT_ROTATED: dict[str, Key] = {"rope.dimension_count": None, "rope.freq_base": None}
_GELUS = ("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast")


def _number(*names: str) -> Callable[[HfConfig], int | None]:
    """Return a reader for a number in older config files; the first name present is used."""
    return lambda config: config.integer(*names)


def _kv_heads(config: HfConfig) -> int:
    """Return Falcon's number of KV heads."""
    heads = config.needed("num_attention_heads")
    if config.flag("new_decoder_architecture"):
        return config.integer("num_kv_heads") or heads
    return heads if config.flag("multi_query") is False else 1


def _falcon(config: HfConfig) -> tuple[int, tuple[int, ...]]:
    """Return Falcon's number of groups and the rows of a group: queries that share a key, the key, and the value."""
    heads, groups = config.needed("num_attention_heads"), _kv_heads(config)
    width = config.needed("hidden_size") // heads
    return groups, (heads // groups * width, width, width)


def _by_head(config: HfConfig) -> tuple[int, tuple[int, ...]]:
    heads = config.needed("num_attention_heads")
    return heads, (config.needed("hidden_size") // heads,) * 3


def _apart(layout: Callable[[HfConfig], tuple[int, tuple[int, ...]]]) -> Mapped:
    """Reorder fused QKV to all queries, then all keys, then all values."""
    change = of_groups(layout, 0, 1, 2)
    return Mapped(changes={"attn_qkv.weight": change, "attn_qkv.bias": change})


def _inner(config: HfConfig) -> int:
    return config.integer("n_inner", "ffn_hidden_size") or 4 * config.needed("hidden_size")


def _key_width(config: HfConfig) -> int:
    return config.needed("qk_nope_head_dim") + config.needed("qk_rope_head_dim")


def _attention(config: HfConfig) -> HfConfig:
    """Return the attention settings of DBRX and MPT."""
    return config.below("attn_config", config.table("attn_config"))


def _experts(config: HfConfig) -> HfConfig:
    """Return DBRX's expert settings."""
    return config.below("ffn_config", config.table("ffn_config"))


def _by_expert(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Split the stacked rows of all experts into one matrix per expert."""
    config = _experts(sizes.config)
    count = config.needed("moe_num_experts")
    numbered(parts[0], height(parts[0]), count, config.needed("ffn_hidden_size"))
    return t.divided(parts[0], count)


def _one_base(config: HfConfig) -> str | None:
    """Refuse DBRX with two rope bases: transformers 5 adds its default next to the trained one."""
    rope = config.below("rope_parameters", config.table("rope_parameters"))
    own, other = _attention(config).real("rope_theta"), rope.real("rope_theta")
    if own is None or other in (None, own):
        return None
    return f"rope_theta is {other:g} in rope_parameters and {own:g} in attn_config, and there is one for both"


def _sum_of_one(config: HfConfig) -> str | None:
    """Require router weights that are normalized to sum 1."""
    found = config.table("ffn_config").get("moe_normalize_expert_weights", 1)
    if found == 1:
        return None
    return f"ffn_config.moe_normalize_expert_weights is {found}; the GGUF architecture has it fixed at 1"


def _root_of_width(config: HfConfig) -> str | None:
    """Require MPT's attention scores to be scaled by 1/sqrt(head width)."""
    scale, width = _attention(config).real("softmax_scale"), config.needed("hidden_size")
    fixed = (width / config.needed("num_attention_heads")) ** -0.5
    if scale is None or math.isclose(scale, fixed, rel_tol=1e-6):
        return None
    return f"attn_config.softmax_scale is {scale:g}; the GGUF architecture has it fixed at {fixed:g}"


_BLOOM = _apart(_by_head)
_NAMES_OF_MPT: dict[str, Any] = {
    "num_attention_heads": _number("n_heads"), "num_hidden_layers": _number("n_layers"),
    "hidden_size": _number("d_model"), "max_position_embeddings": _number("max_seq_len"),
}  # fmt: skip
ROWS = (
    Recipe(
        "bloom", ("BloomForCausalLM", "BloomModel"), {}, eps="layer_norm_epsilon",
        keys={**_NOT_ROTATED, "feed_forward_length": _inner, "attention.head_count_kv": "num_attention_heads"},
        checks=(must_be("apply_residual_connection_post_layernorm", False),),
        defaults={
            "num_attention_heads": _number("n_head"), "num_hidden_layers": _number("n_layer"),
            "hidden_size": _number("n_embed", "n_embd"), "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": lambda config: config.integer("seq_length") or 2048,
        },
        mapped=Mapped(("transformer.",), changes=_BLOOM.changes),
    ),
    Recipe(
        "dbrx", ("DbrxForCausalLM",), {}, eps="layer_norm_epsilon",
        keys={
            "attention.head_count_kv": lambda config: _attention(config).integer("kv_n_heads") or 1,
            "attention.clamp_kqv": lambda config: _attention(config).real("clip_qkv"),
            "feed_forward_length": lambda config: _experts(config).needed("ffn_hidden_size"),
            "expert_count": lambda config: _experts(config).needed("moe_num_experts"),
            "expert_used_count": lambda config: _experts(config).needed("moe_top_k"),
        },
        checks=(must_be("ffn_config.ffn_act_fn.name", "silu"), _sum_of_one, _one_base),
        defaults={
            **_NAMES_OF_MPT, "layer_norm_epsilon": 1e-5,
            "rope_theta": lambda config: _attention(config).real("rope_theta"),
        },
        mapped=Mapped(changes={
            "ffn_gate_exps.weight": _by_expert, "ffn_up_exps.weight": _by_expert,
            "ffn_down_exps.weight": in_turn(_by_expert, turned),
        }),
    ),
    Recipe(
        "falcon", ("FalconForCausalLM", "RWForCausalLM"), {}, eps="layer_norm_epsilon", mapped=_apart(_falcon),
        keys={"feed_forward_length": _inner, "attention.head_count_kv": _kv_heads},
        checks=(must_be("alibi", False), must_be("parallel_attn", True), must_be("activation", *_GELUS)),
        defaults={
            "max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5,
            # folders of 2023 (RWForCausalLM)
            "num_attention_heads": _number("n_head"), "num_hidden_layers": _number("n_layer"),
            "num_kv_heads": _number("n_head_kv"),
            "new_decoder_architecture": lambda config: config.integer("n_head_kv") is not None,
        },
    ),
    Recipe(
        "gptneox", ("GPTNeoXForCausalLM",), {}, eps="layer_norm_eps", mapped=_apart(_by_head),
        keys={
            "attention.head_count_kv": "num_attention_heads",
            "use_parallel_residual": lambda config: config.flag("use_parallel_residual") is not False,
        },
        defaults={"partial_rotary_factor": lambda config: config.real("rotary_pct") or 0.25, "layer_norm_eps": 1e-5},
    ),
    Recipe(
        "minicpm3", ("MiniCPM3ForCausalLM",), {}, mapped=Mapped(), rope_tensors=True,
        keys={
            "attention.head_count_kv": "num_attention_heads", "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank", "attention.key_length": _key_width,
            "attention.value_length": "v_head_dim", "rope.dimension_count": "qk_rope_head_dim",
        },
        checks=(must_be("scale_emb", 12), must_be("scale_depth", 1.4), must_be("dim_model_base", 256)),
        head_dim=lambda config: config.needed("qk_rope_head_dim"),
    ),
    Recipe(
        "mpt", ("MptForCausalLM", "MPTForCausalLM"), {}, eps="layer_norm_epsilon", mapped=Mapped(),
        keys={
            **_NOT_ROTATED, "attention.head_count_kv": "num_attention_heads",
            "feed_forward_length": lambda config: 4 * config.needed("hidden_size"),
            "attention.clamp_kqv": lambda config: _attention(config).real("clip_qkv") or None,
            "attention.max_alibi_bias": lambda config: float(_attention(config).integer("alibi_bias_max") or 8),
        },
        checks=(
            must_be("attn_config.alibi", True), must_be("attn_config.attn_type", "multihead_attention"),
            must_be("attn_config.qk_ln", False), must_be("attn_config.prefix_lm", False), must_be("no_bias", True),
            must_be("expansion_ratio", 4), must_be("logit_scale", 1), _root_of_width,
        ),
        defaults={**_NAMES_OF_MPT, "layer_norm_epsilon": 1e-5},
    ),
    Recipe(
        "starcoder", ("GPTBigCodeForCausalLM",), {}, eps="layer_norm_epsilon", mapped=Mapped(),
        keys={**_NOT_ROTATED, "feed_forward_length": _inner, "attention.head_count_kv": 1},
        checks=(
            must_be("multi_query", True), must_be("scale_attn_weights", True), must_be("activation_function", *_GELUS),
        ),
        defaults={
            "num_attention_heads": _number("n_head"), "num_hidden_layers": _number("n_layer"),
            "hidden_size": _number("n_embd"), "max_position_embeddings": _number("n_positions"),
            "layer_norm_epsilon": 1e-5,
        },
    ),
)  # fmt: skip
