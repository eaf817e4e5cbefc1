"""The recipes of Mistral 3 and 4."""

from __future__ import annotations

from localllm.convert.changes import PERMUTED
from localllm.convert.hf_config import HfConfig
from localllm.convert.latent import LATENT, LATENT_KEYS, one_mscale
from localllm.convert.recipe import Recipe


def _growth_length(config: HfConfig) -> int | None:
    """Return the context length from which llama.cpp scales the queries up (temperature), or None if they are not
    scaled."""
    rope = config.inner("rope_parameters", "rope_scaling")
    if not rope.real("llama_4_scaling_beta"):
        return None
    return rope.needed("original_max_position_embeddings")


ROWS = (
    Recipe(
        "mistral4", ("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"), LATENT,
        keys={
            **LATENT_KEYS, "expert_gating_func": 1, "expert_group_count": None, "expert_group_used_count": None,
            "attention.temperature_length": _growth_length,
        },
        fixed={"rope_interleave": True, "n_group": 1}, checks=(one_mscale,),
        when=lambda config: config.get("model_type") == "mistral4", defaults={"norm_topk_prob": True},
    ),
    Recipe(
        "mistral3", ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"), changes=PERMUTED, rope_tensors=True,
    ),
)  # fmt: skip
