"""The recipes of ChatGLM and GLM 4.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Recipe, by_name, layers_at
from localllm.convert.recipes.shared import head_width


def _as_wide(config: HfConfig) -> str | None:
    """Require head widths that add up to the width of the model, since llama.cpp loads no other models."""
    width, heads, each = config.width, config.heads, head_width(config)
    if heads * each == width:
        return None
    return f"{heads} heads of {each} are not {width} together, which the GGUF architecture has fixed so"


_ALL_NORMED = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "original_rope": True,
    "position_encoding_2d": False,
}


ROWS = (
    Recipe("glm4", ("Glm4ForCausalLM",), defaults={"partial_rotary_factor": 0.5}),
    Recipe("glm4moe", ("Glm4MoeForCausalLM",), defaults={"partial_rotary_factor": 0.5}),
    Recipe(
        "chatglm", ("ChatGLMModel", "ChatGLMForConditionalGeneration"), raw=layers_at("model.encoder.layers."),
        fixed=_ALL_NORMED, checks=(_as_wide,),
        defaults={
            "head_dim": by_name("kv_channels"),
            "num_key_value_heads": lambda config: (
                config.needed("multi_query_group_num") if config.flag("multi_query_attention") else None
            ),
            "partial_rotary_factor": 0.5, "layernorm_epsilon": 1e-5,
            "rope_theta": lambda config: 10000.0 * (config.real("rope_ratio") or 1.0),
        },
    ),
    Recipe(
        "chatglm", ("GlmForCausalLM",), checks=(_as_wide,),
        defaults={"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-07},
    ),
    Recipe("glm4moe", ("SolarOpenForCausalLM",), keys={"leading_dense_block_count": 0}),
)  # fmt: skip
