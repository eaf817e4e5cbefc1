"""The recipes of Phi 2 to 4 and Phi MoE."""

from __future__ import annotations

from localllm.convert.recipe import Recipe

ROWS = (
    Recipe("phi2", ("PhiForCausalLM",), defaults={"partial_rotary_factor": 0.5}, fixed={"qk_layernorm": False}),
    Recipe("phi3", ("Phi3ForCausalLM", "Phi4ForCausalLMV"), rope_tensors=True),
    Recipe(
        "phimoe", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), rope_tensors=True,
        fixed={"router_jitter_noise": 0.01, "num_experts_per_tok": 2},
    ),
)  # fmt: skip
