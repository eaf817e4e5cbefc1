"""The sources of a layer's tensors in checkpoints of transformers: shared parts, then complete layers."""

from __future__ import annotations

from localllm.convert.recipe import (
    From,
    Layer,
    every_second,
    every_second_value,
    first_half_turned,
    flat,
    in_turn,
    key_and_value,
    of_heads,
    only,
    packed,
    permuted,
    second_half_turned,
    stacked,
    take_half,
    taken,
    turned,
)

NORMS: Layer = {"attn_norm": taken("input_layernorm"), "ffn_norm": taken("post_attention_layernorm")}
QKV: Layer = {f"attn_{x}": taken(f"self_attn.{x}_proj") for x in "qkv"}
QKV_PERMUTED: Layer = {
    "attn_q": taken("self_attn.q_proj", permuted(lambda sizes: sizes.heads)),
    "attn_k": taken("self_attn.k_proj", permuted(lambda sizes: sizes.kv_heads)),
    "attn_v": taken("self_attn.v_proj"),
}
OUT: Layer = {"attn_output": taken("self_attn.o_proj")}
HEAD_NORMS: Layer = {"attn_q_norm": taken("self_attn.q_norm"), "attn_k_norm": taken("self_attn.k_norm")}
GATED: Layer = {f"ffn_{x}": taken(f"mlp.{x}_proj") for x in ("gate", "up", "down")}
FUSED: Layer = {"ffn_up": taken("mlp.gate_up_proj"), "ffn_down": taken("mlp.down_proj")}
FOUR_NORMS: Layer = {
    "attn_norm": taken("input_layernorm"),
    "post_attention_norm": taken("post_attention_layernorm"),
    "ffn_norm": taken("pre_feedforward_layernorm"),
    "post_ffw_norm": taken("post_feedforward_layernorm"),
}
LLAMA: Layer = {**NORMS, **QKV_PERMUTED, **OUT, **GATED}
QWEN: Layer = {**NORMS, **QKV, **OUT, **GATED}
GEMMA3: Layer = {**FOUR_NORMS, **QKV, **OUT, **GATED, **HEAD_NORMS}


def expert_sources(gate: str, up: str, down: str) -> Layer:
    """Return the sources of expert weights: one matrix per expert or, in newer versions of transformers, a stack with
    gate and up fused."""
    fused = gate.split("{}")[0] + "gate_up_proj"
    return {
        "ffn_gate_exps.weight": (From((gate + ".weight",), stacked), From((fused,), take_half(0))),
        "ffn_up_exps.weight": (From((up + ".weight",), stacked), From((fused,), take_half(1))),
        "ffn_down_exps.weight": (From((down + ".weight",), stacked), From((down.split("{}")[0] + "down_proj",))),
    }


