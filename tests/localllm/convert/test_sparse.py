"""Models with sparse attention and hyper-connections, under the names of the publishers' code, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import open_checkpoint
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipes.sparse_attention import indexers
from tests.localllm.convert.hf_models import ids
from tests.localllm.convert.hf_sparse import SPARSE
from tests.localllm.convert.hf_synthetic import POSITIONS, numbers, write_folder
from tests.localllm.convert.support import logits_of, save
from tests.localllm.convert.test_variants import SPECS, STORED, check_refused, metadata_of
from tests.models.support import nmse

DOTS = {
    "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2, "mlp_layer_types": None,
    "per_layer_config": None, "first_k_dense_replace": 1, "rope_parameters": None, "rope_theta": 80000000.0,
    "swa_rope_theta": 50000.0, "sliding_window": None, "sliding_window_size": 8, "swa_num_attention_heads": 2,
    "swa_q_lora_rank": 24, "swa_kv_lora_rank": 20, "swa_qk_nope_head_dim": 14, "swa_qk_rope_head_dim": 8,
    "swa_v_head_dim": 10, "shared_experts_intermediate_size": None, "moe_shared_expert_intermediate_size": 32,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "apply_mla_qkv_lora_rescale": True, "use_dsa": True,
    "attention_gate_type": "headwise",
}  # fmt: skip
GLM_NEXT = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention", "full_attention"],
    "mlp_layer_types": None, "first_k_dense_replace": 1, "mla_use_nope": True, "mhc": True, "linear_head_dim": None,
    "linear_num_heads": None, "linear_conv_kernel_dim": None, "linear_lower_bound": None, "scoring_func": "sigmoid",
    "linear_attn_config": {
        "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "safe_gate": True,
    },
    "indexer_types": None, "index_topk_pattern": "FFSFS",
}  # fmt: skip
MINIMAX = {
    **{f"index_{x}": None for x in ("n_heads", "head_dim", "block_size", "topk_blocks", "local_blocks")},
    "layer_types": None, "mlp_layer_types": None, "moe_layer_freq": [0, 1, 1], "hidden_act": "swigluoai",
    "n_shared_experts": 1, "sparse_attention_config": {
        "sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_block_size": 4, "sparse_topk_blocks": 3,
        "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1],
    },
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "dots3note": DOTS,
    "glm-dsa": {"indexer_types": None, "index_topk_pattern": "FSFS", "mlp_layer_types": None, "layer_types": None},
    "glm5-next": GLM_NEXT,
    "hy_v4": {"mlp_layer_types": None, "layer_types": None, "enable_lm_head_fp32": True},
    "deepseek4": {
        "layer_types": None, "mlp_layer_types": None, "compress_rates": None, "partial_rotary_factor": None,
        "compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 1, "qk_rope_head_dim": 8, "rope_parameters": None,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}, "rope_theta": 10000,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    },
    "minimax-m3": MINIMAX,
    "deepseek32": {
        "mlp_layer_types": None, "layer_types": None, "rope_scaling": SPECS["deepseek32"]["config"]["rope_parameters"],
        "rope_parameters": None, "rope_theta": 10000, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
}  # fmt: skip


def inner(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json changes, nested in `text_config` if the model has one."""
    if "text_config" not in SPECS[name]["config"]:
        return config
    return {"text_config": {**SPECS[name]["config"]["text_config"], **config}}


@pytest.mark.parametrize("name", SPARSE)
def test_config_json_of_the_model_s_own_program_says_the_same(name: str, tmp_path: Path) -> None:
    ours, theirs = metadata_of(name, tmp_path / "a", **inner(name, OWN[name])), metadata_of(name, tmp_path / "b")
    ours.pop("general.name"), theirs.pop("general.name")
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value, key)


