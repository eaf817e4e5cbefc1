"""The recipes of the diffusion models Dream, LLaDA, LLaDA-MoE and RND1.

transformers does not support these models. The tensor names come from their reference implementations.
"""

from __future__ import annotations

from typing import Any

from localllm.convert.changes import PERMUTED
from localllm.convert.recipe import Recipe, by_name, integer, layers_at
from localllm.convert.recipes.shared import NORMED_SPARSE

# False: the logits at a position predict its own token, not the next token.
_SHIFT = "diffusion.shift_logits"


_SIZES: dict[str, Any] = {
    "num_key_value_heads": integer("n_kv_heads"),
    "rms_norm_eps": 1e-5,
    "hidden_act": lambda config: config.get("activation_type"),
}

ROWS = (
    Recipe("dream", ("DreamModel",)),
    Recipe(
        "llada", ("LLaDAModelLM",), changes=PERMUTED, raw=layers_at("model.transformer.blocks."), defaults=_SIZES,
        whole_keys={_SHIFT: False, "tokenizer.ggml.add_bos_token": True},
        fixed={
            "block_type": "llama", "layer_norm_type": "rms", "alibi": False, "rope": True, "input_emb_norm": False,
            "attention_layer_norm": False, "block_group_size": 1, "scale_logits": False,
        },
    ),
    Recipe(
        "llada-moe", ("LLaDAMoEModel", "LLaDAMoEModelLM"),
        keys={"expert_feed_forward_length": by_name("expert_intermediate_size", "moe_intermediate_size")},
        whole_keys={_SHIFT: False}, defaults={"mask_token_id": 156895},
        fixed={"norm_topk_prob": False, "num_shared_experts": 0},
    ),
    Recipe("rnd1", ("RND1", "RND1LM"), fixed=NORMED_SPARSE),
)  # fmt: skip
