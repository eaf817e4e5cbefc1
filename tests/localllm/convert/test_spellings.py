"""Checkpoints that say the same in other words become the same file: other classes, config keys and tensor names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import open_checkpoint
from tests.localllm.convert.checkpoints import SPECS, tensors_of, write
from tests.localllm.convert.support import values

Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors], Tensors]


def renamed(*pairs: tuple[str, str]) -> Change:
    """Replace patterns in the names, one after another. Each must occur."""

    def change(tensors: Tensors) -> Tensors:
        for old, new in pairs:
            assert any(re.search(old, name) for name in tensors), old
            tensors = {re.sub(old, new, name): x for name, x in tensors.items()}
        return tensors

    return change


def more(**shapes: tuple[int, ...]) -> Change:
    """Add tensors that the converter ignores; `__` in a name is a dot."""
    return lambda tensors: (
        tensors | {name.replace("__", "."): np.ones(shape, np.float32) for name, shape in shapes.items()}
    )


def _stacked_deepseek4(tensors: Tensors) -> Tensors:
    """Give the tensors transformers' internal names. transformers itself saves the publisher's."""
    compressor = {"wkv": "kv_proj", "wgate": "gate_proj", "ape": "position_bias", "norm": "kv_norm"}
    names = {
        "^head": "lm_head", ".attn_norm.": ".input_layernorm.", ".ffn_norm.": ".post_attention_layernorm.",
        **{f".attn.indexer.compressor.{x}": f".self_attn.compressor.indexer.{y}" for x, y in compressor.items()},
        **{f".attn.compressor.{x}": f".self_attn.compressor.{y}" for x, y in compressor.items()},
        ".attn.indexer.wq_b": ".self_attn.compressor.indexer.q_b_proj",
        ".attn.indexer.weights_proj": ".self_attn.compressor.indexer.scorer.weights_proj",
        ".attn.attn_sink": ".self_attn.sinks", ".attn.norm": ".self_attn.kv_norm",
        ".attn.q_norm": ".self_attn.q_a_norm", ".attn.wkv": ".self_attn.kv_proj",
        **{f".attn.w{x}": f".self_attn.{x}_proj" for x in ("q_a", "q_b", "o_a", "o_b")},
        **{f".hc_{x}_{part}": f".{x}_hc.{part}" for x in ("attn", "ffn") for part in ("fn", "base", "scale")},
        **{f".shared_experts.w{x}": f".shared_experts.{y}_proj" for x, y in ((1, "gate"), (2, "down"), (3, "up"))},
        ".ffn.gate.bias": ".mlp.gate.e_score_correction_bias", ".ffn.": ".mlp.",
    }  # fmt: skip
    tensors = renamed(*((old.replace(".", r"\."), new) for old, new in names.items()))(tensors)
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        w1, w2, w3 = (np.stack([tensors.pop(f"{prefix}{i}.{w}.weight") for i in range(4)]) for w in ("w1", "w2", "w3"))
        tensors |= {f"{prefix}gate_up_proj": np.concatenate([w1, w3], axis=1), f"{prefix}down_proj": w2}
    return tensors


def _split_hrm(tensors: Tensors) -> Tensors:
    found = {}
    for name, x in tensors.items():
        base = name.rpartition(".")[0].rpartition(".")[0]
        if name.endswith("gqkv_proj.weight"):
            of = zip(("gate", "q", "k", "v"), np.split(x, 4), strict=True)
            found |= {f"{base.removesuffix('attn')}self_attn.{y}_proj.weight": part for y, part in of}
        elif name.endswith("gate_up_proj.weight"):
            of = zip(("gate", "up"), np.split(x, 2), strict=True)
            found |= {f"{base}.{y}_proj.weight": part for y, part in of}
        else:
            found[name.replace(".attn.", ".self_attn.")] = x
    return found


def _transposed_experts(tensors: Tensors) -> Tensors:
    return {
        name: np.ascontiguousarray(x.transpose(0, 2, 1)) if ".experts." in name else x for name, x in tensors.items()
    }


def _lerps_in_one(tensors: Tensors) -> Tensors:
    """Store the six token-shift weights of a layer as one tensor, in the order of the GGUF."""
    for layer in range(3):
        parts = [tensors.pop(f"model.layers.{layer}.attn.x_{x}") for x in "rwkvag"]
        tensors[f"model.layers.{layer}.attn.x_x"] = np.concatenate(parts).reshape(6, 1, -1)
    return tensors


def _values_of_layer_0(tensors: Tensors) -> Tensors:
    """Add value-residual tensors to layer 0, which has no use for them; the GGUF has placeholders, as in llama.cpp."""
    added = {name.replace(".1.", ".0."): x for name, x in tensors.items() if ".1.attn.v_lora" in name}
    assert len(added) == 3
    return tensors | added


_NONE = dict.fromkeys
_LINEAR = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
_INTERN = "InternVLForConditionalGeneration"
_ASR = SPECS["Qwen3ASRForConditionalGeneration"]["config"]
_FACTORS = [f"{x}_{y}_factor" for x in ("full_attn", "linear_attn", "mlp") for y in ("alpha", "beta")]
_XDROPE = {"type": "xdrope", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0, "xdrope_section": [2, 2, 2, 2]}
_KINDS = _NONE(("layer_types", "mlp_layer_types"))

# Case: model, config.json, and change of the tensors.
SAME: dict[str, tuple[str, dict[str, Any], Change]] = {
    # Other classes
    **{name: (of, {"architectures": [name]}, dict) for name, of in {
        "LFM2ForCausalLM": "lfm2", "KimiLinearModel": "kimi-linear", "OLMoForCausalLM": "olmo",
        "LlavaStableLMEpochForCausalLM": "stablelm", "Qwen2VLModel": "qwen2vl", "UMT5Model": "t5-umt5",
        "LightOnOCRForConditionalGeneration": "LightOnOcrForConditionalGeneration",
        "Qwen2_5OmniForConditionalGeneration": "Qwen2_5OmniModel", "JinaEmbeddingsV5Model": "eurobert",
        "GraniteSpeechPlusForConditionalGeneration": "GraniteSpeechForConditionalGeneration",
        "SmolVLMForConditionalGeneration": "Idefics3ForConditionalGeneration", "IQuestCoderForCausalLM": "llama",
        "InternLM3ForCausalLM": "llama-bias",
    }.items()},
    "ExaoneMoEForCausalLM": (
        "exaone-moe",
        {**_KINDS, "architectures": ["ExaoneMoEForCausalLM"], "sliding_window_pattern": "LLLG",
         "first_k_dense_replace": None, "first_last_k_dense_replace": 1},
        dict,
    ),
    "KimiVLForConditionalGeneration": (
        "deepseek2-v3", {"architectures": ["KimiVLForConditionalGeneration"]},
        renamed(("^(lm_head|model)", r"language_model.\1")),
    ),
    "InternVLChatModel": (
        _INTERN,
        {"architectures": ["InternVLChatModel"], "text_config": None,
         "llm_config": SPECS[_INTERN]["config"]["text_config"]},
        renamed(("^vision_tower", "vision_model"), ("^multi_modal_projector", "mlp1")),
    ),
    # The publishers' configuration
    "kimi-linear": (
        "kimi-linear",
        {**_NONE(_LINEAR), "architectures": ["KimiLinearForCausalLM"], "first_k_dense_replace": 1, "head_dim": 72,
         "moe_router_activation_func": "sigmoid",
         "linear_attn_config": {"full_attn_layers": [5], "kda_layers": [1, 2, 3, 4], "head_dim": 16, "num_heads": 4,
                                "short_conv_kernel_size": 4}},
        renamed((r"model\.layers\.0\.block_sparse_moe\.", "model.layers.0.mlp.")),
    ),
    "bailingmoe3": (
        "bailingmoe3",
        {**_NONE(_LINEAR), "architectures": ["BailingMoeV3ForCausalLM"], "moe_renormalize": None,
         "norm_topk_prob": True, "model_max_length": None, "max_position_embeddings": 256, "no_kda_lora": True,
         "gated_attention_proj_granularity_type": "head_wise", "moe_shared_expert_intermediate_size": 24},
        dict,
    ),
    "minimax-01": (
        "minimax-01",
        {**_NONE(_FACTORS), "architectures": ["MiniMaxText01ForCausalLM"], "layer_types": None,
         "attn_type_list": [1, 0, 1, 0], "postnorm": True, "rotary_dim": 8,
         **{f"layernorm_{x}_alpha": 3.5 for x in ("full_attention", "linear_attention", "mlp")},
         **{f"layernorm_{x}_beta": 1 for x in ("full_attention", "linear_attention", "mlp")}},
        # transformers saves decays, which the converter computes from the layer index
        more(model__layers__1__self_attn__slope_rate=(4, 1, 1), model__layers__1__self_attn__diagonal_decay=(1, 4, 9)),
    ),
    "dots3note": (
        "dots3note",
        {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2, "mlp_layer_types": None,
         "per_layer_config": None, "first_k_dense_replace": 1, "rope_parameters": None, "rope_theta": 80000000.0,
         "swa_rope_theta": 50000.0, "sliding_window": None, "sliding_window_size": 8, "swa_num_attention_heads": 2,
         "swa_q_lora_rank": 24, "swa_kv_lora_rank": 20, "swa_qk_nope_head_dim": 14, "swa_qk_rope_head_dim": 8,
         "swa_v_head_dim": 10, "shared_experts_intermediate_size": None, "moe_shared_expert_intermediate_size": 32,
         "scoring_func": "sigmoid", "topk_method": "noaux_tc", "apply_mla_qkv_lora_rescale": True, "use_dsa": True,
         "attention_gate_type": "headwise"},
        dict,
    ),
    "glm-dsa": ("glm-dsa", {**_KINDS, "indexer_types": None, "index_topk_pattern": "FSFS"}, dict),
    "glm-dsa by a rule": (
        "glm-dsa", {**_KINDS, "indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1}, dict,
    ),
    "glm5-next": (
        "glm5-next",
        {**_NONE(_LINEAR), "first_k_dense_replace": 1, "mla_use_nope": True, "mhc": True, "linear_lower_bound": None,
         "scoring_func": "sigmoid", "indexer_types": None, "index_topk_pattern": "FFSFS",
         "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention", "full_attention"],
         "linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4,
                                "gate_lower_bound": -5.0, "safe_gate": True}},
        dict,
    ),
    "hy_v4": (
        "hy_v4", {**_KINDS, "enable_lm_head_fp32": True},
        lambda tensors: more(model__mtp_layers__0__norm__weight=(32,))(renamed(
            (r"(mlp|experts)\.linear_gate", r"\1.gate_proj"), (r"model\.hc_pre\.hc_head\.", "model.hc_head."),
            (r"hc_pre\.hc_(attn|mlp)_layer\.hc_", r"hc_\1_layer.hc_pre.hc_"),
        )(tensors)),
    ),
    "deepseek4": (
        "deepseek4",
        {**_KINDS, "compress_rates": None, "partial_rotary_factor": None, "compress_ratios": [0, 4, 128, 4, 0],
         "num_hash_layers": 1, "qk_rope_head_dim": 8, "rope_parameters": None, "rope_theta": 10000,
         "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64},
         "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc"},
        _stacked_deepseek4,
    ),
    "minimax-m3": (
        "minimax-m3",
        {**_KINDS, **_NONE(f"index_{x}" for x in ("n_heads", "head_dim", "block_size", "topk_blocks", "local_blocks")),
         "moe_layer_freq": [0, 1, 1], "hidden_act": "swigluoai", "n_shared_experts": 1,
         "sparse_attention_config": {
             "sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_block_size": 4, "sparse_topk_blocks": 3,
             "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1]}},
        dict,
    ),
    "deepseek32": (
        "deepseek32",
        {**_KINDS, "rope_scaling": SPECS["deepseek32"]["config"]["rope_parameters"], "rope_parameters": None,
         "rope_theta": 10000, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        dict,
    ),
    "hunyuan_vl of 2025": ("hunyuan_vl", {"rope_parameters": None, "rope_scaling": _XDROPE}, dict),
    "hrm_text as trained": ("hrm_text", {"num_hidden_layers": 2, "num_layers_per_stack": None}, _split_hrm),
    "mimo2 of 2025": (  # its window does not count the current token
        "mimo2",
        {**_KINDS, "rope_parameters": None, "rms_norm_eps": None, "hybrid_layer_pattern": [0, 1, 1, 0],
         "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "sliding_window": 7,
         "sliding_window_size": 7, "layernorm_epsilon": 1e-5, "swa_num_key_value_heads": 2, "swa_head_dim": 24,
         "swa_v_head_dim": 16, "swa_num_attention_heads": 4, "n_shared_experts": ...,
         "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        dict,
    ),
    "Falcon Mamba 7B, whose inner size is not `expand` times the width": ("mamba-falcon", {"expand": 16}, dict),
    "mamba without its inner size": ("mamba", {"intermediate_size": None}, dict),
    "Qwen3-ASR of 2026-01": (
        "Qwen3ASRForConditionalGeneration",
        {**_NONE(_ASR), "architectures": _ASR["architectures"],
         "thinker_config": {key: x for key, x in _ASR.items() if key.endswith("_config")}},
        renamed((r"model\.language_model\.", "model.model."), (r"^(model\.)?", "thinker.")),
    ),
    "nemotron's layers as letters": (
        "nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-*M-"}, dict,
    ),
    "nemotron's layers with experts": (
        "nemotron_h_moe", {"layers_block_type": None, "hybrid_override_pattern": "ME*EM"}, dict,
    ),
    # Tensors
    "granite's experts by their older names": (
        "granite_swa-moe", {},
        renamed(("experts.gate_up_proj$", "input_linear.weight"), ("experts.down_proj$", "output_linear.weight"),
                (r"router\.weight", "router.layer.weight")),
    ),
    "experts of Qwen3-VL of 2025": ("qwen3vlmoe", {}, _transposed_experts),
    "an output that is the embedding again": (
        "falcon", {}, lambda tensors: {**tensors, "lm_head.weight": tensors["transformer.word_embeddings.weight"]},
    ),
    "lerps of RWKV-7 in one tensor": ("rwkv7", {}, _lerps_in_one),
    "values of layer 0 in RWKV-7": ("rwkv7", {}, _values_of_layer_0),
    **{f"the embedding of T5 as its {x}'s": ("t5", {}, renamed(("^shared", f"{x}.embed_tokens")))
       for x in ("encoder", "decoder")},
    "the embedding of T5 twice": (
        "t5", {}, lambda tensors: renamed(("^shared", "encoder.embed_tokens"))(tensors) | {
            "decoder.embed_tokens.weight": tensors["shared.weight"]},
    ),
    "parts that T5's encoder does not read": (
        "t5encoder", {}, more(decoder__final_layer_norm__weight=(32,), lm_head__weight=(320, 32)),
    ),
    "slopes that jais computes": ("jais", {}, more(transformer__relative_pe__slopes=(4,))),
}  # fmt: skip


def contents(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the metadata and tensors that a checkpoint converts to."""
    with open_checkpoint(folder) as model:
        keys = {key: np.asarray(value).tolist() for key, value in model.metadata.items()}
        return keys, {name: values(tensor) for name, tensor in model.tensors.items()}


@pytest.mark.parametrize("case", SAME)
def test_other_spellings_become_the_same_file(case: str, tmp_path: Path) -> None:
    name, config, change = SAME[case]
    ours = write(name, tmp_path / "a" / "model", change(tensors_of(name)), **config)
    theirs = write(name, tmp_path / "b" / "model")
    (keys, found), (expected_keys, expected) = contents(ours), contents(theirs)
    assert keys == expected_keys
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        np.testing.assert_array_equal(found[key], x, key)
