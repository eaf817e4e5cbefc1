"""The recipes of Qwen 1 to 3.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from localllm.convert.recipe import Recipe, by_name, integer
from localllm.convert.recipes.shared import NORMED_SPARSE

ROWS = (
    Recipe("qwen2", ("Qwen2ForCausalLM", "Qwen2Model", "DotsOCRForCausalLM")),
    Recipe("qwen2moe", ("Qwen2MoeForCausalLM",), fixed={**NORMED_SPARSE, "norm_topk_prob": False}),
    Recipe("qwen3", ("Qwen3ForCausalLM", "Qwen3Model", "StepVLForConditionalGeneration")),
    Recipe("qwen3moe", ("Qwen3MoeForCausalLM",), fixed=NORMED_SPARSE),
    Recipe(
        "qwen", ("QWenLMHeadModel",), keys={"context_length": by_name("seq_length", "max_position_embeddings")},
        fixed={"rotary_pct": 1.0, "scale_attn_weights": True},
        defaults={"head_dim": integer("kv_channels"), "layer_norm_epsilon": 1e-6},
    ),
    Recipe("qwen2", ("KORMoForCausalLM",)),
)  # fmt: skip
