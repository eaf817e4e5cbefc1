"""The recipes of Qwen 1 to 3.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from localllm.convert import sources as of
from localllm.convert.recipe import Layer, Recipe, by_name, must_be, taken
from localllm.convert.recipes.shared import GPT, WTE

_ALL_SPARSE = (must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", []))
_QWEN: Layer = {**GPT, "ffn_up": taken("mlp.w1"), "ffn_gate": taken("mlp.w2"), "ffn_down": taken("mlp.c_proj")}
_KORMO: Layer = {
    **of.QWEN, "attn_norm": taken("pre_attention_layernorm"), "ffn_norm": taken("pre_mlp_layernorm"),
}  # fmt: skip


ROWS = (
    Recipe("qwen2", ("Qwen2ForCausalLM",), of.QWEN),
    Recipe("qwen2moe", ("Qwen2MoeForCausalLM",), of.QWEN2_MOE, checks=(must_be("norm_topk_prob", False), *_ALL_SPARSE)),
    Recipe("qwen3", ("Qwen3ForCausalLM",), {**of.QWEN, **of.HEAD_NORMS}),
    Recipe(
        "qwen3moe", ("Qwen3MoeForCausalLM",), {**of.NORMS, **of.QKV, **of.OUT, **of.HEAD_NORMS, **of.QWEN2_MOE},
        checks=(must_be("norm_topk_prob", True), *_ALL_SPARSE),
    ),
    Recipe(
        "qwen", ("QWenLMHeadModel",), _QWEN, eps="layer_norm_epsilon", top=WTE,
        keys={"context_length": by_name("seq_length", "max_position_embeddings")},
        checks=(must_be("rotary_pct", 1.0), must_be("scale_attn_weights", True)),
        defaults={"head_dim": lambda config: config.integer("kv_channels"), "layer_norm_epsilon": 1e-6},
    ),
    Recipe("qwen2", ("KORMoForCausalLM",), _KORMO),
    Recipe("qwen2", ("Qwen2Model",), of.QWEN),
    Recipe("qwen3", ("Qwen3Model",), {**of.QWEN, **of.HEAD_NORMS}),
)  # fmt: skip
