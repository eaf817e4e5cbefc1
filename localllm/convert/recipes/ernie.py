"""The recipes of Ernie 4.5."""

from __future__ import annotations

from localllm.convert import sources as of
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import From, Layer, Recipe, must_be, of_groups, take_half


def _of_shared_experts(config: HfConfig) -> int:
    return config.needed("moe_intermediate_size") * (config.integer("moe_num_shared_experts") or 0)


def _fused(config: HfConfig) -> tuple[int, tuple[int, ...]]:
    """Return a single group, with its rows of queries, keys and values."""
    heads = config.needed("num_attention_heads")
    width = config.integer("head_dim") or config.needed("hidden_size") // heads
    few = config.integer("num_key_value_heads") or heads
    return 1, (heads * width, few * width, few * width)


_ERNIE: Layer = {
    **of.QWEN,
    **{
        f"attn_{x}": (From((f"self_attn.{x}_proj",)), From(("self_attn.qkv_proj",), of_groups(_fused, part)))
        for part, x in enumerate("qkv")
    },
    **{
        f"ffn_{x}": (From((f"mlp.{x}_proj",)), From(("mlp.up_gate_proj",), take_half(part)))
        for part, x in enumerate(("gate", "up"))
    },
}


ROWS = (
    Recipe("ernie4_5", ("Ernie4_5ForCausalLM",), of.QWEN),
    Recipe(
        "ernie4_5-moe", ("Ernie4_5_MoeForCausalLM",), of.ERNIE_MOE,
        keys={
            "interleave_moe_layer_step": 1,
            "expert_shared_feed_forward_length": _of_shared_experts,
        },
        checks=(must_be("moe_layer_interval", 1),),
    ),
    Recipe("ernie4_5", ("Ernie4_5_ForCausalLM",), _ERNIE, checks=(must_be("use_bias", False),)),
)  # fmt: skip
