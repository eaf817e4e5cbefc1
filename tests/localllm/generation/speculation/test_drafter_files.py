"""EAGLE-3 and Gemma 4 assistant files that do not fit a model, or are damaged, are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.base.errors import LocalLLMError
from localllm.cli.main import main
from localllm.gguf import NewTensor, write_gguf
from localllm.models import ModelError
from tests.models.drafters import ASSISTANTS, EAGLES
from tests.models.kit import KIT

OWN = EAGLES["own"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KIT[OWN.model].write(tmp_path_factory.mktemp("m") / "model.gguf")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"target_layers": np.array([0, 1, 4], np.int32)}, "target_layers: expected an integer from 0 to 3, found 4"),
        ({"target_layers": np.array([0, 1], np.int32)}, "target_layers: expected a list of 3 integers"),
        ({"target_layers": "abc"}, "target_layers: expected a list of 3 integers, found 'abc'"),
        ({"target_hidden_size": 256}, "target_hidden_size: expected 128, as in the model, found 256"),
        ({"block_count": 2}, "block_count: expected 1, found 2"),
        ({"embedding_length": 1 << 30}, "embedding_length: expected an integer"),
        ({"norm_before_fc": 3}, "norm_before_fc: expected true or false"),
        ({"attention__head_count": 3}, "attention.head_count"),
    ],
)
def test_keys_that_do_not_fit(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], problem: str
) -> None:
    path = OWN.write(tmp_path / "eagle3.gguf", **changed)
    assert main(["bench", str(model), "-md", str(path)]) != 0
    line = capsys.readouterr().err.strip()
    assert f"{path}: cannot draft for {model}: eagle3.{problem}" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("name", "shape", "values", "problem"),
    [
        ("fc.weight", None, None, r"fc\.weight: this tensor is missing"),
        ("blk.0.attn_norm_2.weight", None, None, r"blk\.0\.attn_norm_2\.weight: this tensor is missing"),
        ("fc.weight", (64, 128), np.zeros(64 * 128, np.float32), r"fc\.weight: expected shape \(64, 384\)"),
        ("token_embd.weight", None, None, r"token_embd\.weight: expected shape \(128, 64\) .*, found \(128, 128\)"),
        ("output.weight", None, None, r"output\.weight: expected shape \(48, 64\) .*, found \(128, 128\)"),
        ("d2t", None, None, r"output\.weight: expected shape \(128, 64\) .*, found \(48, 64\)"),
        ("d2t", (48,), np.full(48, 1 << 40), "d2t: expected tokens from 0 to 127, found 1099511627776"),
        ("d2t", (48,), np.full(48, -1), "d2t: expected tokens from 0 to 127, found -1"),
        ("d2t", (48,), np.full(48, 5), "d2t: expected different tokens, found one twice"),
        ("d2t", (200,), np.arange(200), r"d2t: expected 1 to 128 tokens in format I64, found I64 \(200\)"),
        ("d2t", (48,), np.zeros(48, np.float32), r"d2t: expected .* in format I64, found F32 \(48\)"),
    ],
)
def test_tensors_that_do_not_fit(
    model: Path, tmp_path: Path, name: str, shape: tuple[int, ...] | None, values: np.ndarray | None, problem: str
) -> None:
    metadata, tensors = OWN.loaded()
    new = [NewTensor(t.name, t.format, t.shape, t.rows) for t in tensors.values() if t.name != name]
    if shape is not None and values is not None:
        format = "I64" if values.dtype == np.int64 else "F32"
        new.append(NewTensor(name, format, shape, values.view(np.uint8).reshape(int(np.prod(shape[:-1])), -1)))
    write_gguf(path := tmp_path / "eagle3.gguf", metadata, new)
    with pytest.raises(LocalLLMError, match=problem) as error:
        localllm.load(model, ctx_size=64, threads=1, model_draft=path)
    assert str(error.value).startswith(f"{path}: cannot draft for {model}: ")


def test_other_models_and_other_uses(model: Path, tmp_path: Path) -> None:
    path = OWN.write(tmp_path / "eagle3.gguf")
    with pytest.raises(ModelError, match="eagle3 files draft for a model; open the model itself, with model_draft"):
        localllm.load(path)
    streams = KIT["deepseek4-moe"].write(tmp_path / "streams.gguf")
    width = int(KIT["deepseek4-moe"].loaded()[0]["deepseek4.embedding_length"])
    other = EAGLES["own"].write(tmp_path / "other.gguf", target_hidden_size=width)
    with pytest.raises(LocalLLMError, match=r"several residual streams|vocab_size|target_layers"):
        localllm.load(streams, ctx_size=64, threads=1, model_draft=other)
    with localllm.load(model, ctx_size=64, threads=1, model_draft=path, spec="off") as plain:
        assert plain.drafter is None
        assert plain.plan is not None
        assert not plain.plan.drafts


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"embedding_length_out": 64}, "embedding_length_out: expected 128, as in the model, found 64"),
        ({"attention__sliding_window": 9}, "attention.sliding_window: expected 8, as in the model, found 9"),
        ({"attention__key_length": 32, "attention__value_length": 32, "rope__dimension_count": 32},
         "attention.key_length: expected 64 in layer 1, as in the model, found 32"),
        ({"attention__head_count": 1}, "attention.head_count"),
        ({"block_count": 1 << 20}, "block_count: expected an integer"),
    ],
)  # fmt: skip
def test_keys_of_an_assistant_that_do_not_fit(tmp_path: Path, changed: dict[str, Any], problem: str) -> None:
    given = ASSISTANTS["assistant"]
    model = KIT[given.model].write(tmp_path / "model.gguf")
    path = given.write(tmp_path / "assistant.gguf", **changed)
    with pytest.raises(LocalLLMError, match=problem) as error:
        localllm.load(model, ctx_size=64, threads=1, model_draft=path)
    assert str(error.value).startswith(f"{path}: cannot draft for {model}: gemma4-assistant.")


@pytest.mark.parametrize("name", ["nextn.pre_projection", "nextn.post_projection", "blk.2.attn_q", "token_embd"])
def test_tensors_that_an_assistant_lacks(tmp_path: Path, name: str) -> None:
    given = ASSISTANTS["assistant"]
    model, (metadata, tensors) = KIT[given.model].write(tmp_path / "model.gguf"), given.loaded()
    new = [NewTensor(t.name, t.format, t.shape, t.rows) for t in tensors.values() if t.name != f"{name}.weight"]
    write_gguf(path := tmp_path / "assistant.gguf", metadata, new)
    with pytest.raises(LocalLLMError, match=rf"{name}\.weight: this tensor is missing"):
        localllm.load(model, ctx_size=64, threads=1, model_draft=path)


def test_an_architecture_that_is_not_a_name(model: Path, tmp_path: Path) -> None:
    path = OWN.write(tmp_path / "eagle3.gguf")
    metadata, tensors = OWN.loaded()
    new = [NewTensor(t.name, t.format, t.shape, t.rows) for t in tensors.values()]
    write_gguf(path, metadata | {"general.architecture": np.array([1, 2], np.int32)}, new, overwrite=True)
    with pytest.raises(ModelError, match=r"general\.architecture: expected a name"):
        localllm.load(model, ctx_size=64, threads=1, model_draft=path)


def test_keys_that_an_assistant_ignores(tmp_path: Path) -> None:
    given = ASSISTANTS["assistant"]
    model = KIT[given.model].write(tmp_path / "model.gguf")
    path = given.write(tmp_path / "assistant.gguf", embedding_length_per_layer_input=16)
    with localllm.load(model, ctx_size=64, threads=1, model_draft=path) as drafting:
        assert drafting.engine.draft_heads


def test_an_assistant_for_a_model_without_such_layers(model: Path, tmp_path: Path) -> None:
    path = ASSISTANTS["assistant"].write(tmp_path / "assistant.gguf")
    with pytest.raises(LocalLLMError, match="reads the cache of a Gemma 4 model, and this model has other layers"):
        localllm.load(model, ctx_size=64, threads=1, model_draft=path)
