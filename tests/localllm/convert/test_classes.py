"""Further model classes of convertible architectures: transformers' text logits, alternative config keys, and refusals.

`hf_own_classes` holds the classes that transformers lacks; `test_own` compares their GGUF with llama.cpp's.
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import pytest

from localllm.convert import open_checkpoint
from tests.localllm.convert.hf_classes import POSITIONS, read_classes
from tests.localllm.convert.hf_classes_table import CLASSES, TEXT
from tests.localllm.convert.hf_encoders import read_encoders
from tests.localllm.convert.hf_models import ids
from tests.localllm.convert.hf_own import write_own
from tests.localllm.convert.hf_own_classes import FURTHER
from tests.localllm.convert.hf_synthetic import DATA, numbers, read_specs, write_folder
from tests.localllm.convert.hf_t5 import read_family
from tests.localllm.convert.support import blob, check_refused, logits_of, save, values
from tests.models.support import nmse

SPECS, STORED = read_classes(), np.load(DATA / "hf_classes.npz")


def test_every_class_has_its_logits() -> None:
    assert {*SPECS} == {*STORED.files} == {*CLASSES}


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    write_folder(SPECS[name], tmp_path)
    beside = sum(TEXT.match(key) is None for key, *_ in SPECS[name]["tensors"])
    with open_checkpoint(tmp_path) as model:
        told = (f"skipped {beside} tensors for images or audio: the file holds the text model",)
        assert model.notes == (told if beside else ())
        assert nmse(logits_of(model, ids())[POSITIONS], STORED[name]).max() < 1e-9


OTHERS = {**read_specs(), **read_encoders(), **read_family(), **SPECS}
_INTERN = "InternVLForConditionalGeneration"
# Model class: a model with an identical GGUF, its settings under other keys, and renamed tensor prefixes.
SAME: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "LFM2ForCausalLM": ("lfm2", {}, {}),
    "KimiLinearModel": ("kimi-linear", {}, {}),
    "OLMoForCausalLM": ("olmo", {}, {}),
    "ExaoneMoEForCausalLM": (
        "exaone-moe",
        {"layer_types": None, "sliding_window_pattern": "LLLG", "first_k_dense_replace": None,
         "mlp_layer_types": None, "first_last_k_dense_replace": 1},
        {},
    ),
    "LlavaStableLMEpochForCausalLM": ("stablelm", {}, {}),
    "Qwen2VLModel": ("qwen2vl", {}, {}),
    "KimiVLForConditionalGeneration": (
        "deepseek2-v3", {}, {"lm_head": "language_model.lm_head", "model": "language_model.model"},
    ),
    "UMT5Model": ("t5-umt5", {}, {}),
    "LightOnOCRForConditionalGeneration": ("LightOnOcrForConditionalGeneration", {}, {}),
    "Qwen2_5OmniForConditionalGeneration": ("Qwen2_5OmniModel", {}, {}),
    "InternVLChatModel": (
        _INTERN, {"text_config": None, "llm_config": SPECS[_INTERN]["config"]["text_config"]},
        {"vision_tower": "vision_model", "multi_modal_projector": "mlp1"},
    ),
    "JinaEmbeddingsV5Model": ("eurobert", {}, {}),
}  # fmt: skip


def contents(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the metadata and tensors that a checkpoint converts to."""
    with open_checkpoint(folder) as model:
        keys = {key: np.asarray(value).tolist() for key, value in model.metadata.items()}
        return keys, {name: values(tensor) for name, tensor in model.tensors.items()}


@pytest.mark.parametrize("name", SAME)
def test_other_spellings_become_the_same_file(name: str, tmp_path: Path) -> None:
    of, settings, renamed = SAME[name]
    spec, places = OTHERS[of], [tmp_path / "a" / "model", tmp_path / "b" / "model"]
    for place in places:
        place.mkdir(parents=True)
    write_folder(spec, places[0])
    config = {**spec["config"], **settings, "architectures": [name]}
    write_folder({**spec, "config": {key: x for key, x in config.items() if x is not None}}, places[1])
    tensors = {key: numbers(key, *rest) for key, *rest in spec["tensors"]}
    for old, new in renamed.items():
        tensors = {new + key.removeprefix(old) if key.startswith(old) else key: x for key, x in tensors.items()}
    save(places[1] / "model.safetensors", tensors)
    for path in places[0].glob("*token*"):  # a tokenizer trained a second time would have other pieces
        copyfile(path, places[1] / path.name)
    (theirs, expected), (ours, found) = contents(places[0]), contents(places[1])
    assert ours == theirs
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in found)


