"""The recipes of Hunyuan 1 and 3."""

from __future__ import annotations

from localllm.convert import sources as of
from localllm.convert.recipe import Layer, Recipe, taken
from localllm.convert.recipes.shared import SIGMOID, leading

_HUNYUAN: Layer = {
    **of.QWEN,
    **of.HEAD_NORMS,
    "ffn_gate_inp": taken("mlp.router.gate"),
    "exp_probs_b": taken("mlp.expert_bias"),
    **of.NUMBERED,
    **{f"ffn_{x}_shexp": taken(f"mlp.shared_mlp.{x}_proj") for x in ("gate", "up", "down")},
}


ROWS = (
    Recipe("hunyuan-dense", ("HunYuanDenseV1ForCausalLM",), of.HUNYUAN),
    Recipe(
        "hunyuan-moe", ("HunYuanMoEV1ForCausalLM",), of.HUNYUAN_MOE,
        keys={
            "expert_feed_forward_length": "intermediate_size", "expert_shared_feed_forward_length": "intermediate_size",
        },
    ),
    Recipe(
        "hy_v3", ("HYV3ForCausalLM",), _HUNYUAN,
        keys={
            **SIGMOID, "expert_weights_scale": lambda config: config.real("router_scaling_factor"),
            "leading_dense_block_count": leading,
        },
    ),
)  # fmt: skip
