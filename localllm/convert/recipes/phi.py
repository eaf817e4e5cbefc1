"""The recipes of Phi 2 to 4 and Phi MoE."""

from __future__ import annotations

from localllm.convert.recipe import Recipe, must_be

ROWS = (
    Recipe(
        "phi2", ("PhiForCausalLM",), eps="layer_norm_eps", defaults={"partial_rotary_factor": 0.5},
        checks=(must_be("qk_layernorm", False),),
    ),
    Recipe("phi3", ("Phi3ForCausalLM", "Phi4ForCausalLMV"), rope_tensors=True),
    Recipe(
        "phimoe", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), rope_tensors=True,
        checks=(must_be("router_jitter_noise", 0.01), must_be("num_experts_per_tok", 2)),
    ),
)  # fmt: skip
