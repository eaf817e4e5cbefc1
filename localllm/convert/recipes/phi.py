"""The recipes of Phi 2 to 4 and Phi MoE."""

from __future__ import annotations

from localllm.convert import sources as of
from localllm.convert.recipe import From, Recipe, must_be, taken

ROWS = (
    Recipe(
        "phi2", ("PhiForCausalLM",), of.PHI2, eps="layer_norm_eps", defaults={"partial_rotary_factor": 0.5},
        top={"output_norm": From(("model.final_layernorm",))}, checks=(must_be("qk_layernorm", False),),
    ),
    Recipe(
        "phi3", ("Phi3ForCausalLM",), {**of.NORMS, "attn_qkv": taken("self_attn.qkv_proj"), **of.OUT, **of.FUSED},
        rope_tensors=True,
    ),
    Recipe(
        "phimoe", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), {**of.NORMS, **of.QKV, **of.OUT, **of.MIXTRAL},
        rope_tensors=True, checks=(must_be("router_jitter_noise", 0.01), must_be("num_experts_per_tok", 2)),
    ),
)  # fmt: skip
