"""The recipes of Qwen 1 to 3.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from localllm.convert.recipe import Recipe, by_name, must_be

_ALL_SPARSE = (must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", []))


ROWS = (
    Recipe("qwen2", ("Qwen2ForCausalLM", "Qwen2Model")),
    Recipe("qwen2moe", ("Qwen2MoeForCausalLM",), checks=(must_be("norm_topk_prob", False), *_ALL_SPARSE)),
    Recipe("qwen3", ("Qwen3ForCausalLM", "Qwen3Model")),
    Recipe(
        "qwen3moe", ("Qwen3MoeForCausalLM",),
        checks=(must_be("norm_topk_prob", True), *_ALL_SPARSE),
    ),
    Recipe(
        "qwen", ("QWenLMHeadModel",), eps="layer_norm_epsilon", order="ffn_up ffn_gate",
        keys={"context_length": by_name("seq_length", "max_position_embeddings")},
        checks=(must_be("rotary_pct", 1.0), must_be("scale_attn_weights", True)),
        defaults={"head_dim": lambda config: config.integer("kv_channels"), "layer_norm_epsilon": 1e-6},
    ),
    Recipe("qwen2", ("KORMoForCausalLM",), {"attn_norm": "pre_attention_layernorm", "ffn_norm": "pre_mlp_layernorm"}),
)  # fmt: skip
