"""The recipes of OLMo and OLMoE."""

from __future__ import annotations

from localllm.convert.changes import PERMUTED
from localllm.convert.recipe import Recipe

ROWS = (
    Recipe("olmo", ("OlmoForCausalLM", "OLMoForCausalLM"), changes=PERMUTED),
    Recipe("olmoe", ("OlmoeForCausalLM",), fixed={"norm_topk_prob": False, "clip_qkv": 0}),
    Recipe("olmo2", ("Olmo2ForCausalLM", "Olmo3ForCausalLM")),
)  # fmt: skip
