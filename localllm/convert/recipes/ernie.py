"""The recipes of Ernie 4.5."""

from __future__ import annotations

from localllm.convert.changes import flat, halves, of_groups
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Layer, Recipe, taken
from localllm.convert.recipes.shared import one_after_other


def _of_shared_experts(config: HfConfig) -> int:
    return config.needed("moe_intermediate_size") * (config.integer("moe_num_shared_experts") or 0)


_ERNIE: Layer = {
    **{f"attn_{x}": taken("self_attn.qkv_proj", of_groups(one_after_other, part)) for part, x in enumerate("qkv")},
    **halves("mlp.up_gate_proj"),
}


ROWS = (
    Recipe("ernie4_5", ("Ernie4_5ForCausalLM",)),
    Recipe(
        "ernie4_5-moe", ("Ernie4_5_MoeForCausalLM",),
        {"exp_probs_b.bias": taken("mlp.moe_statics.e_score_correction_bias", flat)},
        keys={"interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": _of_shared_experts},
        fixed={"moe_layer_interval": 1},
    ),
    Recipe("ernie4_5", ("Ernie4_5_ForCausalLM",), _ERNIE, fixed={"use_bias": False}),
)  # fmt: skip
