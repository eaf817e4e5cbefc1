"""Pocket TTS checkpoints, which have no config.json. `test_own` compares their conversion with llama.cpp's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.convert import ConvertError, open_checkpoint
from localllm.convert.hf_config import read_config
from localllm.convert.recipes.pocket_tts import told_by_tensors
from tests.localllm.convert.hf_own import OWN, write_own
from tests.localllm.convert.hf_synthetic import numbers
from tests.localllm.convert.support import check_refused, save, values

VOICE, ROWS, WIDTH = "flow_lm.bos_before_voice", 320, 128


def given() -> dict[str, np.ndarray]:
    return {name: numbers(name, shape, base) for name, shape, base in OWN["pockettts"][1]}


def test_a_model_without_a_row_that_begins_a_voice(tmp_path: Path) -> None:
    write_own("pockettts", tmp_path)
    with open_checkpoint(tmp_path) as model:
        tokens, table = model.metadata["tokenizer.ggml.tokens"], values(model.tensors["token_embd.weight"])
    tensors = given()
    np.testing.assert_array_equal(table[ROWS], tensors.pop(VOICE)[0, 0])
    save(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(tmp_path) as model:
        assert model.metadata["tokenizer.ggml.tokens"] == [text for text in tokens if text != "<|bos_before_voice|>"]
        found = model.tensors["token_embd.weight"]
        np.testing.assert_array_equal(values(found), np.delete(table, ROWS, axis=0))
        np.testing.assert_array_equal(found.read(ROWS - 1, ROWS + 1), found.read(0, ROWS + 1)[ROWS - 1 :])


def test_a_folder_of_another_model_without_config_json(tmp_path: Path) -> None:
    write_own("pockettts", tmp_path)
    tensors = given()
    del tensors["flow_lm.bos_emb"]
    save(tmp_path / "model.safetensors", tensors)
    assert told_by_tensors(tmp_path) is None
    with pytest.raises(ConvertError, match=r"no config\.json; give a model folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert told_by_tensors(tmp_path) is None


def test_a_config_json_counts(tmp_path: Path) -> None:
    write_own("pockettts", tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    assert told_by_tensors(tmp_path) is None
    assert read_config(tmp_path).values == {"architectures": ["X"]}


BAD: dict[str, tuple[dict[str, list[int] | None], str]] = {
    "no table": ({"flow_lm.conditioner.embed.weight": None}, r"conditioner\.embed\.weight' is no matrix or missing"),
    "a vector": ({"flow_lm.transformer.layers.0.linear1.weight": [192]}, r"linear1\.weight' is no matrix or missing"),
    "width": ({"flow_lm.conditioner.embed.weight": [ROWS, 100]}, "is 100 wide; expected heads of 64"),
    "latent": ({"flow_lm.bos_emb": [7]}, r"input_linear\.weight: is \(128, 8\); expected \(128, 7\)"),
    "a layer": ({"flow_lm.transformer.layers.1.linear2.weight": None}, r"made of flow_lm\..*layers\.1\.linear2"),
    "another part": ({"flow_lm.x.weight": [4]}, r"'flow_lm\.x\.weight' has no place in GGUF files of pockettts"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_damaged_folders_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    changes, message = BAD[case]
    write_own("pockettts", tmp_path)
    tensors = given() | {name: np.ones(shape, np.float32) for name, shape in changes.items() if shape is not None}
    left = {name: x for name, x in tensors.items() if changes.get(name, []) is not None}
    save(tmp_path / "model.safetensors", left)
    check_refused(tmp_path, message)
