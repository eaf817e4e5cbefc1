"""The recipes of GPT-2 and gpt-oss."""

from __future__ import annotations

from localllm.convert import sources as of
from localllm.convert.recipe import From, Recipe, by_name, must_be

ROWS = (
    Recipe(
        "gpt2", ("GPT2LMHeadModel",), of.GPT2, eps="layer_norm_epsilon",
        defaults={
            "num_hidden_layers": by_name("n_layer"), "hidden_size": by_name("n_embd"),
            "num_attention_heads": by_name("n_head"), "max_position_embeddings": by_name("n_positions", "n_ctx"),
            "layer_norm_epsilon": 1e-5,
        },
        keys={
            "attention.head_count_kv": "n_head", "rope.dimension_count": None, "rope.freq_base": None,
            "feed_forward_length": lambda config: config.integer("n_inner") or 4 * config.needed("n_embd"),
        },
        top={
            "token_embd": From(("model.wte",)), "position_embd": From(("model.wpe",)),
            "output_norm": From(("model.ln_f",)),
        },
        checks=(
            must_be("activation_function", "gelu_new", "gelu", "gelu_pytorch_tanh"),
            must_be("scale_attn_weights", True), must_be("scale_attn_by_inverse_layer_idx", False),
        ),
    ),
    Recipe(
        "gpt-oss", ("GptOssForCausalLM",), of.GPT_OSS, keys={"expert_feed_forward_length": "intermediate_size"},
        checks=(must_be("swiglu_limit", 7.0), must_be("swiglu_alpha", 1.702)),
    ),
)  # fmt: skip
