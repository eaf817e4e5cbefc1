"""The recipes of OLMo and OLMoE."""

from __future__ import annotations

from localllm.convert import sources as of
from localllm.convert.recipe import Recipe, must_be

ROWS = (
    Recipe(
        "olmo", ("OlmoForCausalLM", "OLMoForCausalLM"), of.LLAMA, eps="layer_norm_eps",
        defaults={"layer_norm_eps": 1e-5},
    ),
    Recipe(
        "olmoe", ("OlmoeForCausalLM",), {**of.NORMS, **of.QKV, **of.OUT, **of.HEAD_NORMS, **of.ROUTED},
        checks=(must_be("norm_topk_prob", False), must_be("clip_qkv", 0)),
    ),
    Recipe("olmo2", ("Olmo2ForCausalLM", "Olmo3ForCausalLM"), of.OLMO2),
)  # fmt: skip
