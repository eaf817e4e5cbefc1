"""Settings that several tiny models share, named as in transformers, and the rows of the tables of models."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.localllm.convert.hf_tokenizers import VOCABULARY

WINDOW = 8
CONTEXT = 256
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 1.5, 4.0, 9.0], "original_max_position_embeddings": 16,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3,
}  # fmt: skip
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}  # fmt: skip
CONV = ["conv", "full_attention", "conv"]
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 12,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip
SEES = {"vision_config": VISION}
MINISTRAL = {
    **YARN, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1, "max_position_embeddings": CONTEXT,
}  # fmt: skip


class Tiny(NamedTuple):
    kind: str  # configuration class
    settings: dict[str, Any]  # its arguments
    tokenizer: str  # "spm", "llama3", ...
    program: str = ""  # model class; "": the class for causal models, or for images and text
    pooling: str = ""  # of sentence-transformers


def tiny(kind: str, tokenizer: str, *shared: dict[str, Any], **settings: Any) -> Tiny:
    """Return a row: `COMMON`, then the shared settings, then the model's own. A multimodal model takes only these."""
    told = {key: x for part in shared for key, x in part.items()} | settings
    inside = "text_config" in told or "thinker_config" in told
    return Tiny(kind, told if inside else {**COMMON, **told}, tokenizer)


def text(model_type: str, /, *shared: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return the `text_config` of a multimodal model; "" keeps the model type that its class has by default."""
    told = tiny("", "", *shared, **settings).settings
    return {"text_config": told | ({"model_type": model_type} if model_type else {})}


def seeing(kind: str, tokenizer: str, *shared: dict[str, Any], **settings: Any) -> Tiny:
    """Return the row of a vision model; the settings belong to the language model."""
    return tiny(kind, tokenizer, text("", *shared, **settings), SEES)