def test_qwen3_asr_in_the_words_of_its_own_program(tmp_path: Path) -> None:
    """The checkpoint of 2026-01 nests config.json and tensor names in `thinker`, and gives the same logits."""
    name = "Qwen3ASRForConditionalGeneration"
    spec = SPECS[name]
    parts = {key: value for key, value in spec["config"].items() if key.endswith("_config")}
    write_folder({**spec, "config": {"architectures": [name], "thinker_config": parts}}, tmp_path)
    tensors = {key: numbers(key, *rest) for key, *rest in spec["tensors"]}
    short = {key.replace("model.language_model.", "model.model."): x for key, x in tensors.items()}
    save(tmp_path / "model.safetensors", {f"thinker.{key.removeprefix('model.')}": x for key, x in short.items()})
    with open_checkpoint(tmp_path) as model:
        assert model.metadata["qwen3vl.n_deepstack_layers"] == 0
        assert model.metadata["qwen3vl.rope.dimension_sections"].tolist() == [2, 3, 3, 0]
        assert nmse(logits_of(model, ids())[POSITIONS], STORED[name]).max() < 1e-9


def test_a_glm4v_without_sections_keeps_the_order_of_its_rows(tmp_path: Path) -> None:
    """Without M-RoPE sections the GGUF is a plain GLM 4, and K rows keep their order.

    Text logits are equal, because all sections use the same position.
    """
    spec = SPECS["Glm4vForConditionalGeneration"]
    inner = dict(spec["config"]["text_config"])
    inner["rope_parameters"] = {key: x for key, x in inner["rope_parameters"].items() if key != "mrope_section"}
    write_folder({**spec, "config": {**spec["config"], "text_config": inner}}, tmp_path)
    name = "model.language_model.layers.1.self_attn.k_proj.weight"
    with open_checkpoint(tmp_path) as model:
        assert "glm4.rope.dimension_sections" not in model.metadata
        np.testing.assert_array_equal(values(model.tensors["blk.1.attn_k.weight"]), numbers(name, [16, 32], 0.0))
        assert nmse(logits_of(model, ids())[POSITIONS], STORED["Glm4vForConditionalGeneration"]).max() < 1e-9


