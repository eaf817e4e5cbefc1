"""The architectures that can be converted, one row each: classes in transformers, the source of each GGUF tensor, and
the assumptions of the GGUF architecture, which config.json must meet."""

from __future__ import annotations

from localllm.convert.recipe import (
    From,
    Layer,
    Recipe,
    every_fourth_without_rope,
    every_second,
    every_second_value,
    first_half_turned,
    flat,
    half,
    must_be,
    packed,
    permuted,
    score_scale,
    second_half_turned,
    slides_at_64_layers,
    stacked,
    taken,
    turned,
)

_NORMS: Layer = {"attn_norm": taken("input_layernorm"), "ffn_norm": taken("post_attention_layernorm")}
_QKV: Layer = {f"attn_{x}": taken(f"self_attn.{x}_proj") for x in "qkv"}
_QKV_PERMUTED: Layer = {
    "attn_q": taken("self_attn.q_proj", permuted(lambda sizes: sizes.heads)),
    "attn_k": taken("self_attn.k_proj", permuted(lambda sizes: sizes.kv_heads)),
    "attn_v": taken("self_attn.v_proj"),
}
_OUT: Layer = {"attn_output": taken("self_attn.o_proj")}
_HEAD_NORMS: Layer = {"attn_q_norm": taken("self_attn.q_norm"), "attn_k_norm": taken("self_attn.k_norm")}
_GATED: Layer = {f"ffn_{x}": taken(f"mlp.{x}_proj") for x in ("gate", "up", "down")}
_FUSED: Layer = {"ffn_up": taken("mlp.gate_up_proj"), "ffn_down": taken("mlp.down_proj")}
_FOUR_NORMS: Layer = {
    "attn_norm": taken("input_layernorm"),
    "post_attention_norm": taken("post_attention_layernorm"),
    "ffn_norm": taken("pre_feedforward_layernorm"),
    "post_ffw_norm": taken("post_feedforward_layernorm"),
}
_LLAMA: Layer = {**_NORMS, **_QKV_PERMUTED, **_OUT, **_GATED}
_QWEN: Layer = {**_NORMS, **_QKV, **_OUT, **_GATED}
_GEMMA3: Layer = {**_FOUR_NORMS, **_QKV, **_OUT, **_GATED, **_HEAD_NORMS}


def _experts(gate: str, up: str, down: str) -> Layer:
    """Sources of experts: one matrix per expert or, as newer transformers may save them, one for gate and up of all."""
    fused = gate.split("{}")[0] + "gate_up_proj"
    return {
        "ffn_gate_exps.weight": (From((gate + ".weight",), stacked), From((fused,), half(0))),
        "ffn_up_exps.weight": (From((up + ".weight",), stacked), From((fused,), half(1))),
        "ffn_down_exps.weight": (From((down + ".weight",), stacked), From((down.split("{}")[0] + "down_proj",))),
    }


