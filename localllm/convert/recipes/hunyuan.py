"""The recipes of Hunyuan 1 and 3."""

from __future__ import annotations

from localllm.convert.recipe import Recipe, real
from localllm.convert.recipes.shared import leading

ROWS = (
    Recipe("hunyuan-dense", ("HunYuanDenseV1ForCausalLM",)),
    Recipe(
        "hunyuan-moe", ("HunYuanMoEV1ForCausalLM",),
        keys={
            "expert_feed_forward_length": "intermediate_size", "expert_shared_feed_forward_length": "intermediate_size",
        },
    ),
    Recipe(
        "hy_v3", ("HYV3ForCausalLM",), {"exp_probs_b": "mlp.expert_bias"}, like="dots1",
        keys={
            "expert_weights_norm": True, "expert_weights_scale": real("router_scaling_factor"),
            "leading_dense_block_count": leading,
        },
    ),
)  # fmt: skip
