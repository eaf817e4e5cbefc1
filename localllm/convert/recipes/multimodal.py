"""The recipes of the text models in multimodal models. Other recipes convert the same architectures from text-only
checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert.changes import PERMUTED
from localllm.convert.hf_config import HfConfig, Reader
from localllm.convert.recipe import Check, Keys, Recipe, real
from localllm.convert.recipes.gated_delta import QWEN35_ROW
from localllm.convert.recipes.shared import NORMED_SPARSE, queries_and_keys
from localllm.convert.recipes.vision import SECTIONED

# transformers' defaults for missing keys, by `model_type` of the text model.
_SMALL: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}
_ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_SMALL, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {
        **_SMALL,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": {**_SMALL, "intermediate_size": 22016, "max_position_embeddings": 32768},
}


def _assumed(*models: str) -> dict[str, Any]:
    """Return transformers' defaults for text models by type. Without a model_type, the first type applies."""

    def value(name: str) -> Any:
        return lambda config: _ASSUMED.get(str(config.get("model_type")), _ASSUMED[models[0]]).get(name)

    return {name: value(name) for name in {name for model in models for name in _ASSUMED[model]}}


def _text_is(*models: str) -> Check:
    """Require that the type of the text model is in this list."""

    def check(config: HfConfig) -> str | None:
        inner = config.table("text_config", "llm_config").get("model_type", models[0])
        return None if inner in models else f"model_type of the text model is {inner}; supported: {', '.join(models)}"

    return check


def _inner_is(model: str) -> Reader[bool]:
    return lambda config: config.table("text_config", "llm_config").get("model_type") == model


def _halves(count: int) -> NDArray[np.int64]:
    """Return the order that moves 2i to the first half and 2i + 1 to the second half."""
    return np.arange(count).reshape(-1, 2).T.reshape(-1)


# -- text models -------------------------------------------------------------------------------------------------------


# -- text parts of multimodal models -----------------------------------------------------------------------------------


def _has_sections(config: HfConfig) -> bool:
    return config.table("rope_parameters", "rope_scaling").get("mrope_section") is not None


_NO_DEEPSTACK: Keys = {**SECTIONED, "n_deepstack_layers": 0}
_OCR = ("model.sam_model.", "model.vision_model.", "model.projector.", "model.image_newline", "model.view_seperator")
_GLM = ("Glm4vForConditionalGeneration", "GlmOcrForConditionalGeneration")
_INTERN = ("InternVLForConditionalGeneration", "InternVLChatModel")
_INTERN_OTHERS = ("mlp1.",)
ROWS = (
    Recipe(
        "llama", ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"), changes=PERMUTED,
        rope_tensors=True, checks=(_text_is("llama"),), defaults=_assumed("llama"), others=("model.connector.",),
    ),
    Recipe("qwen3", _INTERN, when=_inner_is("qwen3"), others=_INTERN_OTHERS),
    Recipe("qwen2", _INTERN, checks=(_text_is("qwen2", "qwen3"),), defaults=_assumed("qwen2"), others=_INTERN_OTHERS),
    Recipe(
        "qwen3", ("LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration"),
        checks=(_text_is("qwen3"),),
    ),
    Recipe("glm4", _GLM, changes=queries_and_keys(_halves), keys=SECTIONED, when=_has_sections),
    Recipe("glm4", _GLM),
    Recipe("glm4moe", ("Glm4vMoeForConditionalGeneration",), keys=SECTIONED, defaults={"partial_rotary_factor": 0.5}),
    Recipe(
        "deepseek2-ocr", ("DeepseekOCRForCausalLM", "UnlimitedOCRForCausalLM"),
        keys={
            "expert_weights_scale": real("routed_scaling_factor"), "expert_gating_func": 1, "rope.dimension_count": 0,
        },
        fixed={
            "use_mla": False, "norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy",
            "moe_layer_freq": 1, "rope_scaling": None, "rope_theta": 10000.0,
        },
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "routed_scaling_factor": 1.0}, others=_OCR,
    ),
    Recipe("qwen35", ("MiniCPMV4_6ForConditionalGeneration",), **QWEN35_ROW, others=("model.merger.",)),
    Recipe(
        "granite", ("GraniteSpeechForConditionalGeneration", "GraniteSpeechPlusForConditionalGeneration"),
        changes=PERMUTED, rope_tensors=True, checks=(_text_is("granite"),), others=("encoder.", "projector."),
    ),
    Recipe(
        "llama", ("LlavaForConditionalGeneration", "VoxtralForConditionalGeneration"), changes=PERMUTED,
        rope_tensors=True, checks=(_text_is("llama", "mistral"),), defaults=_assumed("llama", "mistral"),
    ),
    Recipe(
        "llama", ("JanusForConditionalGeneration",), changes=PERMUTED, rope_tensors=True, checks=(_text_is("llama"),),
        others=("model.vqmodel.", "model.generation_"), defaults=_assumed("llama"),
    ),
    Recipe("llama", ("Sarashina2VisionForCausalLM",), changes=PERMUTED, rope_tensors=True, inside="llm."),
    Recipe(
        "qwen2", ("Qwen2AudioForConditionalGeneration", "AudioFlamingo3ForConditionalGeneration"),
        checks=(_text_is("qwen2"),), defaults=_assumed("qwen2"),
    ),
    Recipe("qwen2vl", ("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"), keys=SECTIONED, inside="thinker."),
    Recipe("qwen3vl", ("Qwen3ASRForConditionalGeneration",), keys=_NO_DEEPSTACK, inside="thinker."),
    Recipe(
        "qwen3vlmoe", ("Qwen3OmniMoeForConditionalGeneration",), keys=_NO_DEEPSTACK, fixed=NORMED_SPARSE,
        inside="thinker.",
    ),
)  # fmt: skip
