"""The architectures that can be converted, one row each: classes in transformers, the source of each GGUF tensor, and
the assumptions of the GGUF architecture, which config.json must meet."""

from __future__ import annotations

from typing import Any

from localllm.convert import (
    class_recipes,
    deepseek_recipes,
    diffusion_recipes,
    encoder_recipes,
    gemma_recipes,
    grok_recipes,
    grove_recipes,
    hybrid_recipes,
    kimi_recipes,
    mamba_recipes,
    newer_recipes,
    older_recipes,
    plamo_recipes,
    pocket_recipes,
    program_expert_recipes,
    program_newer_recipes,
    program_recipes,
    qwen4_recipes,
    recurrent_recipes,
    rerankers,
    rwkv_recipes,
    sparse_recipes,
    speech_recipes,
    stream_recipes,
    t5_recipes,
    vision_recipes,
)
from localllm.convert import sources as of
from localllm.convert.hf_config import HfConfig
from localllm.convert.latent import LATENT_KEYS, gating, one_mscale
from localllm.convert.recipe import (
    From,
    Recipe,
    by_name,
    every_fourth_without_rope,
    must_be,
    score_scale,
    slides_at_64_layers,
    taken,
)

_ALL_SPARSE = (must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", []))


def _growth_length(config: HfConfig) -> int | None:
    """Return the context length for llama.cpp's temperature scaling of queries; None without such scaling."""
    rope = config.below("rope_parameters", config.table("rope_parameters", "rope_scaling"))
    if not rope.real("llama_4_scaling_beta"):
        return None
    return rope.needed("original_max_position_embeddings")


def _softmax_as_is(config: HfConfig) -> str | None:
    if gating(config) == 2 or not config.flag("norm_topk_prob"):
        return None
    return "norm_topk_prob is true, which transformers does not compute"


def _one_table(config: HfConfig) -> str | None:
    """Require a tied output matrix."""
    if config.flag("tie_word_embeddings"):
        return None
    return "tie_word_embeddings is not true, and there is no other output matrix"


def _kinds_of_letters(config: HfConfig) -> dict[str, Any]:
    """Return layer_types from EXAONE's own format, a string of letters: L has a sliding window, G full attention."""
    letters, layers = config.get("sliding_window_pattern"), config.needed("num_hidden_layers")
    if not isinstance(letters, str) or config.get("layer_types") is not None:
        return {}
    if not letters or set(letters) - {"L", "G"}:
        raise config.error("sliding_window_pattern", letters, "a number, or the letters L and G")
    kinds = {"L": "sliding_attention", "G": "full_attention"}
    return {"layer_types": [kinds[letters[layer % len(letters)]] for layer in range(layers)]}


def _of_shared_experts(config: HfConfig) -> int:
    return config.needed("moe_intermediate_size") * (config.integer("moe_num_shared_experts") or 0)


def _experts_by_step(config: HfConfig) -> str | None:
    """Require Llama 4's experts in every n-th layer."""
    step, given = config.integer("interleave_moe_layer_step") or 1, config.get("moe_layers")
    if not given or given == list(range(step - 1, config.needed("num_hidden_layers"), step)):
        return None
    return f"moe_layers is not every layer of {step}; the GGUF architecture has it fixed so"


_ROWS = (
    Recipe(
        "llama", ("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
        {**of.LLAMA, **of.MIXTRAL}, rope_tensors=True,
    ),
    Recipe(
        "afmoe", ("AfmoeForCausalLM",), of.AFMOE,
        keys={"expert_gating_func": 2, "expert_weights_norm": True, "expert_shared_count": "num_shared_experts"},
        checks=(must_be("mup_enabled", True),),
    ),
    Recipe(
        "apertus", ("ApertusForCausalLM",), of.APERTUS, rope_tensors=True, defaults={"rope_theta": 12e6},
        numbers={f"xielu.{x}": f"mlp.act_fn.{x}" for x in ("alpha_p", "alpha_n", "beta", "eps")},
    ),
    Recipe("arcee", ("ArceeForCausalLM",), {**of.NORMS, **of.QKV_PERMUTED, **of.OUT, **of.UP_DOWN}, rope_tensors=True),
    Recipe(
        "bitnet", ("BitNetForCausalLM",), of.BITNET, checks=(must_be("attention_bias", False), _one_table),
        defaults={"rope_theta": 5e5},
    ),
    Recipe("cohere2", ("Cohere2ForCausalLM",), of.PARALLEL, eps="layer_norm_eps"),
    Recipe("command-r", ("CohereForCausalLM",), of.PARALLEL, eps="layer_norm_eps"),
    Recipe(
        "deepseek2",
        (
            "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM",
            "KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration",
        ),
        of.LATENT,
        keys=LATENT_KEYS, checks=(must_be("rope_interleave", True), one_mscale, _softmax_as_is),
        defaults={"kv_lora_rank": 512, "first_k_dense_replace": 1},
    ),
    Recipe(
        "dots1", ("Dots1ForCausalLM",), {**of.QWEN, **of.HEAD_NORMS, **of.CORRECTED}, keys={"expert_gating_func": 2},
    ),
    Recipe("ernie4_5", ("Ernie4_5ForCausalLM",), of.QWEN),
    Recipe(
        "ernie4_5-moe", ("Ernie4_5_MoeForCausalLM",), of.ERNIE_MOE,
        keys={
            "interleave_moe_layer_step": 1,
            "expert_shared_feed_forward_length": _of_shared_experts,
        },
        checks=(must_be("moe_layer_interval", 1),),
    ),
    Recipe("exaone4", ("Exaone4ForCausalLM",), of.EXAONE4, rope_tensors=True, checks=(slides_at_64_layers,)),
    Recipe(
        "exaone-moe", ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
        {**of.QWEN, **of.HEAD_NORMS, **of.CORRECTED}, keys={"expert_gating_func": 2}, words=_kinds_of_letters,
        defaults={"first_k_dense_replace": lambda config: config.integer("first_last_k_dense_replace")},
    ),
    Recipe("hunyuan-dense", ("HunYuanDenseV1ForCausalLM",), of.HUNYUAN),
    Recipe(
        "hunyuan-moe", ("HunYuanMoEV1ForCausalLM",), of.HUNYUAN_MOE,
        keys={
            "expert_feed_forward_length": "intermediate_size", "expert_shared_feed_forward_length": "intermediate_size",
        },
    ),
    Recipe(
        "jais2", ("Jais2ForCausalLM",), {**of.NORMS, **of.QKV, **of.OUT, **of.UP_DOWN}, eps="layer_norm_eps",
    ),
    Recipe(
        "llama4", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), of.LLAMA4, rope_tensors=True,
        keys={
            "feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "attention_chunk_size",
            "interleave_moe_layer_step": lambda config: config.integer("interleave_moe_layer_step") or 1,
        },
        checks=(every_fourth_without_rope, _experts_by_step, must_be("attn_scale", 0.1), must_be("floor_scale", 8192)),
    ),
    Recipe(
        "minimax-m2", ("MiniMaxM2ForCausalLM",), of.MINIMAX,
        keys={"expert_feed_forward_length": "intermediate_size", "expert_gating_func": 2},
    ),
    Recipe(
        "nemotron", ("NemotronForCausalLM",), {**of.NORMS, **of.QKV, **of.OUT, **of.UP_DOWN}, norm_offset=1.0,
        eps="norm_eps", defaults={"partial_rotary_factor": 0.5},
    ),
    Recipe(
        "olmo", ("OlmoForCausalLM", "OLMoForCausalLM"), of.LLAMA, eps="layer_norm_eps",
        defaults={"layer_norm_eps": 1e-5},
    ),
    Recipe(
        "olmoe", ("OlmoeForCausalLM",), {**of.NORMS, **of.QKV, **of.OUT, **of.HEAD_NORMS, **of.ROUTED},
        checks=(must_be("norm_topk_prob", False), must_be("clip_qkv", 0)),
    ),
    Recipe(
        "phi2", ("PhiForCausalLM",), of.PHI2, eps="layer_norm_eps", defaults={"partial_rotary_factor": 0.5},
        top={"output_norm": From(("model.final_layernorm",))}, checks=(must_be("qk_layernorm", False),),
    ),
    Recipe("seed_oss", ("SeedOssForCausalLM",), {
        "attn_norm": taken("input_layernorm"), "post_attention_norm": taken("post_attention_layernorm"),
        **of.QKV, **of.OUT, **of.GATED,
    }),
    Recipe(
        "mistral4", ("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"), of.LATENT,
        keys={
            **LATENT_KEYS, "expert_gating_func": 1, "expert_group_count": None, "expert_group_used_count": None,
            "attention.temperature_length": _growth_length,
        },
        checks=(must_be("rope_interleave", True), must_be("n_group", 1), one_mscale),
        when=lambda config: config.get("model_type") == "mistral4", defaults={"norm_topk_prob": True},
    ),
    Recipe("mistral3", ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"), of.LLAMA, rope_tensors=True),
    Recipe("gemma", ("GemmaForCausalLM",), of.QWEN, norm_offset=1.0),
    Recipe(
        "gemma2", ("Gemma2ForCausalLM",), {**of.FOUR_NORMS, **of.QKV, **of.OUT, **of.GATED}, norm_offset=1.0,
        checks=(score_scale(46),),
    ),
    Recipe(
        "gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), of.GEMMA3, norm_offset=1.0,
        defaults=gemma_recipes.GEMMA3_DEFAULTS, checks=(score_scale(62), must_be("use_bidirectional_attention", False)),
    ),
    Recipe("glm4", ("Glm4ForCausalLM",), of.GLM4, defaults={"partial_rotary_factor": 0.5}),
    Recipe(
        "gpt2", ("GPT2LMHeadModel",), of.GPT2, eps="layer_norm_epsilon",
        defaults={
            "num_hidden_layers": by_name("n_layer"), "hidden_size": by_name("n_embd"),
            "num_attention_heads": by_name("n_head"), "max_position_embeddings": by_name("n_positions", "n_ctx"),
            "layer_norm_epsilon": 1e-5,
        },
        keys={
            "attention.head_count_kv": "n_head", "rope.dimension_count": None, "rope.freq_base": None,
            "feed_forward_length": lambda config: config.integer("n_inner") or 4 * config.needed("n_embd"),
        },
        top={
            "token_embd": From(("model.wte",)), "position_embd": From(("model.wpe",)),
            "output_norm": From(("model.ln_f",)),
        },
        checks=(
            must_be("activation_function", "gelu_new", "gelu", "gelu_pytorch_tanh"),
            must_be("scale_attn_weights", True), must_be("scale_attn_by_inverse_layer_idx", False),
        ),
    ),
    Recipe(
        "glm4moe", ("Glm4MoeForCausalLM",), of.GLM4_MOE, defaults={"partial_rotary_factor": 0.5},
        keys={"expert_gating_func": 2},  # sigmoid
    ),
    Recipe(
        "gpt-oss", ("GptOssForCausalLM",), of.GPT_OSS, keys={"expert_feed_forward_length": "intermediate_size"},
        checks=(must_be("swiglu_limit", 7.0), must_be("swiglu_alpha", 1.702)),
    ),
    Recipe("granite", ("GraniteForCausalLM",), of.LLAMA, rope_tensors=True),
    Recipe(
        "granitemoe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), of.GRANITE_MOE, rope_tensors=True
    ),
    Recipe("olmo2", ("Olmo2ForCausalLM", "Olmo3ForCausalLM"), of.OLMO2),
    Recipe(
        "phi3", ("Phi3ForCausalLM",), {**of.NORMS, "attn_qkv": taken("self_attn.qkv_proj"), **of.OUT, **of.FUSED},
        rope_tensors=True,
    ),
    Recipe(
        "phimoe", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), {**of.NORMS, **of.QKV, **of.OUT, **of.MIXTRAL},
        rope_tensors=True, checks=(must_be("router_jitter_noise", 0.01), must_be("num_experts_per_tok", 2)),
    ),
    Recipe("qwen2", ("Qwen2ForCausalLM",), of.QWEN),
    Recipe("qwen2moe", ("Qwen2MoeForCausalLM",), of.QWEN2_MOE, checks=(must_be("norm_topk_prob", False), *_ALL_SPARSE)),
    Recipe("qwen3", ("Qwen3ForCausalLM",), {**of.QWEN, **of.HEAD_NORMS}),
    Recipe(
        "qwen3moe", ("Qwen3MoeForCausalLM",), {**of.NORMS, **of.QKV, **of.OUT, **of.HEAD_NORMS, **of.QWEN2_MOE},
        checks=(must_be("norm_topk_prob", True), *_ALL_SPARSE),
    ),
    Recipe("smollm3", ("SmolLM3ForCausalLM",), of.LLAMA, checks=(every_fourth_without_rope,)),
    Recipe(
        "stablelm", ("StableLmForCausalLM", "StableLMEpochForCausalLM", "LlavaStableLMEpochForCausalLM"), of.STABLELM,
        eps="layer_norm_eps", defaults={"partial_rotary_factor": 0.25},
        checks=(must_be("use_parallel_residual", False),),
    ),
    Recipe("starcoder2", ("Starcoder2ForCausalLM",), of.STARCODER2, eps="norm_epsilon"),
)  # fmt: skip

_ALL = (
    *_ROWS, *recurrent_recipes.ROWS, *mamba_recipes.ROWS, *gemma_recipes.ROWS, *encoder_recipes.ROWS,
    *newer_recipes.ROWS, *older_recipes.ROWS, *rerankers.ROWS, *vision_recipes.ROWS,
    *hybrid_recipes.ROWS, *t5_recipes.ROWS, *sparse_recipes.ROWS, *stream_recipes.ROWS,
    *diffusion_recipes.ROWS, *rwkv_recipes.ROWS, *qwen4_recipes.ROWS, *deepseek_recipes.ROWS, *kimi_recipes.ROWS,
    *grove_recipes.ROWS, *speech_recipes.ROWS, *program_recipes.ROWS, *program_expert_recipes.ROWS,
    *program_newer_recipes.ROWS, *plamo_recipes.ROWS, *pocket_recipes.ROWS,
    *grok_recipes.ROWS, *class_recipes.ROWS,
)  # fmt: skip

RECIPES: dict[str, Recipe] = {row.name: row for row in reversed(_ALL)}
BY_CLASS: dict[str, tuple[Recipe, ...]] = {
    name: tuple(sorted([row for row in _ALL if name in row.classes], key=lambda row: row.when is None))
    for of_class in _ALL
    for name in of_class.classes
}
