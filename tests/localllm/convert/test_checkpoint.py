"""Hugging Face checkpoints give transformers' logits, and the metadata keys that llama.cpp's converter writes.

`hf_models` generates the checkpoints.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.convert import ConvertError, open_checkpoint
from localllm.tokenizer import Tokenizer
from tests.localllm.convert.support import HF, logits_of, values, write_f32
from tests.models.support import nmse

STORED = np.load(HF / "logits.npz")
IDS = [int(i) for i in STORED["ids"]]
FOLDERS = [name for name in STORED.files if name != "ids"]


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_transformers(name: str) -> None:
    with open_checkpoint(HF / name) as model:
        assert model.notes == ()
        assert nmse(logits_of(model, IDS), STORED[name]).max() < 1e-9


def test_a_converted_file_runs(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with open_checkpoint(HF / "llama-shards") as model:
        write_f32(model, path)
        tokenizer = Tokenizer.from_metadata(model.metadata)
    with localllm.load(path, threads=1) as loaded:
        assert nmse(loaded.logits(IDS), STORED["llama-shards"]).max() < 1e-5  # the KV cache is F16
        text = "Once upon a time there were 12 dogs."
        assert loaded.tokenize(text) == tokenizer.encode(text)
        assert loaded.detokenize(loaded.tokenize(text)).endswith(text)


def test_formats_are_those_of_the_folder() -> None:
    with open_checkpoint(HF / "experts") as model:
        formats = {name: tensor.format for name, tensor in model.tensors.items()}
    exact = {name for name in formats if "norm" in name or "ffn_gate_inp" in name}
    assert {formats[name] for name in exact} == {"F32"}
    assert {formats[name] for name in formats.keys() - exact} == {"BF16"}
    with open_checkpoint(HF / "mxfp4") as model:
        formats = {name: tensor.format for name, tensor in model.tensors.items()}
        assert model.tensors["blk.0.ffn_gate_exps.weight"].shape == (4, 64, 32)
    assert {f for name, f in formats.items() if "exps.weight" in name} == {"MXFP4"}
    assert {f for name, f in formats.items() if name.endswith((".bias", "sinks.weight"))} == {"F32"}


def test_keys_of_a_llama() -> None:
    with open_checkpoint(HF / "llama-shards") as model:
        stored, factors = model.stored, values(model.tensors["rope_freqs.weight"])
    assert {key: stored[key] for key in stored if key.startswith(("llama.", "general."))} == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "llama-shards",
        "general.size_label": "39K",
        "llama.vocab_size": 320,
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 8,
        "llama.attention.value_length": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 10000.0,
    }
    # The four wavelengths are 2 pi 10^i tokens. Llama 3 scaling keeps wavelengths below 32 / 4, and multiplies
    # wavelengths above 32 / 1 by 8.
    np.testing.assert_allclose(factors, [1, 8, 8, 8], rtol=1e-6)


def changed(folder: Path, name: str, file: str, **new: Any) -> Path:
    """Return a copy of a checkpoint with some keys of one JSON file replaced, or removed if None."""
    shutil.copytree(HF / name, folder, dirs_exist_ok=True)
    path = folder / file
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in {**old, **new}.items() if value is not None}))
    return folder


def test_llama3_factors_between_short_and_long_waves(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    with open_checkpoint(changed(tmp_path, "llama-shards", "config.json", rope_parameters=rope)) as model:
        factors = values(model.tensors["rope_freqs.weight"])
    waves = 2 * np.pi * 5.0 ** (np.arange(4) / 4)
    smooth = (32 / waves - 1) / 3
    np.testing.assert_allclose(factors[1:], (1 / ((1 - smooth) / 8 + smooth))[1:], rtol=1e-6)
    assert factors[0] == 1


OLDER: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # config.json as transformers 4 writes it
    "rope_scaling": (
        "llama-shards",
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"llama.rope.freq_base": 5e5, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    ),
    "yarn": (
        "llama-shards",
        {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.0,
                                                   "original_max_position_embeddings": 64, "beta_fast": 16}},
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
         "llama.rope.scaling.original_context_length": 64, "llama.rope.scaling.yarn_beta_fast": 16.0,
         "llama.rope.scaling.attn_factor": 1 / (0.1 * np.log(4.0) + 1)},
    ),
    "long": (
        "long-rope",
        {"rope_parameters": None, "rope_scaling": {"type": "su", "short_factor": [1] * 4, "long_factor": [2] * 4}},
        {"phi3.rope.scaling.original_context_length": 16, "phi3.rope.scaling.type": "longrope",
         "phi3.rope.scaling.attn_factor": np.sqrt(1 + np.log(16) / np.log(16))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OLDER)
def test_older_words_for_rope(case: str, tmp_path: Path) -> None:
    name, config, keys = OLDER[case]
    with open_checkpoint(changed(tmp_path, name, "config.json", **config)) as model:
        assert {key: model.stored.get(key) for key in keys} == pytest.approx(keys)


def test_text_config_counts_before_what_is_around_it(tmp_path: Path) -> None:
    folder = changed(tmp_path, "gemma-pieces", "config.json")
    config = json.loads((folder / "config.json").read_text())
    inner = {key: config.pop(key) for key in list(config) if key != "architectures"}
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 7, "text_config": inner}))
    with open_checkpoint(folder) as model:
        assert model.stored["gemma.embedding_length"] == 32


def test_card_and_sampling(tmp_path: Path) -> None:
    more = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "do_sample": True}
    folder = changed(tmp_path / "Tiny-Model", "llama-shards", "generation_config.json", **more)
    (folder / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage:\n- en\n- 'de'\ntags: [chat, \"small\"]\nbase_model: a/b\n---\n# Tiny\n"
    )
    with open_checkpoint(folder) as model:
        stored = dict(model.stored)
        assert stored["general.name"] == "Tiny-Model"
        assert stored["general.license"] == "apache-2.0"
        assert (stored["general.languages"], stored["general.tags"]) == (["en", "de"], ["chat", "small"])
        sampling = {k.rsplit(".", 1)[1]: v for k, v in stored.items() if k.startswith("general.sampling.")}
    assert sampling == {
        "temp": np.float32(0.6),
        "top_k": 20,
        "top_p": np.float32(0.9),
        "penalty_repeat": np.float32(1.1),
    }
    assert isinstance(sampling["top_k"], np.int32)


@pytest.mark.parametrize("text", ["", "no head", "---\nnever: ends\n", "---\n: x\n- y\n---\n"])
def test_a_strange_card_is_no_reason_to_fail(text: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, "llama-shards", "config.json")
    (folder / "README.md").write_text(text)
    with open_checkpoint(folder) as model:
        assert "general.license" not in model.stored


def test_a_card_that_cannot_be_read_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = changed(tmp_path, "llama-shards", "config.json")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    real = os.open

    def refusing(path: Any, *more: Any, **named: Any) -> int:
        if Path(os.fspath(path)).name == "README.md":  # simulated, because root ignores file permissions
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    with open_checkpoint(folder) as model:
        assert "general.license" not in model.stored
        assert model.stored["general.type"] == "model"
        note = "README.md cannot be read (Permission denied), so the file gets no license, tags and languages"
        assert model.notes.count(note) == 1


def test_the_name_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--Nice-1B" / "snapshots" / ("0123456789" * 4)
    with open_checkpoint(changed(folder, "llama-shards", "config.json")) as model:
        assert model.stored["general.name"] == "Nice-1B"


def test_templates(tmp_path: Path) -> None:
    stored = [{"name": "default", "template": "old"}, {"name": "tool-use", "template": "tools"}]
    folder = changed(tmp_path, "llama-shards", "tokenizer_config.json", chat_template=stored)
    with open_checkpoint(folder) as model:
        assert model.stored["tokenizer.chat_template"] == "old"
        assert model.stored["tokenizer.chat_template.tool_use"] == "tools"
        assert model.stored["tokenizer.chat_templates"] == ["tool_use"]
    (folder / "chat_template.jinja").write_text("new")
    with open_checkpoint(folder) as model:
        assert model.stored["tokenizer.chat_template"] == "new"


def test_an_output_that_repeats_the_embedding_is_left_out(tmp_path: Path) -> None:
    folder = changed(tmp_path, "gemma-pieces", "config.json")
    with open_checkpoint(folder) as model:
        assert "output.weight" not in model.tensors
    edit(folder / "model.safetensors", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    with open_checkpoint(folder) as model:
        assert "output.weight" not in model.tensors
    with open_checkpoint(HF / "experts") as model:
        assert "output.weight" in model.tensors


def test_notes_say_what_is_left_out(tmp_path: Path) -> None:
    with open_checkpoint(changed(tmp_path / "a", "experts", "config.json", sliding_window=100)) as model:
        assert model.notes == ("sliding_window 100 is left out: every layer of llama sees everything",)
    folder = changed(tmp_path / "b", "gemma-pieces", "config.json")
    edit(folder / "model.safetensors", lambda t: t.update({"vision_tower.x": t["model.norm.weight"]}))
    edit(folder / "model.safetensors", lambda t: t.update({"model.layers.2.y": t["model.norm.weight"]}))
    with open_checkpoint(folder) as model:
        assert model.notes == (
            "skipped 1 tensor for images or audio: the file holds the text model",
            "skipped 1 tensor of layers for multi-token prediction",
        )


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensor table in a safetensors header."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def shape(name: str, shape: list[int]) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(shape=shape)


NORM = "model.layers.1.input_layernorm.weight"
BAD_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "many layers": ({"num_hidden_layers": 1 << 20}, "num_hidden_layers is 1048576; supported: at most 1024"),
    "class": ({"architectures": ["T5Model"]}, r"class 'T5Model' cannot be converted; .*T5ForConditionalGen.*; docs"),
    "next class": (
        {"architectures": ["DeepseekV5ForCausalLM"]}, r"\(similar classes that can be: DeepseekV4ForCausalLM, .*; docs",
    ),
    "class unlike any": (
        {"architectures": ["XForCausalLM"]}, r"class 'XForCausalLM' cannot be converted; take a GGUF file .*l \(docs",
    ),
    "no class": ({"architectures": None}, "architectures is missing; expected the name of one model class"),
    "layers": ({"num_hidden_layers": None}, "num_hidden_layers is missing; expected a whole number from 1 up"),
    "text": ({"hidden_size": "32"}, "hidden_size is 32; expected a whole number"),
    "huge": ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776; expected"),
    "activation": ({"hidden_act": "relu"}, "hidden_act is relu; expected silu, which is what llama computes"),
    "rope": ({"rope_parameters": {"rope_type": "ntk"}}, "rope_type is ntk; expected one of default"),
    "rope shape": ({"rope_parameters": 5}, "rope_parameters is 5; expected an object"),
    "rope factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing; expected a number from 1 up"),
    "factors": (
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
        "long_factor is a list of 1; expected a list of 4 numbers",
    ),
    "eps": ({"rms_norm_eps": None}, "rms_norm_eps is missing; expected a small number"),
    "packed eight": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
        r"already quantized \(compressed-tensors int-quantized\)",
    ),
    "packed": ({"quantization_config": {"quant_method": "gptq"}}, r"already quantized \(gptq\); convert the model"),
    "blocks": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
        r"weight_block_size is \[128\]; expected rows and columns of a block",
    ),
    "more layers": ({"num_hidden_layers": 3}, r"blk.2.attn_norm.weight: the file does not hold this tensor; .* "
                    r"\(it is made of model.layers.2.input_layernorm.weight\)"),
    "heads": ({"num_key_value_heads": 4}, r"blk.0.attn_k.weight: expected shape .*, found \(16, 32\) .*k_proj"),
    "width": ({"intermediate_size": 48}, r"blk.0.ffn_gate.weight: expected shape \(48, 32\).*, found \(64, 32\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_a_config_that_does_not_fit_is_one_line(case: str, tmp_path: Path) -> None:
    change, message = BAD_CONFIG[case]
    folder = changed(tmp_path, "llama-shards", "config.json", **change)
    with pytest.raises(ConvertError, match=message) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(folder))


BAD_WEIGHTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda t: t.pop(NORM), r"blk.1.attn_norm.weight: the file does not hold .*model.layers.1.input_layer"),
    "no embedding": (lambda t: t.pop("model.embed_tokens.weight"), "the tensor of token embeddings is missing"),
    "shape": (shape(NORM, [2, 16]), r"blk.1.attn_norm.weight: expected shape \(32\).* found \(2, 16\)"),
    "expert": (
        lambda t: t.pop("model.layers.0.block_sparse_moe.experts.2.w1.weight"),
        "tensor 'model.layers.0.block_sparse_moe.experts.2.w1.weight' is missing",
    ),
    "last expert": (
        lambda t: t.pop("model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        r"blk.0.ffn_down_exps.weight: expected shape \(4, 32, 64\)",
    ),
    "unlike": (
        shape("model.layers.0.block_sparse_moe.experts.2.w1.weight", [32, 64]), "they must be alike to be one tensor"
    ),
    "further": (lambda t: t.update({"model.layers.1.odd": t[NORM]}), "'model.layers.1.odd' has no place in GGUF"),
    "not read": (
        lambda t: t.update({"model.layers.1.mlp.gate_proj.weight": t[NORM]}),
        "'model.layers.1.mlp.gate_proj.weight' has no place in GGUF",
    ),
    "elsewhere": (
        lambda t: t.update({"odd.1.self_attn.q_proj.weight": t[NORM]}), "'odd.1.self_attn.q_proj.weight' has no place"
    ),
    "numbers": (lambda t: t[NORM].update(dtype="I16"), "attn_norm.weight: is stored as I16; supported"),
    "fp8": (lambda t: t[NORM].update(dtype="F8_E4M3", shape=[64]), "is in FP8, but its scale .* is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_weights_that_do_not_fit_are_one_line(case: str, tmp_path: Path) -> None:
    change, message = BAD_WEIGHTS[case]
    folder = changed(tmp_path, "experts", "config.json")
    edit(folder / "model.safetensors", change)
    with pytest.raises(ConvertError, match=message) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(folder))


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="not a folder"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ConvertError, match=r"no config.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConvertError, match="is not JSON"):
        open_checkpoint(tmp_path)
    shutil.copy(HF / "experts" / "config.json", tmp_path)
    with pytest.raises(ConvertError, match=r"holds no \*.safetensors file"):
        open_checkpoint(tmp_path)
    shutil.copy(HF / "experts" / "model.safetensors", tmp_path)
    with pytest.raises(ConvertError, match=r"holds no tokenizer.json and no tokenizer.model"):
        open_checkpoint(tmp_path)


def test_fp8_weights_are_scaled(tmp_path: Path) -> None:
    """FP8 weights are multiplied by their scale: code 0x38 is 1, and the scale is 2."""
    folder = changed(tmp_path, "experts", "config.json", quantization_config={"quant_method": "fp8"})
    name, path = "model.layers.0.self_attn.o_proj.weight", folder / "model.safetensors"
    end = path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
    new = b"\x38" * 1024 + np.float32(2).tobytes()
    edit(path, lambda t: t.update({
        name: {"dtype": "F8_E4M3", "shape": [32, 32], "data_offsets": [end, end + 1024]},
        name + "_scale_inv": {"dtype": "F32", "shape": [], "data_offsets": [end + 1024, end + 1028]},
    }))  # fmt: skip
    path.write_bytes(path.read_bytes() + new)
    with open_checkpoint(folder) as model:
        np.testing.assert_array_equal(values(model.tensors["blk.0.attn_output.weight"]), np.full((32, 32), 2.0))


@pytest.mark.parametrize("kinds", [0.5, "full_attention", [["full_attention"]] * 4, ["full_attention"]])
def test_kinds_of_layers_of_the_wrong_shape_are_one_line(kinds: Any, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"layer_types .*sliding_attention or full_attention, \d+ times") as error:
        open_checkpoint(changed(tmp_path, "mxfp4", "config.json", layer_types=kinds))
    assert "\n" not in str(error.value)


# -- links and special files ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(HF / "llama-shards", tmp_path / "model")
    return tmp_path / "model"


READ = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"),
    *("additional_chat_templates/a.jinja", "README.md", "modules.json", "model-00001-of-00004.safetensors"),
)


@pytest.mark.parametrize("name", READ)
def test_no_link_leads_out_of_a_folder(name: str, folder: Path) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/etc/passwd")
    with pytest.raises(ConvertError, match=f"{name}: is a link to a file outside the folder") as error:
        open_checkpoint(folder)
    assert "root:" not in str(error.value)


def test_no_folder_of_templates_leads_out_either(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.jinja").write_text("secret")
    (folder / "additional_chat_templates").symlink_to(tmp_path / "other")
    with pytest.raises(ConvertError, match="additional_chat_templates: is a link"):
        open_checkpoint(folder)


def test_a_snapshot_of_the_hub_is_read_through_its_links(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number}f00")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}f00")
    with open_checkpoint(snapshot) as model:
        assert nmse(logits_of(model, IDS), STORED["llama-shards"]).max() < 1e-9


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_what_is_no_file_is_not_read(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "chat_template.jinja":
        open_checkpoint(folder).close()  # a FIFO counts as a missing file
        return
    with pytest.raises(ConvertError, match=r"no config\.json|holds no tokenizer"):
        open_checkpoint(folder)


LAYER, EXPERT = "model.layers.{}.self_attn.q_proj.weight", "model.layers.0.block_sparse_moe.experts.{}.w1.weight"


@pytest.mark.parametrize(
    "name",
    # Expert ids are limited to a million. Without the limit, the converter would generate that many tensor names.
    [*(LAYER.format(n) for n in ("1" * 400, "999999999", "١")), *(EXPERT.format(n) for n in ("999999", "١"))],
    ids=lambda name: name[:60],
)
def test_layers_and_experts_that_no_model_has(name: str, tmp_path: Path) -> None:
    shutil.copytree(HF / "experts", tmp_path / "model")
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps({name: entry}).encode()
    path = tmp_path / "model" / "model-00009-of-00009.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    for single in (tmp_path / "model").glob("model.safetensors*"):
        single.rename(single.with_name("model-00001-of-00009.safetensors"))
    with pytest.raises(ConvertError, match="has no place in GGUF files"):
        open_checkpoint(tmp_path / "model")