@pytest.mark.parametrize(("rope", "expected"), [({"mscale": 0.7, "mscale_all_dim": 0.7}, 0.07), ({}, 0.0)])
def test_yarn_without_mscale_is_written_as_0(rope: dict[str, float], expected: float, tmp_path: Path) -> None:
    """Without `mscale_all_dim` the YaRN multiplier is written as 0.

    Without the key in the GGUF, readers would scale attention scores as for a value of 1.
    """
    config = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    metadata = metadata_of("deepseek32", tmp_path, rope_parameters=config | rope)
    assert metadata["deepseek32.rope.scaling.yarn_log_multiplier"] == pytest.approx(expected)


def test_names_in_published_folders_of_hunyuan(tmp_path: Path) -> None:
    """Published Hunyuan 4 checkpoints and transformers 5.23 use different names for some tensors.

    Both checkpoints give the same logits.
    """
    spec, renamed = SPECS["hy_v4"], {"mlp.linear_gate": "mlp.gate_proj", "experts.linear_gate": "experts.gate_proj"}
    renamed |= {"model.hc_pre.hc_head.": "model.hc_head."}
    renamed |= {f"hc_pre.hc_{x}_layer.hc_": f"hc_{x}_layer.hc_pre.hc_" for x in ("attn", "mlp")}
    tensors = {name: numbers(name, *rest) for name, *rest in spec["tensors"]}
    for old, new in renamed.items():
        assert any(old in name for name in tensors)
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    write_folder(spec, tmp_path)
    save(tmp_path / "model.safetensors", {**tensors, "model.mtp_layers.0.norm.weight": np.ones(32, np.float32)})
    with open_checkpoint(tmp_path) as model:
        assert model.notes == ("skipped 1 tensor of layers for multi-token prediction",)
        assert nmse(logits_of(model, ids())[POSITIONS], STORED["hy_v4"]).max() < 1e-9


