"""Hugging Face checkpoints give transformers' logits, and the metadata keys that llama.cpp's converter writes.

`hf_models` generates the checkpoints.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.convert import ConvertError, open_checkpoint
from localllm.tokenizer import Tokenizer
from tests.localllm.convert import hf_settings
from tests.localllm.convert.support import (
    HF,
    blob,
    check_refused,
    edit_json,
    edit_tensors,
    logits_of,
    values,
    write_f32,
)
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
        "general.architecture": "llama", "general.type": "model", "general.name": "llama-shards",
        "general.size_label": "39K", "llama.vocab_size": 320, "llama.block_count": 2, "llama.context_length": 256,
        "llama.embedding_length": 32, "llama.feed_forward_length": 64, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.attention.key_length": 8, "llama.attention.value_length": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.rope.dimension_count": 8, "llama.rope.freq_base": 1e4,
    }  # fmt: skip
    # The four wavelengths are 2 pi 10^i tokens. Llama 3 scaling keeps wavelengths below 32 / 4, and multiplies
    # wavelengths above 32 / 1 by 8.
    np.testing.assert_allclose(factors, [1, 8, 8, 8], rtol=1e-6)


def changed(folder: Path, name: str, file: str = "config.json", **new: Any) -> Path:
    """Return a copy of a checkpoint with some keys of one JSON file replaced, or removed if None."""
    shutil.copytree(HF / name, folder, dirs_exist_ok=True)
    edit_json(folder / file, **new)
    return folder


def test_llama3_factors_between_short_and_long_waves(tmp_path: Path) -> None:
    rope = {**hf_settings.LLAMA3, "rope_theta": 5.0}
    with open_checkpoint(changed(tmp_path, "llama-shards", rope_parameters=rope)) as model:
        factors = values(model.tensors["rope_freqs.weight"])
    waves = 2 * np.pi * 5.0 ** (np.arange(4) / 4)
    smooth = (32 / waves - 1) / 3
    np.testing.assert_allclose(factors[1:], (1 / ((1 - smooth) / 8 + smooth))[1:], rtol=1e-6)
    assert factors[0] == 1


def test_text_config_counts_before_what_is_around_it(tmp_path: Path) -> None:
    folder = changed(tmp_path, "gemma-pieces")
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
    expected = {"temp": 0.6, "top_k": 20, "top_p": 0.9, "penalty_repeat": 1.1}
    assert sampling == {key: x if key == "top_k" else np.float32(x) for key, x in expected.items()}
    assert isinstance(sampling["top_k"], np.int32)


@pytest.mark.parametrize("text", ["", "no head", "---\nnever: ends\n", "---\n: x\n- y\n---\n"])
def test_a_strange_card_is_no_reason_to_fail(text: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, "llama-shards")
    (folder / "README.md").write_text(text)
    with open_checkpoint(folder) as model:
        assert "general.license" not in model.stored


def test_a_card_that_cannot_be_read_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = changed(tmp_path, "llama-shards")
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
    with open_checkpoint(changed(folder, "llama-shards")) as model:
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


def test_notes_say_what_is_left_out(tmp_path: Path) -> None:
    with open_checkpoint(changed(tmp_path / "a", "experts", sliding_window=100)) as model:
        assert model.notes == ("sliding_window 100 is ignored: every layer of llama has full attention",)
    folder = changed(tmp_path / "b", "gemma-pieces")
    edit_tensors(folder / "model.safetensors", lambda t: t.update({"vision_tower.x": t["model.norm.weight"]}))
    edit_tensors(folder / "model.safetensors", lambda t: t.update({"model.layers.2.y": t["model.norm.weight"]}))
    with open_checkpoint(folder) as model:
        assert model.notes == (
            "skipped 1 tensor for images or audio: the file holds the text model",
            "skipped 1 tensor of layers for multi-token prediction",
        )


def test_folders_that_are_none(tmp_path: Path) -> None:
    check_refused(tmp_path / "nothing", "not a folder")
    check_refused(tmp_path, r"no config.json")
    (tmp_path / "config.json").write_text("{")
    check_refused(tmp_path, "is not JSON")
    shutil.copy(HF / "experts" / "config.json", tmp_path)
    check_refused(tmp_path, r"no \*.safetensors file")
    shutil.copy(HF / "experts" / "model.safetensors", tmp_path)
    check_refused(tmp_path, r"no tokenizer.json or tokenizer.model")


def test_fp8_weights_are_scaled(tmp_path: Path) -> None:
    """FP8 weights are multiplied by their scale: code 0x38 is 1, and the scale is 2."""
    folder = changed(tmp_path, "experts", quantization_config={"quant_method": "fp8"})
    name, path = "model.layers.0.self_attn.o_proj.weight", folder / "model.safetensors"
    end = path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
    new = {
        name: {"dtype": "F8_E4M3", "shape": [32, 32], "data_offsets": [end, end + 1024]},
        f"{name}_scale_inv": {"dtype": "F32", "shape": [], "data_offsets": [end + 1024, end + 1028]},
    }
    edit_tensors(path, lambda t: t.update(new), b"\x38" * 1024 + np.float32(2).tobytes())
    with open_checkpoint(folder) as model:
        np.testing.assert_array_equal(values(model.tensors["blk.0.attn_output.weight"]), np.full((32, 32), 2.0))


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
    check_refused(folder, "additional_chat_templates: is a link")


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
    check_refused(folder, r"no config\.json|no tokenizer")


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
    (tmp_path / "model" / "model-00009-of-00009.safetensors").write_bytes(blob({name: entry}, bytes(4)))
    for single in (tmp_path / "model").glob("model.safetensors*"):
        single.rename(single.with_name("model-00001-of-00009.safetensors"))
    check_refused(tmp_path / "model", "cannot be stored in GGUF files")
