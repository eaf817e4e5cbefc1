"""Checkpoints with alternative config keys convert. Settings that GGUF cannot express give a one-line error."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import ConvertError, open_checkpoint
from tests.localllm.convert.hf_models import ids
from tests.localllm.convert.hf_synthetic import DATA, POSITIONS, numbers, read_specs, write_folder
from tests.localllm.convert.support import logits_of, save, values
from tests.models.support import nmse

SPECS, STORED = read_specs(), np.load(DATA / "hf_all.npz")


def metadata_of(name: str, folder: Path, **config: Any) -> dict[str, Any]:
    """Return the metadata of a model, with some keys of its config.json replaced, or removed if None."""
    spec = dict(SPECS[name])
    changed = {**spec["config"], **config}
    spec["config"] = {key: value for key, value in changed.items() if value is not None}
    folder.mkdir(exist_ok=True)
    write_folder(spec, folder)
    with open_checkpoint(folder) as model:
        return dict(model.metadata)


def check_refused(name: str, config: dict[str, Any], message: str, folder: Path) -> None:
    """Check that opening the changed checkpoint fails with a one-line error that begins with its path."""
    if "text_config" in config:
        config = {"text_config": {**SPECS[name]["config"]["text_config"], **config["text_config"]}}
    with pytest.raises(ConvertError, match=message) as error:
        metadata_of(name, folder, **config)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(folder))


def test_dbrx_in_folders_of_2024(tmp_path: Path) -> None:
    """DBRX checkpoints of 2024 store `rope_theta` in `attn_config`. transformers 5 ignores it there and uses 10000."""
    inner = {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 5e5}
    keys = metadata_of("dbrx", tmp_path, attn_config=inner, rope_parameters=None)
    assert (keys["dbrx.rope.freq_base"], keys["dbrx.attention.clamp_kqv"]) == (5e5, 8.0)


def test_steepness_of_mpt_storywriter(tmp_path: Path) -> None:
    """MPT StoryWriter sets `alibi_bias_max` to 16, and the publisher's code uses it. transformers ignores it and uses
    8.
    """
    keys = metadata_of("mpt", tmp_path, attn_config={"alibi_bias_max": 16, "clip_qkv": None})
    assert keys["mpt.attention.max_alibi_bias"] == 16.0
    assert "mpt.attention.clamp_kqv" not in keys


def test_experts_of_dbrx_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    inner = {**SPECS["dbrx"]["config"]["ffn_config"], "ffn_hidden_size": 25}
    with pytest.raises(ConvertError, match="96 rows or columns are not 4 groups of 25") as error:
        metadata_of("dbrx", tmp_path, ffn_config=inner)
    assert "\n" not in str(error.value)


_ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
_PACKED = {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation of apertus": ("apertus", {"hidden_act": "silu"}, "hidden_act is silu; expected xielu"),
    "activation of BitNet 2B4T": ("bitnet", {"hidden_act": "relu2"}, "hidden_act is relu2; expected silu"),
    "ternary weights, packed": ("bitnet", {"quantization_config": _PACKED}, "rounds what every matrix reads to 8 bits"),
    "and while it runs": ("bitnet", {"quantization_config": _ONLINE}, "rounds what every matrix reads to 8 bits"),
    "in another class": ("llama", {"quantization_config": _PACKED}, "rounds what every matrix reads to 8 bits"),
    "two bases of granite": (
        "granite_swa", {"layer_rope_theta": [0, 5e3, 1e4, 0, 5e3]}, "layer_rope_theta is 5000, 10000; expected 0 or one"
    ),
    "bases of other layers": ("granite_swa", {"layer_rope_theta": [5e3]}, "layer_rope_theta is .*expected 5 numbers"),
    "bases below 0": ("granite_swa", {"layer_rope_theta": [-1] * 5}, "layer_rope_theta is .*expected 5 numbers"),
    "choice of experts": ("cohere2moe", {"expert_selection_fn": "relu"}, "expert_selection_fn is relu; expected"),
    "dense layers between": (
        "cohere2moe", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"]}, "dense layers before all",
    ),
    "kinds of layers": ("cohere2moe", {"layer_types": ["full_attention"]}, "layer_types is .*expected the kinds of 5"),
    "pattern of MiMo": (
        "mimo2", {"layer_types": None, "hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern is .*0 or 1, 4 times",
    ),
    "layers of stacks": ("hrm_text", {"num_layers_per_stack": 10**6}, "num_layers_per_stack is .*expected at most"),
    "passes of stacks": ("hrm_text", {"L_cycles": 10**9}, "hrm_text.block_count: expected an integer from 1"),
    "fewer layers than told": (
        "hrm_text", {"num_layers_per_stack": 3}, r"made of model\.L_module\.layers\.2\.",
    ),
    "sections": ("paddleocr-vl", {"text_config": {"rope_parameters": {"mrope_section": [1, 2]}}}, "expected three"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_gguf_cannot_say_is_one_line(case: str, tmp_path: Path) -> None:
    check_refused(*REFUSED[case], tmp_path)


def test_learned_numbers_of_apertus_are_keys(tmp_path: Path) -> None:
    keys, noise = metadata_of("apertus", tmp_path), "model.layers.{}.mlp.act_fn.alpha_n"
    assert [keys[f"xielu.{x}"].tolist() for x in ("beta", "eps")] == [[0.75, 0.75], [-0.25, -0.25]]
    np.testing.assert_array_equal(keys["xielu.alpha_n"], [numbers(noise.format(i), [1], 0.0)[0] for i in range(2)])


ACT = "model.layers.1.mlp.act_fn.eps"
BAD_NUMBERS: dict[str, tuple[np.ndarray | None, str]] = {
    "missing": (None, f"tensor '{ACT}' is missing"),
    "two": (np.zeros(2, np.float32), r"act_fn.eps: is F32 \(2,\); expected one number"),
    "whole": (np.zeros(1, np.int32), r"act_fn.eps: is I32 \(1,\); expected one number"),
}


@pytest.mark.parametrize("case", BAD_NUMBERS)
def test_numbers_of_apertus_that_are_none(case: str, tmp_path: Path) -> None:
    value, message = BAD_NUMBERS[case]
    tensors = {name: numbers(name, *rest) for name, *rest in SPECS["apertus"]["tensors"]}
    tensors.pop(ACT)
    write_folder(SPECS["apertus"], tmp_path)
    save(tmp_path / "model.safetensors", tensors if value is None else {**tensors, ACT: value})
    with pytest.raises(ConvertError, match=message):
        open_checkpoint(tmp_path)


def test_mimo_in_folders_of_2025(tmp_path: Path) -> None:
    """MiMo checkpoints of 2025 use older keys for layer types and RoPE bases.

    Their sliding window does not count the current token, so the window in the GGUF is one token larger.
    """
    spec, renamed = SPECS["mimo2"], ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps")
    left = {key: value for key, value in spec["config"].items() if key not in renamed}
    older = {
        "hybrid_layer_pattern": [0, 1, 1, 0], "rope_theta": 5000000, "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334, "sliding_window": 7, "sliding_window_size": 7, "layernorm_epsilon": 1e-5,
        "swa_num_key_value_heads": 2, "swa_head_dim": 24, "swa_v_head_dim": 16, "swa_num_attention_heads": 4,
        "n_shared_experts": None, "routed_scaling_factor": None, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    }  # fmt: skip
    write_folder({**spec, "config": {**left, **older}}, tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert model.stored["mimo2.attention.sliding_window"] == 8
        assert nmse(logits_of(model, ids())[POSITIONS], STORED["mimo2"]).max() < 1e-9


def test_mimo_without_a_scale_of_values(tmp_path: Path) -> None:
    write_folder(SPECS["mimo2"], tmp_path)
    assert metadata_of("mimo2", tmp_path)["mimo2.attention.value_scale"] == 0.707
    spec = {**SPECS["mimo2"], "config": {**SPECS["mimo2"]["config"], "attention_value_scale": None}}
    write_folder(spec, tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert "mimo2.attention.value_scale" not in model.stored


def test_kinds_of_layers_that_config_json_leaves_out(tmp_path: Path) -> None:
    """If `layer_types` is missing, transformers' defaults apply: periodic after the dense layers, every fourth layer,
    or the first and every sixth.
    """
    keys = metadata_of("cohere2moe", tmp_path / "a", layer_types=None, mlp_layer_types=None, first_k_dense_replace=1)
    pattern, layers = "attention.sliding_window_pattern", SPECS["granite_swa"]["config"]["num_hidden_layers"]
    assert keys[f"cohere2moe.{pattern}"].tolist() == [False, True, True, True, False]
    assert keys["cohere2moe.leading_dense_block_count"] == 1
    keys = metadata_of("granite_swa", tmp_path / "b", layer_types=None)
    assert keys[f"granite_swa.{pattern}"].tolist() == [i % 4 != 0 for i in range(layers)]


def test_granite_without_bases_of_layers(tmp_path: Path) -> None:
    keys = metadata_of("granite_swa", tmp_path, layer_rope_theta=None)
    assert (keys["granite_swa.rope.freq_base"], all(keys["granite_swa.attention.rope_pattern"])) == (1e4, True)


def test_experts_of_granite_by_their_older_names(tmp_path: Path) -> None:
    spec = SPECS["granite_swa-moe"]
    older = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
    older |= {"router.weight": "router.layer.weight"}
    tensors = {name: numbers(name, *rest) for name, *rest in spec["tensors"]}
    for new, old in older.items():
        for name in [name for name in tensors if name.endswith(f"block_sparse_moe.{new}")]:
            tensors[name.removesuffix(new) + old] = tensors.pop(name)
    write_folder(spec, tmp_path)
    save(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(tmp_path) as model:
        assert nmse(logits_of(model, ids())[POSITIONS], STORED["granite_swa-moe"]).max() < 1e-9


def test_growth_of_the_queries_of_mistral4(tmp_path: Path) -> None:
    """llama.cpp rejects a GGUF that has the query temperature scale but not its length, so both keys are written."""
    keys = metadata_of("mistral4", tmp_path)
    assert (keys["mistral4.attention.temperature_scale"], keys["mistral4.attention.temperature_length"]) == (0.1, 16)


def test_a_mistral3_is_none_of_the_fourth(tmp_path: Path) -> None:
    assert metadata_of("mistral3", tmp_path)["general.architecture"] == "mistral3"


def test_folders_of_hrm_text_as_it_was_trained(tmp_path: Path) -> None:
    """The original HRM checkpoints count `num_hidden_layers` per stack and have separate matrices.

    The logits are the same.
    """
    spec = {**SPECS["hrm_text"]}
    spec["config"] = {**spec["config"], "num_hidden_layers": 2}
    del spec["config"]["num_layers_per_stack"]
    write_folder(spec, tmp_path)
    tensors = {}
    for name, *rest in spec["tensors"]:
        whole, base = numbers(name, *rest), name.rpartition(".")[0].rpartition(".")[0]
        if name.endswith("gqkv_proj.weight"):
            of = zip(("gate", "q", "k", "v"), np.split(whole, 4), strict=True)
            tensors |= {f"{base.removesuffix('attn')}self_attn.{x}_proj.weight": part for x, part in of}
        elif name.endswith("gate_up_proj.weight"):
            of = zip(("gate", "up"), np.split(whole, 2), strict=True)
            tensors |= {f"{base}.{x}_proj.weight": part for x, part in of}
        else:
            tensors[name.replace(".attn.", ".self_attn.")] = whole
    save(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(tmp_path) as model:
        assert nmse(logits_of(model, ids())[POSITIONS], STORED["hrm_text"]).max() < 1e-9


@pytest.mark.parametrize("name", ["mamba", "mamba-falcon"])
def test_the_inner_width_of_mamba_is_that_of_config_json(name: str, tmp_path: Path) -> None:
    """The inner size comes from `intermediate_size`.

    Falcon Mamba 7B has an `expand` of 16, but its inner size is twice the hidden size.
    """
    assert metadata_of(name, tmp_path / "a", expand=16)["mamba.ssm.inner_size"] == 64
    with open_checkpoint(tmp_path / "a") as model:
        assert nmse(logits_of(model, ids())[POSITIONS], STORED[name]).max() < 1e-9
    assert metadata_of(name, tmp_path / "b", intermediate_size=None)["mamba.ssm.inner_size"] == 64


# -- keys that llama.cpp requires and our reader does not --------------------------------------------------------------

REQUIRED: dict[str, dict[str, Any]] = {
    "afmoe": {"expert_shared_count": 1},
    "ernie4_5-moe": {"interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": 32},
    "hunyuan-moe": {"expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 64},
    "llama4": {"interleave_moe_layer_step": 2},
    "minimax-m2": {"expert_feed_forward_length": 64, "expert_gating_func": 2},
    "nemotron_h": {"attention.layer_norm_epsilon": pytest.approx(1e-5)},
}


@pytest.mark.parametrize("name", REQUIRED)
def test_keys_that_llama_cpp_requires(name: str, tmp_path: Path) -> None:
    keys = metadata_of(name, tmp_path)
    assert {key: keys[f"{name}.{key}"] for key in REQUIRED[name]} == REQUIRED[name]


@pytest.mark.parametrize("name", ["granitehybrid-dense", "nemotron_h"])
def test_files_without_experts_use_and_group_none(name: str, tmp_path: Path) -> None:
    assert not [key for key in metadata_of(name, tmp_path) if "expert_used" in key or "expert_group" in key]


def test_the_norm_of_falcon_h1_has_the_name_of_its_files(tmp_path: Path) -> None:
    write_folder(SPECS["falcon-h1"], tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert "blk.0.ffn_norm" in model.tensors


def test_experts_of_llama4_elsewhere_are_refused(tmp_path: Path) -> None:
    check_refused("llama4", {"moe_layers": [0, 3]}, "moe_layers is not every layer of 2", tmp_path)


# -- YaRN between two pairs -------------------------------------------------------------------------------------------

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "truncate": False,
}  # fmt: skip


def blended(n_rot: int, rope: dict[str, Any]) -> list[float]:
    """Return YaRN frequencies by transformers' definition, without truncating the correction range."""
    base, factor, length = rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"]
    ends = [n_rot * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1)]
    low, high = max(ends[0], 0), min(ends[1], n_rot - 1)
    found = []
    for pair in range(n_rot // 2):
        plain = base ** (-2 * pair / n_rot)
        ramp = min(max((pair - low) / (high - low), 0), 1)
        found.append(plain / factor * ramp + plain * (1 - ramp))
    return found


def test_yarn_that_does_not_truncate_is_written_as_factors(tmp_path: Path) -> None:
    keys = metadata_of("llama", tmp_path, rope_parameters=YARN)
    assert keys["llama.rope.scaling.type"] == "none"
    assert keys["llama.rope.scaling.attn_factor"] == pytest.approx(0.1 * math.log(4) + 1)
    with open_checkpoint(tmp_path) as model:
        assert model.notes == ()
        factors = values(model.tensors["rope_freqs.weight"])
    frequencies = 10000.0 ** (-np.arange(0, 8, 2) / 8) / factors
    np.testing.assert_allclose(frequencies, blended(8, YARN), rtol=1e-6)
    assert (
        metadata_of("llama", tmp_path, rope_parameters={**YARN, "truncate": True})["llama.rope.scaling.type"] == "yarn"
    )


def test_yarn_that_does_not_truncate_is_refused_where_it_matters(tmp_path: Path) -> None:
    """With `truncate` false GPT-OSS is refused if its RoPE angles would differ noticeably.

    The published model differs by only 0.0002 radians per position.
    """
    check_refused("gpt-oss", {"rope_parameters": YARN}, "truncate is False; expected True: angles would", tmp_path)
    metadata_of("gpt-oss", tmp_path, rope_parameters={**YARN, "factor": 1.003})
    with open_checkpoint(tmp_path) as model:
        [note] = model.notes
        assert note.startswith("rope truncate false has no place in GGUF files: angles differ by up to 0.000")


@pytest.mark.parametrize("name", ["lfm2", "lfm2moe"])
def test_biases_of_convolutions_are_refused(name: str, tmp_path: Path) -> None:
    check_refused(name, {"conv_bias": True}, "conv_bias is True; the GGUF architecture has it fixed at False", tmp_path)