_NUMBERED = _experts("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
_MIXTRAL = {
    "ffn_gate_inp": taken("block_sparse_moe.gate"),
    **_experts(*(f"block_sparse_moe.experts.{{}}.{w}" for w in ("w1", "w3", "w2"))),
}
_GPT_OSS: Layer = {
    "attn_norm": taken("input_layernorm"),
    "post_attention_norm": taken("post_attention_layernorm"),
    **_QKV,
    **_OUT,
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
_GRANITE_MOE: Layer = {
    **_NORMS,
    **_QKV_PERMUTED,
    **_OUT,
    "ffn_gate_inp": taken("block_sparse_moe.router.layer"),
    "ffn_gate_exps": taken("block_sparse_moe.input_linear", half(0)),
    "ffn_up_exps": taken("block_sparse_moe.input_linear", half(1)),
    "ffn_down_exps": taken("block_sparse_moe.output_linear"),
    "ffn_gate_shexp": taken("shared_mlp.input_linear", half(0)),
    "ffn_up_shexp": taken("shared_mlp.input_linear", half(1)),
    "ffn_down_shexp": taken("shared_mlp.output_linear"),
}
_OLMO2: Layer = {
    "post_attention_norm": taken("post_attention_layernorm"),
    "post_ffw_norm": taken("post_feedforward_layernorm"),
    **_QKV,
    **_OUT,
    **_HEAD_NORMS,
    **_GATED,
}
_GLM4: Layer = {
    "attn_norm": taken("input_layernorm"),
    "post_attention_norm": taken("post_self_attn_layernorm"),
    "ffn_norm": taken("post_attention_layernorm"),
    "post_ffw_norm": taken("post_mlp_layernorm"),
    **_QKV,
    **_OUT,
    **_FUSED,
}
_GLM4_MOE: Layer = {
    "attn_norm": taken("input_layernorm"),
    "post_attention_norm": taken("post_attention_layernorm"),
    **_QKV,
    **_OUT,
    **_HEAD_NORMS,
    **_GATED,
    "ffn_gate_inp": taken("mlp.gate"),
    "exp_probs_b.bias": taken("mlp.gate.e_score_correction_bias"),
    **_NUMBERED,
    **{f"ffn_{x}_shexp": taken(f"mlp.shared_experts.{x}_proj") for x in ("gate", "up", "down")},
}
_QWEN2_MOE: Layer = {
    **_NORMS,
    **_QKV,
    **_OUT,
    "ffn_gate_inp": taken("mlp.gate"),
    **_NUMBERED,
    **{f"ffn_{x}_shexp": taken(f"mlp.shared_expert.{x}_proj") for x in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": taken("mlp.shared_expert_gate", flat),
}
_STABLELM: Layer = {
    **_QWEN,
    "attn_q_norm": taken("self_attn.q_layernorm.norms.{}", stacked),
    "attn_k_norm": taken("self_attn.k_layernorm.norms.{}", stacked),
}
_STARCODER2: Layer = {
    **_NORMS,
    **_QKV,
    **_OUT,
    "ffn_up": taken("mlp.c_fc"),
    "ffn_down": taken("mlp.c_proj"),
}
_UP_DOWN: Layer = {f"ffn_{x}": taken(f"mlp.{x}_proj") for x in ("up", "down")}
_PARALLEL: Layer = {"attn_norm": taken("input_layernorm"), **_QKV, **_OUT, **_HEAD_NORMS, **_GATED}
_PHI2: Layer = {
    "attn_norm": taken("input_layernorm"),
    **_QKV,
    "attn_output": taken("self_attn.dense"),
    "ffn_up": taken("mlp.fc1"),
    "ffn_down": taken("mlp.fc2"),
}
_SHARED: Layer = {f"ffn_{x}_shexp": taken(f"mlp.shared_experts.{x}_proj") for x in ("gate", "up", "down")}
_ROUTED: Layer = {"ffn_gate_inp": taken("mlp.gate"), **_NUMBERED}
_CORRECTED: Layer = {
    **_ROUTED,
    **_SHARED,
    "exp_probs_b.bias": (From(("mlp.gate.e_score_correction_bias",)), From(("mlp.e_score_correction_bias",))),
}
_ERNIE_MOE: Layer = {
    **_NORMS,
    **_QKV,
    **_OUT,
    **_GATED,
    **_ROUTED,
    **_SHARED,
    "exp_probs_b.bias": taken("mlp.moe_statics.e_score_correction_bias", flat),
}
_HUNYUAN: Layer = {
    **_QWEN,
    "attn_q_norm": taken("self_attn.query_layernorm"),
    "attn_k_norm": taken("self_attn.key_layernorm"),
}
_HUNYUAN_MOE: Layer = {
    **{key: source for key, source in _HUNYUAN.items() if key not in _GATED},
    **_ROUTED,
    "ffn_gate_inp": taken("mlp.gate.wg"),
    **{f"ffn_{x}_shexp": taken(f"mlp.shared_mlp.{x}_proj") for x in ("gate", "up", "down")},
}
_MINIMAX: Layer = {
    **_NORMS,
    **_QKV,
    **_OUT,
    **_HEAD_NORMS,
    **_MIXTRAL,
    "exp_probs_b.bias": taken("block_sparse_moe.e_score_correction_bias"),
}
_AFMOE: Layer = {
    "attn_norm": taken("input_layernorm"),
    "post_attention_norm": taken("post_attention_layernorm"),
    "ffn_norm": taken("pre_mlp_layernorm"),
    "post_ffw_norm": taken("post_mlp_layernorm"),
    **_QKV,
    **_OUT,
    **_HEAD_NORMS,
    "attn_gate": taken("self_attn.gate_proj"),
    **_GATED,
    **_ROUTED,
    **_SHARED,
    "ffn_gate_inp": taken("mlp.router.gate"),
    "exp_probs_b.bias": taken("mlp.expert_bias"),
}
_LLAMA4: Layer = {
    **_NORMS,
    **_QKV,
    **_OUT,
    **{f"ffn_{x}": taken(f"feed_forward.{x}_proj") for x in ("gate", "up", "down")},
    "ffn_gate_inp": taken("feed_forward.router"),
    "ffn_gate_exps.weight": taken("feed_forward.experts.gate_up_proj", first_half_turned),
    "ffn_up_exps.weight": taken("feed_forward.experts.gate_up_proj", second_half_turned),
    "ffn_down_exps.weight": taken("feed_forward.experts.down_proj", turned),
    **{f"ffn_{x}_shexp": taken(f"feed_forward.shared_expert.{x}_proj") for x in ("gate", "up", "down")},
}
_ALL_SPARSE = (must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", []))
_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip

_ROWS = (
    Recipe(
        "llama", ("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
        {**_LLAMA, **_MIXTRAL}, rope_tensors=True,
    ),
    Recipe(
        "afmoe", ("AfmoeForCausalLM",), _AFMOE, keys={"expert_gating_func": 2, "expert_weights_norm": True},
        checks=(must_be("mup_enabled", True),),
    ),
    Recipe("arcee", ("ArceeForCausalLM",), {**_NORMS, **_QKV_PERMUTED, **_OUT, **_UP_DOWN}, rope_tensors=True),
    Recipe("cohere2", ("Cohere2ForCausalLM",), _PARALLEL, eps="layer_norm_eps"),
    Recipe("command-r", ("CohereForCausalLM",), _PARALLEL, eps="layer_norm_eps"),
    Recipe(
        "dots1", ("Dots1ForCausalLM",), {**_QWEN, **_HEAD_NORMS, **_CORRECTED}, keys={"expert_gating_func": 2},
    ),
    Recipe("ernie4_5", ("Ernie4_5ForCausalLM",), _QWEN),
    Recipe("ernie4_5-moe", ("Ernie4_5_MoeForCausalLM",), _ERNIE_MOE, checks=(must_be("moe_layer_interval", 1),)),
    Recipe(
        "exaone4", ("Exaone4ForCausalLM",),
        {"post_attention_norm": taken("post_attention_layernorm"),
         "post_ffw_norm": taken("post_feedforward_layernorm"), **_QKV, **_OUT, **_HEAD_NORMS, **_GATED},
        rope_tensors=True, checks=(slides_at_64_layers,),
    ),
    Recipe(
        "exaone-moe", ("ExaoneMoeForCausalLM",), {**_QWEN, **_HEAD_NORMS, **_CORRECTED},
        keys={"expert_gating_func": 2},
    ),
    Recipe("hunyuan-dense", ("HunYuanDenseV1ForCausalLM",), _HUNYUAN),
    Recipe("hunyuan-moe", ("HunYuanMoEV1ForCausalLM",), _HUNYUAN_MOE),
    Recipe(
        "jais2", ("Jais2ForCausalLM",), {**_NORMS, **_QKV, **_OUT, **_UP_DOWN}, eps="layer_norm_eps",
    ),
    Recipe(
        "llama4", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), _LLAMA4, rope_tensors=True,
        keys={
            "feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "attention_chunk_size",
        },
        checks=(every_fourth_without_rope, must_be("attn_scale", 0.1), must_be("floor_scale", 8192)),
    ),
    Recipe("minimax-m2", ("MiniMaxM2ForCausalLM",), _MINIMAX),
    Recipe(
        "nemotron", ("NemotronForCausalLM",), {**_NORMS, **_QKV, **_OUT, **_UP_DOWN}, norm_offset=1.0, eps="norm_eps",
        defaults={"partial_rotary_factor": 0.5},
    ),
    Recipe(
        "olmo", ("OlmoForCausalLM",), _LLAMA, eps="layer_norm_eps", defaults={"layer_norm_eps": 1e-5},
    ),
    Recipe(
        "olmoe", ("OlmoeForCausalLM",), {**_NORMS, **_QKV, **_OUT, **_HEAD_NORMS, **_ROUTED},
        checks=(must_be("norm_topk_prob", False), must_be("clip_qkv", 0)),
    ),
    Recipe(
        "phi2", ("PhiForCausalLM",), _PHI2, eps="layer_norm_eps", defaults={"partial_rotary_factor": 0.5},
        top={"output_norm": From(("model.final_layernorm",))}, checks=(must_be("qk_layernorm", False),),
    ),
    Recipe("seed_oss", ("SeedOssForCausalLM",), {
        "attn_norm": taken("input_layernorm"), "post_attention_norm": taken("post_attention_layernorm"),
        **_QKV, **_OUT, **_GATED,
    }),
    Recipe("mistral3", ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"), _LLAMA, rope_tensors=True),
    Recipe("gemma", ("GemmaForCausalLM",), _QWEN, norm_offset=1.0),
    Recipe(
        "gemma2", ("Gemma2ForCausalLM",), {**_FOUR_NORMS, **_QKV, **_OUT, **_GATED}, norm_offset=1.0,
        checks=(score_scale(46),),
    ),
    Recipe(
        "gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _GEMMA3, norm_offset=1.0,
        defaults=_GEMMA3_DEFAULTS, checks=(score_scale(62), must_be("use_bidirectional_attention", False)),
    ),
    Recipe("glm4", ("Glm4ForCausalLM",), _GLM4, defaults={"partial_rotary_factor": 0.5}),
    Recipe(
        "glm4moe", ("Glm4MoeForCausalLM",), _GLM4_MOE, defaults={"partial_rotary_factor": 0.5},
        keys={"expert_gating_func": 2},  # sigmoid
    ),
    Recipe(
        "gpt-oss", ("GptOssForCausalLM",), _GPT_OSS, keys={"expert_feed_forward_length": "intermediate_size"},
        checks=(must_be("swiglu_limit", 7.0), must_be("swiglu_alpha", 1.702)),
    ),
    Recipe("granite", ("GraniteForCausalLM",), _LLAMA, rope_tensors=True),
    Recipe(
        "granitemoe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _GRANITE_MOE, rope_tensors=True
    ),
    Recipe("olmo2", ("Olmo2ForCausalLM", "Olmo3ForCausalLM"), _OLMO2),
    Recipe(
        "phi3", ("Phi3ForCausalLM",), {**_NORMS, "attn_qkv": taken("self_attn.qkv_proj"), **_OUT, **_FUSED},
        rope_tensors=True,
    ),
    Recipe("qwen2", ("Qwen2ForCausalLM",), _QWEN),
    Recipe("qwen2moe", ("Qwen2MoeForCausalLM",), _QWEN2_MOE, checks=(must_be("norm_topk_prob", False), *_ALL_SPARSE)),
    Recipe("qwen3", ("Qwen3ForCausalLM",), {**_QWEN, **_HEAD_NORMS}),
    Recipe(
        "qwen3moe", ("Qwen3MoeForCausalLM",), {**_NORMS, **_QKV, **_OUT, **_HEAD_NORMS, **_QWEN2_MOE},
        checks=(must_be("norm_topk_prob", True), *_ALL_SPARSE),
    ),
    Recipe("smollm3", ("SmolLM3ForCausalLM",), _LLAMA, checks=(every_fourth_without_rope,)),
    Recipe(
        "stablelm", ("StableLmForCausalLM", "StableLMEpochForCausalLM"), _STABLELM, eps="layer_norm_eps",
        defaults={"partial_rotary_factor": 0.25}, checks=(must_be("use_parallel_residual", False),),
    ),
    Recipe("starcoder2", ("Starcoder2ForCausalLM",), _STARCODER2, eps="norm_epsilon"),
)  # fmt: skip

RECIPES: dict[str, Recipe] = {row.name: row for row in _ROWS}
BY_CLASS: dict[str, Recipe] = {name: row for row in _ROWS for name in row.classes}
