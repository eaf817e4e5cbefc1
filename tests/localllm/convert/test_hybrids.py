"""Kimi Linear, Ling 3, MiniMax 01 and Hunyuan VL checkpoints in the publishers' format, and with alternative
config keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import open_checkpoint
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipes.bailing import ling_attends
from tests.localllm.convert.hf_models import ids
from tests.localllm.convert.hf_synthetic import POSITIONS, numbers, write_folder
from tests.localllm.convert.support import logits_of, save
from tests.localllm.convert.test_variants import SPECS, STORED, check_refused, metadata_of
from tests.models.support import nmse

KIMI = {
    "layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 1, "linear_head_dim": None,
    "linear_num_heads": None, "linear_conv_kernel_dim": None, "head_dim": 72, "moe_router_activation_func": "sigmoid",
    "linear_attn_config": {
        "full_attn_layers": [5], "kda_layers": [1, 2, 3, 4], "head_dim": 16, "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
}  # fmt: skip
LING = {
    "layer_types": None, "mlp_layer_types": None, "linear_head_dim": None, "linear_num_heads": None,
    "linear_conv_kernel_dim": None, "moe_renormalize": None, "norm_topk_prob": True, "model_max_length": None,
    "max_position_embeddings": 256, "no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise",
    "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip
MINIMAX = {
    "layer_types": None, "attn_type_list": [1, 0, 1, 0], "postnorm": True, "rotary_dim": 8,
    **{f"{x}_{y}_factor": None for x in ("full_attn", "linear_attn", "mlp") for y in ("alpha", "beta")},
    **{f"layernorm_{x}_alpha": 3.5 for x in ("full_attention", "linear_attention", "mlp")},
    **{f"layernorm_{x}_beta": 1 for x in ("full_attention", "linear_attention", "mlp")},
}  # fmt: skip
OWN = {
    "kimi-linear": (KIMI, "KimiLinearForCausalLM"),
    "bailingmoe3": (LING, "BailingMoeV3ForCausalLM"),
    "minimax-01": (MINIMAX, "MiniMaxText01ForCausalLM"),
}


@pytest.mark.parametrize("name", OWN)
def test_config_json_of_the_model_s_own_program_says_the_same(name: str, tmp_path: Path) -> None:
    changed, of_class = OWN[name]
    ours = metadata_of(name, tmp_path, **changed, architectures=[of_class])
    theirs = metadata_of(name, tmp_path)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value, key)


def test_dense_layers_of_kimi_have_names_of_their_own(tmp_path: Path) -> None:
    """Published checkpoints name the dense layers `mlp`, while transformers names them like experts.

    Checkpoints with either name give the same logits.
    """
    spec, sort = SPECS["kimi-linear"], "model.layers.0.block_sparse_moe."
    tensors = {name: numbers(name, *rest) for name, *rest in spec["tensors"]}
    assert sum(name.startswith(sort) for name in tensors) == 3
    write_folder(spec, tmp_path)
    save(tmp_path / "model.safetensors", {name.replace(sort, "model.layers.0.mlp."): x for name, x in tensors.items()})
    with open_checkpoint(tmp_path) as model:
        assert nmse(logits_of(model, ids())[POSITIONS], STORED["kimi-linear"]).max() < 1e-10


def test_kinds_of_layers_that_nobody_tells(tmp_path: Path) -> None:
    """Without `layer_types`, every fourth layer after the first of Kimi Linear uses full attention, as in transformers.

    In Ling 3, the last layer of each group uses full attention, and so does every layer of an incomplete last group.
    """
    keys = metadata_of("kimi-linear", tmp_path, layer_types=None)
    assert keys["kimi-linear.attention.head_count_kv"].tolist() == [0, 0, 0, 0, 1]
    config = HfConfig(tmp_path, {"num_hidden_layers": 8, "layer_group_size": 3}, {})
    assert np.flatnonzero(ling_attends(config)).tolist() == [2, 5, 6, 7]


def test_limits_of_experts_in_ling(tmp_path: Path) -> None:
    keys = metadata_of("bailingmoe3", tmp_path, expert_swiglu_limit_list=[None, 4, 5.5, 9])
    assert keys["bailingmoe3.swiglu_clamp_exp"].tolist() == [0, 4, 5.5]
    assert "bailingmoe3.swiglu_clamp_shexp" not in keys


def test_decays_that_are_saved_are_not_read(tmp_path: Path) -> None:
    """MiniMax 01 checkpoints of transformers contain decay buffers.

    The converter computes the decays from the layer index and ignores the stored values, here zeros.
    """
    spec = SPECS["minimax-01"]
    tensors = {name: numbers(name, *rest) for name, *rest in spec["tensors"]}
    write_folder(spec, tmp_path)
    attention = "model.layers.1.self_attn."
    more = {f"{attention}slope_rate": (4, 1, 1), f"{attention}diagonal_decay": (1, 4, 256, 256)}
    save(tmp_path / "model.safetensors", tensors | {name: np.zeros(shape, np.float32) for name, shape in more.items()})
    with open_checkpoint(tmp_path) as model:
        assert nmse(logits_of(model, ids())[POSITIONS], STORED["minimax-01"]).max() < 1e-10


def test_special_tokens_without_an_embedding_are_never_chosen(tmp_path: Path) -> None:
    """Special tokens with an all-zero embedding are suppressed. MiniMax M1 has such untrained tokens."""
    spec, key = SPECS["minimax-01"], "tokenizer.ggml.suppress_tokens"
    tensors = {name: numbers(name, *rest) for name, *rest in spec["tensors"]}
    write_folder(spec, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": [5]}')
    with open_checkpoint(tmp_path) as model:
        assert model.metadata[key].tolist() == [5]
        types = np.array(model.metadata["tokenizer.ggml.token_type"])
    special, word = np.flatnonzero(types == 3)[-1], np.flatnonzero(types == 1)[-1]
    tensors["model.embed_tokens.weight"][[special, word]] = 0
    save(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(tmp_path) as model:
        assert model.metadata[key].tolist() == sorted([5, special])


def test_sections_of_hunyuan_vl_in_folders_of_2025(tmp_path: Path) -> None:
    rope = {"type": "xdrope", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0, "xdrope_section": [2, 2, 2, 2]}
    theirs, text = metadata_of("hunyuan_vl", tmp_path), SPECS["hunyuan_vl"]["config"]["text_config"]
    ours = metadata_of("hunyuan_vl", tmp_path, text_config={**text, "rope_parameters": None, "rope_scaling": rope})
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value, key)
    assert theirs["hunyuan_vl.rope.freq_base"] == pytest.approx(1e4 * 1000 ** (16 / 14))


TWICE = {**KIMI["linear_attn_config"], "kda_layers": [1, 2, 3, 5]}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a layer twice": ("kimi-linear", {**KIMI, "linear_attn_config": TWICE}, "full_attn_layers is .*each of the 5"),
    "layers beyond": (
        "kimi-linear", {**KIMI, "linear_attn_config": {**TWICE, "full_attn_layers": [6]}}, "expected layers from 1 to",
    ),
    "other heads": ("kimi-linear", {"linear_num_heads": 2}, "linear attention has 2 heads, but the GGUF architecture"),
    "no kernel": ("kimi-linear", {"linear_conv_kernel_dim": None}, "short_conv_kernel_size is missing"),
    "scores as they are": ("kimi-linear", {"moe_renormalize": False}, "moe_renormalize is False"),
    "dense layers between": (
        "kimi-linear", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"]}, "dense layers before",
    ),
    "decays without a bound": ("bailingmoe3", {"kda_safe_gate": False}, "kda_safe_gate is False"),
    "no group": ("bailingmoe3", {"layer_types": None, "layer_group_size": 0}, "layer_group_size is 0; expected"),
    "limits of another kind": ("bailingmoe3", {"expert_swiglu_limit_list": 4}, "expert_swiglu_limit_list is 4"),
    "two residual factors": ("minimax-01", {"mlp_alpha_factor": 2}, "mlp_alpha_factor 2.0; .*one factor for all"),
    "factors of what is added": ("minimax-01", {"mlp_beta_factor": 2}, "mlp_beta_factor 2.0; the GGUF architecture"),
    "no kinds": ("minimax-01", {"layer_types": None}, "attn_type_list is missing; expected 0 or 1 for each of the 4"),
    "sections": (
        "hunyuan_vl", {"text_config": {"rope_parameters": {"mrope_section": [1]}}}, "three or four numbers of pairs",
    ),
    "stretched by a fraction": (
        "hunyuan-dense-alpha", {"rope_parameters": {"rope_type": "dynamic", "alpha": 0.5}}, "alpha is 0.5; expected a",
    ),
    "norms before": ("minimax-01", {"postnorm": False}, "postnorm is False"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_gguf_cannot_say_is_one_line(case: str, tmp_path: Path) -> None:
    check_refused(*REFUSED[case], tmp_path)
