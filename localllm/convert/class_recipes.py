"""Recipes for further classes: relatives of supported models, base models, and text parts of multimodal models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert import sources as of
from localllm.convert.hf_config import HfConfig
from localllm.convert.latent import LATENT_KEYS, one_mscale
from localllm.convert.mamba_recipes import mamba2, product, steps_unbounded
from localllm.convert.recipe import (
    Change,
    Check,
    From,
    Key,
    Layer,
    Parts,
    Recipe,
    Sizes,
    height,
    must_be,
    numbered,
    of_groups,
    slides_at_64_layers,
    take_half,
    taken,
)
from localllm.convert.recurrent_recipes import DELTA_KEYS, QWEN35, kv_heads, sections
from localllm.convert.rope_scaling import rope_of
from localllm.convert.tensor import LazyTensor, picked
from localllm.convert.vision_recipes import SECTIONED

# The defaults of transformers for missing keys, by `model_type` of the text model.
_SMALL: Mapping[str, Any] = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
_ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_SMALL, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {
        **_SMALL, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
    "qwen2": {**_SMALL, "intermediate_size": 22016, "max_position_embeddings": 32768},
}  # fmt: skip


def _assumed(*models: str) -> dict[str, Any]:
    """Return transformers' defaults for text models by type. Without a model_type, the first type applies."""

    def value(name: str) -> Any:
        return lambda config: _ASSUMED.get(str(config.get("model_type")), _ASSUMED[models[0]]).get(name)

    return {name: value(name) for name in {name for model in models for name in _ASSUMED[model]}}


def _text_is(*models: str) -> Check:
    """Require that the text model's type is in this list."""

    def check(config: HfConfig) -> str | None:
        inner = config.table("text_config", "llm_config").get("model_type", models[0])
        return None if inner in models else f"model_type of the text model is {inner}; supported: {', '.join(models)}"

    return check


def _inner_is(model: str) -> Callable[[HfConfig], bool]:
    return lambda config: config.table("text_config", "llm_config").get("model_type") == model


def _rotated(config: HfConfig) -> int:
    """Return the number of rotated values per head."""
    width = config.integer("head_dim") or config.needed("hidden_size") // config.needed("num_attention_heads")
    count: int = rope_of(config, width, True).keys["rope.dimension_count"]
    return count