def test_what_a_config_json_of_llava_leaves_out(tmp_path: Path) -> None:
    """Pixtral 12B omits its head count, so transformers' defaults from Mistral 7B apply."""
    assumed = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "num_hidden_layers": 32}
    spec = SPECS["LlavaForConditionalGeneration"]
    inner = {key: x for key, x in spec["config"]["text_config"].items() if key not in assumed}
    write_folder({**spec, "config": {**spec["config"], "text_config": inner}}, tmp_path)
    check_refused(tmp_path, r"expected shape \(320, 4096\) \(rows, columns\), found \(320, 32\)")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "other text models": (
        "LlavaForConditionalGeneration", {"text_config": {"model_type": "qwen2"}},
        "model_type of the text model is qwen2; supported: llama, mistral",
    ),
    "InternVL around InternLM": (
        "InternVLForConditionalGeneration", {"text_config": {"model_type": "internlm2"}},
        "model_type of the text model is internlm2; supported: qwen2, qwen3",
    ),
    "sections of GLM": (
        "Glm4vForConditionalGeneration", {"text_config": {"rope_parameters": {"mrope_section": [1]}}},
        r"mrope_section is \[1\]; expected three numbers",
    ),
    "layers of Bamba": (
        "BambaForCausalLM", {"attn_layer_indices": [3]}, r"attn_layer_indices is \[3\]; expected layers below 3",
    ),
    "limits of Bamba": ("BambaForCausalLM", {"time_step_limit": [0.1, 1.0]}, "time_step_limit is .*has no limits"),
    "experts of Youtu": ("YoutuForCausalLM", {"n_routed_experts": 4}, "n_routed_experts is 4; the GGUF"),
    "halves of Youtu": ("YoutuForCausalLM", {"rope_interleave": False}, "rope_interleave is False; the GGUF"),
    "no table": ("Qwen3OmniMoeForConditionalGeneration", {"thinker_config": [1]}, "thinker_config is not an object"),
    "layers of Mamba 2": ("mamba-lm", {"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg.layer is Mamba2; the GGUF"),
    "layer norms": ("mamba-lm", {"rms_norm": None}, "rms_norm is False; the GGUF"),
    "ALiBi": ("falcon-rw", {"alibi": True}, "alibi is True; the GGUF"),
    "biases of ERNIE": ("ernie4_5-fused", {"use_bias": True}, "use_bias is True; the GGUF"),
    "letters": ("ExaoneMoEForCausalLM", {"sliding_window_pattern": "LLX"}, "pattern is LLX; expected a number, or"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_gguf_cannot_say_is_one_line(case: str, tmp_path: Path) -> None:
    name, config, message = REFUSED[case]
    if name in FURTHER:
        write_own(name, tmp_path, **config)
    else:
        of, more, _ = SAME.get(name, (name, {}, {}))
        spec = OTHERS[of]
        changed = {**spec["config"], **more, "architectures": [name]}
        for key, value in config.items():
            changed[key] = {**changed[key], **value} if isinstance(value, dict) else value
        write_folder({**spec, "config": {key: x for key, x in changed.items() if x is not None}}, tmp_path)
    check_refused(tmp_path, message)


def test_youtu_has_no_experts_whatever_its_config_json_counts(tmp_path: Path) -> None:
    """A Youtu checkpoint has no experts, so its expert keys are not written. llama.cpp rejects a GGUF with such keys
    but without expert tensors.
    """
    spec, more = SPECS["YoutuForCausalLM"], {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
    write_folder({**spec, "config": {**spec["config"], **more}}, tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert not [key for key in model.metadata if "expert_used" in key or "expert_group" in key]
        assert model.metadata["deepseek2.leading_dense_block_count"] == 2


def test_sections_of_ling_that_do_not_fit(tmp_path: Path) -> None:
    for wrong, told in (([1, 2, 2], "three numbers whose sum is 4"), ("x", "three numbers of pairs")):
        inner = {**FURTHER["bailingmoe3-vl"][0]["text_config"], "mrope_section": wrong}
        write_own("bailingmoe3-vl", tmp_path, text_config=inner)
        check_refused(tmp_path, f"mrope_section is .*expected {told}")


def test_scales_of_mimo_for_another_number_of_cards(tmp_path: Path) -> None:
    write_own("mimo2-cards", tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.qkv_proj.weight"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    data = path.read_bytes()[8 + length :]
    start, end = header[f"{name}_scale_inv"]["data_offsets"]
    header[f"{name}_scale_inv"] |= {"shape": [6, 1], "data_offsets": [start, end - 24]}
    header["unread"] = {"dtype": "F32", "shape": [6], "data_offsets": [end - 24, end]}
    path.write_bytes(blob(header, data))
    check_refused(tmp_path, r"qkv_proj.weight' \(1200, 32\) with scales \(6, 1\) is not in shares of 4 or 8 cards")


def test_mimo_without_fp8_has_its_rows_in_order(tmp_path: Path) -> None:
    write_own("mimo2-cards", tmp_path, quantization_config=None)
    tensors = {key: numbers(key, *rest) for key, *rest in FURTHER["mimo2-cards"][1]}
    save(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(tmp_path) as model:
        expected = tensors["model.layers.1.self_attn.qkv_proj.weight"]
        np.testing.assert_array_equal(values(model.tensors["blk.1.attn_qkv.weight"]), expected)


def test_two_dense_layers_behind_lfm2(tmp_path: Path) -> None:
    """GGUF supports one dense layer after LFM2, so a second is refused."""
    write_own("lfm2-colbert", tmp_path)
    path = tmp_path / "modules.json"
    path.write_text(path.read_text().replace("]", ', {"path": "1_Dense", "type": "pylate.models.Dense.Dense"}]'))
    check_refused(tmp_path, "holds 2 dense layers behind the model; files of this architecture hold one")