NUMBERED = expert_sources("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
MIXTRAL = {
    "ffn_gate_inp": taken("block_sparse_moe.gate"),
    **expert_sources(*(f"block_sparse_moe.experts.{{}}.{w}" for w in ("w1", "w3", "w2"))),
}
GPT_OSS: Layer = {
    "attn_norm": taken("input_layernorm"),
    "post_attention_norm": taken("post_attention_layernorm"),
    **QKV,
    **OUT,
    "attn_sinks.weight": taken("self_attn.sinks"),
    "ffn_gate_inp": taken("mlp.router"),
    **{
        f"ffn_{part}_exps.weight": (
            From(("mlp.experts.gate_up_proj_blocks", "mlp.experts.gate_up_proj_scales"), every_second(first, packed)),
            From(("mlp.experts.gate_up_proj",), every_second(first, turned)),
        )
        for first, part in enumerate(("gate", "up"))
    },
    "ffn_down_exps.weight": (
        From(("mlp.experts.down_proj_blocks", "mlp.experts.down_proj_scales"), packed),
        From(("mlp.experts.down_proj",), turned),
    ),
    "ffn_gate_exps.bias": taken("mlp.experts.gate_up_proj_bias", every_second_value(0)),
    "ffn_up_exps.bias": taken("mlp.experts.gate_up_proj_bias", every_second_value(1)),
    "ffn_down_exps.bias": taken("mlp.experts.down_proj_bias"),
}
GRANITE_MOE: Layer = {
    **NORMS,
    **QKV_PERMUTED,
    **OUT,
    "ffn_gate_inp": taken("block_sparse_moe.router.layer"),
    "ffn_gate_exps": taken("block_sparse_moe.input_linear", take_half(0)),
    "ffn_up_exps": taken("block_sparse_moe.input_linear", take_half(1)),
    "ffn_down_exps": taken("block_sparse_moe.output_linear"),
    "ffn_gate_shexp": taken("shared_mlp.input_linear", take_half(0)),
    "ffn_up_shexp": taken("shared_mlp.input_linear", take_half(1)),
    "ffn_down_shexp": taken("shared_mlp.output_linear"),
}
OLMO2: Layer = {
    "post_attention_norm": taken("post_attention_layernorm"),
    "post_ffw_norm": taken("post_feedforward_layernorm"),
    **QKV,
    **OUT,
    **HEAD_NORMS,
    **GATED,
}
EXAONE4: Layer = {
    "post_attention_norm": taken("post_attention_layernorm"),
    "post_ffw_norm": taken("post_feedforward_layernorm"),
    **QKV,
    **OUT,
    **HEAD_NORMS,
    **GATED,
}
GLM4: Layer = {
    "attn_norm": taken("input_layernorm"),
    "post_attention_norm": taken("post_self_attn_layernorm"),
    "ffn_norm": taken("post_attention_layernorm"),
    "post_ffw_norm": taken("post_mlp_layernorm"),
    **QKV,
    **OUT,
    **FUSED,
}
GLM4_MOE: Layer = {
    "attn_norm": taken("input_layernorm"),
    "post_attention_norm": taken("post_attention_layernorm"),
    **QKV,
    **OUT,
    **HEAD_NORMS,
    **GATED,
    "ffn_gate_inp": taken("mlp.gate"),
    "exp_probs_b.bias": taken("mlp.gate.e_score_correction_bias"),
    **NUMBERED,
    **{f"ffn_{x}_shexp": taken(f"mlp.shared_experts.{x}_proj") for x in ("gate", "up", "down")},
}
QWEN2_MOE: Layer = {
    **NORMS,
    **QKV,
    **OUT,
    "ffn_gate_inp": taken("mlp.gate"),
    **NUMBERED,
    **{f"ffn_{x}_shexp": taken(f"mlp.shared_expert.{x}_proj") for x in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": taken("mlp.shared_expert_gate", flat),
}
STABLELM: Layer = {
    **QWEN,
    "attn_q_norm": taken("self_attn.q_layernorm.norms.{}", stacked),
    "attn_k_norm": taken("self_attn.k_layernorm.norms.{}", stacked),
}
STARCODER2: Layer = {
    **NORMS,
    **QKV,
    **OUT,
    "ffn_up": taken("mlp.c_fc"),
    "ffn_down": taken("mlp.c_proj"),
}
UP_DOWN: Layer = {f"ffn_{x}": taken(f"mlp.{x}_proj") for x in ("up", "down")}
PARALLEL: Layer = {"attn_norm": taken("input_layernorm"), **QKV, **OUT, **HEAD_NORMS, **GATED}
APERTUS: Layer = {
    "attn_norm": taken("attention_layernorm"),
    "ffn_norm": taken("feedforward_layernorm"),
    **QKV,
    **OUT,
    **HEAD_NORMS,
    **UP_DOWN,
}
BITNET: Layer = {
    **QWEN,
    "attn_sub_norm": taken("self_attn.attn_sub_norm"),
    "ffn_sub_norm": taken("mlp.ffn_sub_norm"),
}
PHI2: Layer = {
    "attn_norm": taken("input_layernorm"),
    **QKV,
    "attn_output": taken("self_attn.dense"),
    "ffn_up": taken("mlp.fc1"),
    "ffn_down": taken("mlp.fc2"),
}
SHARED: Layer = {f"ffn_{x}_shexp": taken(f"mlp.shared_experts.{x}_proj") for x in ("gate", "up", "down")}
ROUTED: Layer = {"ffn_gate_inp": taken("mlp.gate"), **NUMBERED}
CORRECTED: Layer = {
    **ROUTED,
    **SHARED,
    "exp_probs_b.bias": (From(("mlp.gate.e_score_correction_bias",)), From(("mlp.e_score_correction_bias",))),
}
ERNIE_MOE: Layer = {
    **NORMS,
    **QKV,
    **OUT,
    **GATED,
    **ROUTED,
    **SHARED,
    "exp_probs_b.bias": taken("mlp.moe_statics.e_score_correction_bias", flat),
}
HUNYUAN: Layer = {
    **QWEN,
    "attn_q_norm": taken("self_attn.query_layernorm"),
    "attn_k_norm": taken("self_attn.key_layernorm"),
}
HUNYUAN_MOE: Layer = {
    **{key: source for key, source in HUNYUAN.items() if key not in GATED},
    **ROUTED,
    "ffn_gate_inp": taken("mlp.gate.wg"),
    **{f"ffn_{x}_shexp": taken(f"mlp.shared_mlp.{x}_proj") for x in ("gate", "up", "down")},
}
MINIMAX: Layer = {
    **NORMS,
    **QKV,
    **OUT,
    **HEAD_NORMS,
    **MIXTRAL,
    "exp_probs_b.bias": taken("block_sparse_moe.e_score_correction_bias"),
}
AFMOE: Layer = {
    "attn_norm": taken("input_layernorm"),
    "post_attention_norm": taken("post_attention_layernorm"),
    "ffn_norm": taken("pre_mlp_layernorm"),
    "post_ffw_norm": taken("post_mlp_layernorm"),
    **QKV,
    **OUT,
    **HEAD_NORMS,
    "attn_gate": taken("self_attn.gate_proj"),
    **GATED,
    **ROUTED,
    **SHARED,
    "ffn_gate_inp": taken("mlp.router.gate"),
    "exp_probs_b.bias": taken("mlp.expert_bias"),
}
LLAMA4: Layer = {
    **NORMS,
    **QKV,
    **OUT,
    **{f"ffn_{x}": taken(f"feed_forward.{x}_proj") for x in ("gate", "up", "down")},
    "ffn_gate_inp": taken("feed_forward.router"),
    "ffn_gate_exps.weight": taken("feed_forward.experts.gate_up_proj", first_half_turned),
    "ffn_up_exps.weight": taken("feed_forward.experts.gate_up_proj", second_half_turned),
    "ffn_down_exps.weight": taken("feed_forward.experts.down_proj", turned),
    **{f"ffn_{x}_shexp": taken(f"feed_forward.shared_expert.{x}_proj") for x in ("gate", "up", "down")},
}
LATENT: Layer = {
    **NORMS,
    **OUT,
    "attn_q": taken("self_attn.q_proj"),
    "attn_q_a": taken("self_attn.q_a_proj"),
    "attn_q_a_norm": taken("self_attn.q_a_layernorm"),
    "attn_q_b": taken("self_attn.q_b_proj"),
    "attn_kv_a_mqa": taken("self_attn.kv_a_proj_with_mqa"),
    "attn_kv_a_norm": taken("self_attn.kv_a_layernorm"),
    "attn_k_b.weight": taken("self_attn.kv_b_proj.weight", in_turn(of_heads(key_and_value, 0), turned)),
    "attn_v_b.weight": taken("self_attn.kv_b_proj.weight", of_heads(key_and_value, 1)),
    **GATED,
    **CORRECTED,
}
GPT2: Layer = {
    "attn_norm": taken("ln_1"),
    "ffn_norm": taken("ln_2"),
    **{
        f"{key}.{suffix}": taken(f"{name}.{suffix}", change)
        for key, name in (
            ("attn_qkv", "attn.c_attn"),
            ("attn_output", "attn.c_proj"),
            ("ffn_up", "mlp.c_fc"),
            ("ffn_down", "mlp.c_proj"),
        )
        for suffix, change in (("weight", turned), ("bias", only))
    },
}