def _reordered(heads: Callable[[Sizes], int], ranks: Callable[[int], NDArray[np.int64]]) -> Change:
    """Reorder the rotated rows of each head, which come first. `ranks` gives their new order."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        rows, count, rotated = height(parts[0]), heads(sizes), _rotated(sizes.config)
        index = numbered(parts[0], rows, count, rows // count)
        index[:, :rotated] = index[:, ranks(rotated)]
        return picked(parts[0], index.reshape(-1), rows)

    return change


def _neighbours(count: int) -> NDArray[np.int64]:
    """Return the order that places i and i + count/2 next to each other."""
    return np.arange(count).reshape(2, -1).T.reshape(-1)


def _halves(count: int) -> NDArray[np.int64]:
    """Return the order that moves 2i to the first half and 2i + 1 to the second."""
    return np.arange(count).reshape(-1, 2).T.reshape(-1)


def _queries_and_keys(ranks: Callable[[int], NDArray[np.int64]]) -> Layer:
    return {
        "attn_q": taken("self_attn.q_proj", _reordered(lambda sizes: sizes.heads, ranks)),
        "attn_k": taken("self_attn.k_proj", _reordered(lambda sizes: sizes.kv_heads, ranks)),
    }


# -- text models -------------------------------------------------------------------------------------------------------


def _attends(config: HfConfig) -> NDArray[np.bool_]:
    """Return which layers of Bamba have attention."""
    layers, found = config.needed("num_hidden_layers"), config.get("attn_layer_indices") or []
    if not isinstance(found, list) or not all(type(n) is int and 0 <= n < layers for n in found):
        raise config.error("attn_layer_indices", found, f"layers below {layers}")
    return np.isin(np.arange(layers), found)


_BAMBA: Layer = {
    "attn_norm": taken("input_layernorm"),
    "ffn_norm": taken("pre_ff_layernorm"),
    **of.QKV,
    **_queries_and_keys(_neighbours),
    **of.OUT,
    **mamba2("mamba", product("mamba_expand", "hidden_size", "mamba_n_groups")),
    **{f"ffn_{x}": taken(f"feed_forward.{x}_proj") for x in ("gate", "up", "down")},
}


def _fused(config: HfConfig) -> tuple[int, tuple[int, ...]]:
    """Return one group and its rows of queries, keys and values."""
    heads = config.needed("num_attention_heads")
    width = config.integer("head_dim") or config.needed("hidden_size") // heads
    few = config.integer("num_key_value_heads") or heads
    return 1, (heads * width, few * width, few * width)


_ERNIE: Layer = {
    **of.QWEN,
    **{
        f"attn_{x}": (From((f"self_attn.{x}_proj",)), From(("self_attn.qkv_proj",), of_groups(_fused, part)))
        for part, x in enumerate("qkv")
    },
    **{
        f"ffn_{x}": (From((f"mlp.{x}_proj",)), From(("mlp.up_gate_proj",), take_half(part)))
        for part, x in enumerate(("gate", "up"))
    },
}
_KORMO: Layer = {
    **of.QWEN, "attn_norm": taken("pre_attention_layernorm"), "ffn_norm": taken("pre_mlp_layernorm"),
}  # fmt: skip


def _every_layer(config: HfConfig) -> int:
    """Return the number of leading dense layers: all, because Youtu has no experts."""
    return config.needed("num_hidden_layers")


_TEXT_ROWS = (
    Recipe("llama", ("IQuestCoderForCausalLM", "InternLM3ForCausalLM", "LlamaModel"), of.LLAMA, rope_tensors=True),
    Recipe(
        "granitehybrid", ("BambaForCausalLM",), _BAMBA, top={"output_norm": From(("model.final_layernorm",))},
        keys={
            "attention.head_count_kv": kv_heads(_attends), "rope.scaling.finetuned": True,
            "ssm.conv_kernel": "mamba_d_conv", "ssm.inner_size": product("mamba_expand", "hidden_size"),
            "ssm.state_size": "mamba_d_state", "ssm.time_step_rank": "mamba_n_heads",
            "ssm.group_count": "mamba_n_groups",
        },
        checks=(steps_unbounded,), defaults={"partial_rotary_factor": 0.5, "mamba_d_conv": 4, "mamba_n_groups": 1},
    ),
    Recipe("ernie4_5", ("Ernie4_5_ForCausalLM",), _ERNIE, checks=(must_be("use_bias", False),)),
    Recipe("qwen2", ("KORMoForCausalLM",), _KORMO),
    Recipe(
        "deepseek2", ("YoutuForCausalLM", "YoutuVLForConditionalGeneration"), of.LATENT,
        keys={
            **LATENT_KEYS, "leading_dense_block_count": _every_layer, "expert_shared_count": 0,
            "expert_feed_forward_length": "intermediate_size", "expert_gating_func": None, "expert_used_count": None,
            "expert_group_count": None, "expert_group_used_count": None,
        },
        checks=(must_be("rope_interleave", True), one_mscale, must_be("n_routed_experts", 0)),
        parts=Parts(others=("siglip2.", "merger.")),
    ),
    Recipe(
        "glm4moe", ("SolarOpenForCausalLM",), of.GLM4_MOE,
        keys={"expert_gating_func": 2, "leading_dense_block_count": 0},
    ),
    Recipe(
        "llama-embed", ("LlamaBidirectionalModel",), of.LLAMA, rope_tensors=True, keys={"attention.causal": False},
    ),
    Recipe("qwen2", ("Qwen2Model",), of.QWEN),
    Recipe("qwen3", ("Qwen3Model",), {**of.QWEN, **of.HEAD_NORMS}),
)  # fmt: skip

# -- text parts of multimodal models -----------------------------------------------------------------------------------


def _has_sections(config: HfConfig) -> bool:
    return config.table("rope_parameters", "rope_scaling").get("mrope_section") is not None


_QWEN3: Layer = {**of.QWEN, **of.HEAD_NORMS}
_NO_DEEPSTACK: dict[str, Key] = {**SECTIONED, "n_deepstack_layers": 0}
_OCR = ("model.sam_model.", "model.vision_model.", "model.projector.", "model.image_newline", "model.view_seperator")
_GLM = ("Glm4vForConditionalGeneration", "GlmOcrForConditionalGeneration")
_INTERN = ("InternVLForConditionalGeneration", "InternVLChatModel")
_INTERN_PARTS = Parts(others=("mlp1.",))
_INNER_ROWS = (
    Recipe(
        "llama", ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"), of.LLAMA, rope_tensors=True,
        checks=(_text_is("llama"),), defaults=_assumed("llama"), parts=Parts(others=("model.connector.",)),
    ),
    Recipe("qwen3", _INTERN, _QWEN3, when=_inner_is("qwen3"), parts=_INTERN_PARTS),
    Recipe(
        "qwen2", _INTERN, of.QWEN, checks=(_text_is("qwen2", "qwen3"),), defaults=_assumed("qwen2"),
        parts=_INTERN_PARTS,
    ),
    Recipe(
        "qwen3", ("LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration"), _QWEN3,
        checks=(_text_is("qwen3"),),
    ),
    Recipe(
        "glm4", _GLM, {**of.GLM4, **_queries_and_keys(_halves)}, keys=SECTIONED, when=_has_sections,
    ),
    Recipe("glm4", _GLM, of.GLM4),
    Recipe(
        "glm4moe", ("Glm4vMoeForConditionalGeneration",), of.GLM4_MOE, keys={**SECTIONED, "expert_gating_func": 2},
        defaults={"partial_rotary_factor": 0.5},
    ),
    Recipe(
        "deepseek2-ocr", ("DeepseekOCRForCausalLM", "UnlimitedOCRForCausalLM"),
        {**of.QWEN, **of.ROUTED, **of.SHARED},
        keys={
            "expert_weights_scale": lambda config: config.real("routed_scaling_factor"), "expert_gating_func": 1,
            "rope.dimension_count": 0,
        },
        checks=(
            must_be("use_mla", False), must_be("norm_topk_prob", False), must_be("scoring_func", "softmax"),
            must_be("topk_method", "greedy"), must_be("moe_layer_freq", 1), must_be("rope_scaling", None),
            must_be("rope_theta", 10000.0),
        ),
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "routed_scaling_factor": 1.0},
        parts=Parts(others=_OCR),
    ),
    Recipe(
        "exaone4", ("Exaone4_5_ForConditionalGeneration",), of.EXAONE4, rope_tensors=True,
        checks=(slides_at_64_layers,),
    ),
    Recipe(
        "qwen35", ("MiniCPMV4_6ForConditionalGeneration",), {**QWEN35, **of.GATED}, norm_offset=1.0,
        plain_norms=("ssm_norm",), defaults={"partial_rotary_factor": 0.25},
        keys={**DELTA_KEYS, "rope.dimension_sections": sections}, parts=Parts(others=("model.merger.",)),
    ),
    Recipe(
        "granite", ("GraniteSpeechForConditionalGeneration", "GraniteSpeechPlusForConditionalGeneration"), of.LLAMA,
        rope_tensors=True, checks=(_text_is("granite"),), parts=Parts(others=("encoder.", "projector.")),
    ),
    Recipe(
        "llama", ("LlavaForConditionalGeneration", "VoxtralForConditionalGeneration"), of.LLAMA, rope_tensors=True,
        checks=(_text_is("llama", "mistral"),), defaults=_assumed("llama", "mistral"),
    ),
    Recipe(
        "llama", ("JanusForConditionalGeneration",), of.LLAMA, rope_tensors=True, checks=(_text_is("llama"),),
        parts=Parts(others=("model.vqmodel.", "model.generation_")), defaults=_assumed("llama"),
    ),
    Recipe("llama", ("Sarashina2VisionForCausalLM",), of.LLAMA, rope_tensors=True, parts=Parts(inside="llm.")),
    Recipe(
        "phi3", ("Phi4ForCausalLMV",), {**of.NORMS, "attn_qkv": taken("self_attn.qkv_proj"), **of.OUT, **of.FUSED},
        rope_tensors=True,
    ),
    Recipe(
        "qwen2", ("Qwen2AudioForConditionalGeneration", "AudioFlamingo3ForConditionalGeneration"), of.QWEN,
        checks=(_text_is("qwen2"),), defaults=_assumed("qwen2"),
    ),
    Recipe("qwen2", ("DotsOCRForCausalLM",), of.QWEN),
    Recipe(
        "qwen2vl", ("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"), of.QWEN, keys=SECTIONED,
        parts=Parts(inside="thinker."),
    ),
    Recipe("qwen3", ("StepVLForConditionalGeneration",), _QWEN3),
    Recipe(
        "qwen3vl", ("Qwen3ASRForConditionalGeneration",), _QWEN3, keys=_NO_DEEPSTACK, parts=Parts(inside="thinker."),
    ),
    Recipe(
        "qwen3vlmoe", ("Qwen3OmniMoeForConditionalGeneration",), {**_QWEN3, **of.ROUTED}, keys=_NO_DEEPSTACK,
        checks=(must_be("norm_topk_prob", True), must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", [])),
        parts=Parts(inside="thinker."),
    ),
)  # fmt: skip
ROWS = (*_TEXT_ROWS, *_INNER_ROWS)
