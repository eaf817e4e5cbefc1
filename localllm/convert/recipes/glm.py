"""The recipes of ChatGLM and GLM 4.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from localllm.convert import sources as of
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Check, From, Layer, Recipe, by_name, must_be, taken
from localllm.convert.recipes.shared import head_width


def _as_wide(config: HfConfig) -> str | None:
    """Require head widths that add up to the width of the model, since llama.cpp loads no other models."""
    width, heads, each = config.needed("hidden_size"), config.needed("num_attention_heads"), head_width(config)
    if heads * each == width:
        return None
    return f"{heads} heads of {each} are not {width} together, which the GGUF architecture has fixed so"


_CHATGLM: Layer = {
    **of.NORMS,
    "attn_qkv": taken("self_attention.query_key_value"),
    "attn_output": taken("self_attention.dense"),
    "ffn_up": taken("mlp.dense_h_to_4h"),  # gate and up in one matrix
    "ffn_down": taken("mlp.dense_4h_to_h"),
}
_ALL_NORMED: tuple[Check, ...] = (
    must_be("rmsnorm", True), must_be("post_layer_norm", True), must_be("add_bias_linear", False),
    must_be("apply_residual_connection_post_layernorm", False), must_be("original_rope", True),
    must_be("position_encoding_2d", False),
)  # fmt: skip


ROWS = (
    Recipe("glm4", ("Glm4ForCausalLM",), of.GLM4, defaults={"partial_rotary_factor": 0.5}),
    Recipe(
        "glm4moe", ("Glm4MoeForCausalLM",), of.GLM4_MOE, defaults={"partial_rotary_factor": 0.5},
        keys={"expert_gating_func": 2},  # sigmoid
    ),
    Recipe(
        "chatglm", ("ChatGLMModel", "ChatGLMForConditionalGeneration"), _CHATGLM, eps="layernorm_epsilon",
        layers=lambda config: [f"model.encoder.layers.{n}." for n in range(config.needed("num_hidden_layers"))],
        top={
            "token_embd": From(("model.embedding.word_embeddings",)),
            "output_norm": From(("model.encoder.final_layernorm",)), "output": From(("model.output_layer",)),
        },
        checks=(*_ALL_NORMED, _as_wide),
        defaults={
            "num_hidden_layers": by_name("num_layers"), "max_position_embeddings": by_name("seq_length"),
            "intermediate_size": by_name("ffn_hidden_size"), "head_dim": by_name("kv_channels"),
            "num_key_value_heads": lambda config: (
                config.needed("multi_query_group_num") if config.flag("multi_query_attention") else None
            ),
            "partial_rotary_factor": 0.5, "layernorm_epsilon": 1e-5,
            "rope_theta": lambda config: 10000.0 * (config.real("rope_ratio") or 1.0),
        },
    ),
    Recipe(
        "chatglm", ("GlmForCausalLM",), {**of.NORMS, **of.QKV, **of.OUT, **of.FUSED}, checks=(_as_wide,),
        defaults={"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-07},
    ),
    Recipe(
        "glm4moe", ("SolarOpenForCausalLM",), of.GLM4_MOE,
        keys={"expert_gating_func": 2, "leading_dense_block_count": 0},
    ),
)  # fmt: skip
