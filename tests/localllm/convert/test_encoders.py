"""Encoders and embedding models: keys, what a file cannot hold, and Qwen 3's rerankers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import open_checkpoint
from tests.localllm.convert.checkpoints import STORED, tensors_of, write
from tests.localllm.convert.hf_tokenizers import TEXT, bpe_tokenizer
from tests.localllm.convert.support import check_refused, edit_json
from tests.localllm.convert.test_stored import embedded


def edited(name: str, **new: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / name, **new)


def _outside(folder: Path) -> None:
    path = folder / "modules.json"
    path.write_text(path.read_text().replace('"path": ""', '"path": "../x"'))


BAD: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "pooling": (
        "bert", edited("1_Pooling/config.json", pooling_mode_mean_tokens=True),
        "the pooling is mean, cls; supported: one of mean, cls, lasttoken",
    ),
    "no pooling": ("bert", lambda folder: (folder / "1_Pooling" / "config.json").unlink(), "json: cannot be read"),
    "modules": ("bert", _outside, "is not a folder inside this one"),
    "activation of a dense layer": (
        "gemma-embedding", edited("2_Dense/config.json", activation_function="torch.nn.Tanh"),
        "with activation torch.nn.Tanh; supported: two layers",
    ),
    "no dense layer": (
        "gemma-embedding", lambda folder: (folder / "3_Dense" / "model.safetensors").unlink(), "cannot be opened",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_a_file_cannot_hold_is_one_line(case: str, tmp_path: Path) -> None:
    name, change, message = BAD[case]
    change(write(name, tmp_path))
    check_refused(tmp_path, message)


def test_a_dense_layer_that_a_file_cannot_hold_is_told(tmp_path: Path) -> None:
    path = write("bert", tmp_path) / "modules.json"
    path.write_text(path.read_text().replace("]", ', {"path": "2_Dense", "type": "models.Dense"}]'))
    with open_checkpoint(tmp_path) as model:
        assert model.notes == ("2_Dense is skipped: files of bert have no dense layer after the pooling",)


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3_rerankers_score_yes_against_no(tied: bool, tmp_path: Path) -> None:
    """If the model card names a reranker, the score is the probability of "yes" from the logits of the last token."""
    tensors = tensors_of("qwen3")
    if not tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0
    write("qwen3", tmp_path, tensors, tie_word_embeddings=tied)
    bpe_tokenizer("qwen2", texts=["yes\nno\n" * 9, TEXT]).save(str(tmp_path / "tokenizer.json"))
    ids_of = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    (tmp_path / "README.md").write_text("# Qwen3-Reranker-0.6B")
    with open_checkpoint(tmp_path) as model:
        config, rows, pooler = embedded(model)
        score = pooler(rows, config.pooling)
        assert "{query}" in model.metadata["tokenizer.chat_template.rerank"]
        assert list(model.stored["qwen3.classifier.output_labels"]) == ["yes", "no"]
    two = STORED["qwen3"][-1][[ids_of["yes"], ids_of["no"]]].astype(np.float64)
    np.testing.assert_allclose(score, np.exp(two) / np.exp(two).sum(), rtol=1e-5)
