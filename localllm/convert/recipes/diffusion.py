"""The recipes of the diffusion models Dream, LLaDA, LLaDA-MoE and RND1.

transformers does not support these models. The tensor names come from their reference implementations.
"""

from __future__ import annotations

from typing import Any

from localllm.convert import sources as of
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import From, Key, Layer, Recipe, by_name, must_be, permuted, taken

_BOTH_WAYS: dict[str, Key] = {"attention.causal": False}
_SHIFT = "diffusion.shift_logits"  # false: the logits at a position predict its own token, not the next token
_LLADA: Layer = {
    "attn_norm": taken("attn_norm"),
    "ffn_norm": taken("ff_norm"),
    "attn_q": taken("q_proj", permuted(lambda sizes: sizes.heads)),
    "attn_k": taken("k_proj", permuted(lambda sizes: sizes.kv_heads)),
    "attn_v": taken("v_proj"),
    "attn_output": taken("attn_out"),
    "ffn_gate": taken("ff_proj"),
    "ffn_up": taken("up_proj"),
    "ffn_down": taken("ff_out"),
}


def _blocks(config: HfConfig) -> list[str]:
    return [f"model.transformer.blocks.{layer}." for layer in range(config.needed("num_hidden_layers"))]


_SIZES: dict[str, Any] = {
    "num_hidden_layers": by_name("n_layers", "num_hidden_layers"), "hidden_size": by_name("d_model", "hidden_size"),
    "num_attention_heads": by_name("n_heads", "num_attention_heads"),
    "num_key_value_heads": lambda config: config.integer("n_kv_heads"),
    "intermediate_size": by_name("mlp_hidden_size", "intermediate_size"), "rms_norm_eps": 1e-5,
    "max_position_embeddings": by_name("max_sequence_length", "max_position_embeddings"),
    "hidden_act": lambda config: config.get("activation_type"),
}  # fmt: skip

ROWS = (
    Recipe("dream", ("DreamModel",), of.QWEN, keys=_BOTH_WAYS),
    Recipe(
        "llada", ("LLaDAModelLM",), _LLADA, layers=_blocks, keys=_BOTH_WAYS, defaults=_SIZES,
        whole_keys={_SHIFT: False, "tokenizer.ggml.add_bos_token": True},
        top={
            "token_embd": From(("model.transformer.wte",)), "output_norm": From(("model.transformer.ln_f",)),
            "output": From(("model.transformer.ff_out",)),
        },
        checks=(
            must_be("block_type", "llama"), must_be("layer_norm_type", "rms"), must_be("alibi", False),
            must_be("rope", True), must_be("input_emb_norm", False), must_be("attention_layer_norm", False),
            must_be("block_group_size", 1), must_be("scale_logits", False),
        ),
    ),
    Recipe(
        "llada-moe", ("LLaDAMoEModel", "LLaDAMoEModelLM"),
        {**of.NORMS, **of.QKV, **of.OUT, **of.HEAD_NORMS, **of.ROUTED},
        keys={**_BOTH_WAYS, "expert_feed_forward_length": by_name("expert_intermediate_size", "moe_intermediate_size")},
        whole_keys={_SHIFT: False}, defaults={"mask_token_id": 156895},
        checks=(must_be("norm_topk_prob", False), must_be("num_shared_experts", 0)),
    ),
    Recipe(
        "rnd1", ("RND1", "RND1LM"), {**of.NORMS, **of.QKV, **of.OUT, **of.HEAD_NORMS, **of.QWEN2_MOE}, keys=_BOTH_WAYS,
        checks=(must_be("norm_topk_prob", True), must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", [])),
    ),
)  # fmt: skip