def test_transformers_own_names_of_deepseek4(tmp_path: Path) -> None:
    """DeepSeek 4 checkpoints with transformers' internal names give the same logits. transformers itself saves the
    publisher's tensor names.
    """
    spec, tensors = SPECS["deepseek4"], {}
    compressor = {"wkv": "kv_proj", "wgate": "gate_proj", "ape": "position_bias", "norm": "kv_norm"}
    names = {
        ".attn_norm.": ".input_layernorm.", ".ffn_norm.": ".post_attention_layernorm.",
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
    for name, *rest in spec["tensors"]:
        renamed = "lm_head.weight" if name == "head.weight" else name
        for old, new in names.items():
            renamed = renamed.replace(old, new)
        tensors[renamed] = numbers(name, *rest)
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        w1, w2, w3 = (np.stack([tensors.pop(f"{prefix}{i}.{w}.weight") for i in range(4)]) for w in ("w1", "w2", "w3"))
        tensors |= {f"{prefix}gate_up_proj": np.concatenate([w1, w3], axis=1), f"{prefix}down_proj": w2}
    assert not [name for name in tensors if ".attn." in name or ".ffn." in name or ".w" in name.replace(".weight", "")]
    write_folder(spec, tmp_path)
    save(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(tmp_path) as model:
        assert nmse(logits_of(model, ids())[POSITIONS], STORED["deepseek4"]).max() < 1e-9


def test_layers_with_an_indexer_by_a_rule(tmp_path: Path) -> None:
    """Without `indexer_types`, the layers with an indexer follow from `index_topk_freq` and `index_skip_topk_offset`,
    as in transformers.
    """
    for rule, expected in (({}, [0, 1, 2, 3, 4, 5, 6]), ({"index_topk_freq": 4}, [0, 1, 5]),
                           ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [0, 2, 4, 6])):  # fmt: skip
        config = HfConfig(tmp_path, {"num_hidden_layers": 7, **rule}, {})
        assert np.flatnonzero(indexers(config)).tolist() == expected


def test_limits_are_those_of_every_layer(tmp_path: Path) -> None:
    """GLM 5.3 Flash clamps routed and shared experts, Hunyuan 4 only routed experts.

    A negative limit disables the clamp.
    """
    keys = metadata_of("glm5-next", tmp_path / "a")
    assert [keys[f"glm5-next.swiglu_clamp_{x}"].tolist() for x in ("exp", "shexp")] == [[1.0] * 5] * 2
    keys = metadata_of("hy_v4", tmp_path / "b")
    assert keys["hy_v4.swiglu_clamp_exp"].tolist() == [0.5] * 4
    assert "hy_v4.swiglu_clamp_shexp" not in keys
    assert "hy_v4.swiglu_clamp_exp" not in metadata_of("hy_v4", tmp_path / "c", swiglu_limit=-1)


def test_layers_of_dots_that_nobody_tells(tmp_path: Path) -> None:
    """By default the first two layers and every fourth use full attention, as in transformers."""
    keys = metadata_of("dots3note", tmp_path, layer_types=None)
    assert keys["dots3note.attention.sliding_window_pattern"].tolist() == [False, False, True, True]
    assert keys["dots3note.attention.head_count"].tolist() == [4, 4, 2, 2]


def test_sizes_of_windows_that_nobody_tells(tmp_path: Path) -> None:
    """Without `swa_kv_lora_rank`, transformers' default applies. It does not fit the tiny matrices, so the
    checkpoint is refused.
    """
    changed = {**DOTS, "swa_kv_lora_rank": None}
    check_refused("dots3note", changed, r"blk\.2\.attn_kv_a_mqa.*expected shape \(1032, 32\)", tmp_path)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "scores of experts": ("deepseek32", {"scoring_func": "softmax"}, "scoring_func is softmax; the GGUF architecture"),
    "a way to choose experts": ("deepseek32", {"topk_method": "greedy"}, "topk_method is greedy; the GGUF architectur"),
    "biases": ("glm-dsa", {"attention_bias": True}, "attention_bias is True; the GGUF architecture"),
    "kinds of indexers": ("glm-dsa", {"indexer_types": ["full", "half", "full", "full"]}, "full or shared, 4 times"),
    "letters": ("glm-dsa", {"indexer_types": None, "index_topk_pattern": "FXFF"}, "indexer_types is .*4 times"),
    "few indexers": ("hy_v4", {"indexer_types": ["full"]}, "indexer_types is .*full or shared, 4 times"),
    "no indexer before": (
        "glm-dsa", {"indexer_types": ["shared", "full", "full", "full"]}, "expected 1 for layer 0, which none comes",
    ),
    "no top-k": ("deepseek32", {"index_topk": None}, "index_topk is missing; expected a whole number"),
    "heads of the indexer": ("hy_v4", {"index_n_heads": 3}, "1024 rows or columns are not 3 groups of 341"),
    "groups of experts": ("hy_v4", {"n_group": 2}, "n_group is 2; the GGUF architecture"),
    "rows as they are": (
        "dots3note", {"apply_mla_qkv_lora_rescale": False}, "apply_mla_qkv_lora_rescale is False; the GGUF",
    ),
    "gates of another kind": ("dots3note", {"attention_gate_type": "elementwise"}, "attention_gate_type is"),
    "ranks of queries": ("dots3note", {**DOTS, "swa_q_lora_rank": 12}, "q_lora_rank of layers with a window is not"),
    "sizes of no layer": ("dots3note", {"per_layer_config": {"1": {}}}, "an object for each layer with a window"),
    "two windows": (
        "dots3note", {"per_layer_config": {"2": {"head_dim": 22}, "3": {"head_dim": 20}}}, "the same sizes for all",
    ),
    "shared experts": ("dots3note", {"shared_experts_intermediate_size": 24}, "size is 24 and experts have 32; the GG"),
    "heads of windows": ("dots3note", {**DOTS, "swa_num_attention_heads": 3}, "48 rows or columns are not 3 groups"),
    "no reading": ("dots3note", {"use_dsa": False}, "use_dsa is False; the GGUF architecture"),
    "rotated": ("glm5-next", {"text_config": {"qk_rope_head_dim": 8}}, "qk_rope_head_dim is 8; the GGUF architecture"),
    "one stream": ("glm5-next", {"text_config": {"mhc": False}}, "mhc is False; the GGUF architecture"),
    "decays without a bound": (
        "glm5-next", {"text_config": {"linear_attn_config": {"safe_gate": False}}}, "safe_gate is False; the GGUF",
    ),
    "other heads": ("glm5-next", {"text_config": {"linear_num_heads": 2}}, "linear attention has 2 heads"),
    "pools": ("glm5-next", {"text_config": {"index_kpool": 3}}, "expected a divisor of attention.indexer.top_k 8"),
    "no tail": (
        "glm5-next", {"text_config": {"index_kpool_always_select_tail": False}}, "only true is supported, found false",
    ),
    "limit": ("minimax-m3", {"text_config": {"swiglu_limit": 5.0}}, "swiglu_limit is 5.0; the GGUF architecture"),
    "gain": ("minimax-m3", {"text_config": {"swiglu_alpha": 1.5}}, "swiglu_alpha is 1.5; the GGUF architecture"),
    "activation": ("minimax-m3", {"text_config": {"hidden_act": "gelu"}}, "hidden_act is gelu; expected swigluoai"),
    "indexers elsewhere": (
        "minimax-m3", {"text_config": {"layer_types": ["full_attention"] * 3}}, "layer_types has an indexer in other",
    ),
    "no indexers": ("minimax-m3", {"text_config": {"layer_types": None}}, "layer_types has an indexer in other layers"),
    "dense layers between": (
        "minimax-m3", {"text_config": {**MINIMAX, "moe_layer_freq": [1, 0, 1]}}, "moe_layer_freq is .*before all with",
    ),
    "blocks": ("minimax-m3", {"text_config": {"index_block_size": None}}, "sparse_block_size is missing"),
    "scores of DeepSeek 4": ("deepseek4", {"scoring_func": "sigmoid"}, "scoring_func is sigmoid; the GGUF architectur"),
    "pools of 8": (
        "deepseek4", {"compress_rates": {"compressed_sparse_attention": 8}}, "sparse_attention is 8; the GGUF archit",
    ),
    "ratios of 8": ("deepseek4", {"layer_types": None, "compress_ratios": [0, 4, 8, 4]}, "expected 0, 4, 128 for each"),
    "few ratios": ("deepseek4", {"layer_types": None, "compress_ratios": [0, 4, 4]}, "for each of the 4 layers"),
    "kinds of pools": ("deepseek4", {"layer_types": ["full_attention"] * 4}, "layer_types is .*heavily_co.*4 times"),
    "tokens that choose late": (
        "deepseek4", {"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "expected hash_moe before moe, 4 in all",
    ),
    "two shared experts": ("deepseek4", {"n_shared_experts": 2}, "n_shared_experts is 2; the GGUF architecture"),
    "keys of two heads": ("deepseek4", {"num_key_value_heads": 2}, "num_key_value_heads is 2; the GGUF architecture"),
    "a stretched window": (
        "deepseek4", {"rope_parameters": {"main": {"rope_type": "yarn"}, "compress": {}}}, "rope_type of main is yarn",
    ),
    "larger numbers": (
        "deepseek4",
        {"rope_parameters": {"main": {}, "compress": {"rope_type": "yarn", "factor": 4, "attention_factor": 1.2}}},
        "attention_factor is 1.2; the GGUF architecture",
    ),
    "two shares": (
        "deepseek4", {"rope_parameters": {"main": {"partial_rotary_factor": 0.5}, "compress": {}}},
        "partial_rotary_factor is 0.5 in rope_parameters; the GGUF",
    ),
    "wide shared experts": (
        "minimax-m3", {"text_config": {"shared_intermediate_size": 48}}, "shared_intermediate_size is 48 and experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_gguf_cannot_say_is_one_line(case: str, tmp_path: Path) -> None:
    check_refused(*REFUSED[case], tmp_path)
