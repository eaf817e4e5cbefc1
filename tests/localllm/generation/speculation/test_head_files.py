"""Prediction heads in a separate file: given as draft model, or found in the model's folder."""

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
from tests.localllm.generation.speculation.support import eager
from tests.models.kit import KIT

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 20}
KEPT = ("token_embd.weight", "output.weight", "output_norm.weight")  # llama.cpp's converter copies them
NAME = "qwen35-mtp"


def split(name: str, folder: Path, heads: str = "heads.gguf", **changed: Any) -> tuple[Path, Path]:
    """Write the layers and the heads of a test model to two files; `changed` replaces keys of the heads' file."""
    metadata, tensors = KIT[name].loaded()
    architecture = metadata["general.architecture"]
    blocks, count = (int(metadata[f"{architecture}.{key}"]) for key in ("block_count", "nextn_predict_layers"))
    new = [NewTensor(t.name, t.format, t.shape, t.rows) for t in tensors.values()]
    later = [t for t in new if t.name.startswith("blk.") and int(t.name.split(".")[1]) >= blocks - count]
    assert later
    write_gguf(folder / "model.gguf", metadata, [t for t in new if t not in later])
    given = metadata | {key if "." in key else f"{architecture}.{key}": value for key, value in changed.items()}
    write_gguf(folder / heads, given, [*later, *(t for t in new if t.name in KEPT)])
    return folder / "model.gguf", folder / heads


def loaded(path: Path, **options: Any) -> localllm.Model:
    return localllm.load(path, ctx_size=100, threads=1, **options)


def drafted(model: localllm.Model) -> tuple[list[int], int]:
    """Return the answer to a prompt, and how many tokens of it were drafted and accepted."""
    eager(model)
    ids = [int(token) for token in np.random.default_rng(7).integers(3, model.vocabulary, 20)]
    reply = model.generate(ids, **GREEDY)
    assert reply.usage.drafted > 20
    return reply.tokens, reply.usage.accepted


@pytest.mark.parametrize("name", [NAME, "step35-mtp", "deepseek2-mtp"])
def test_heads_in_a_file_draft_as_in_the_model_s_file(name: str, tmp_path: Path) -> None:
    path, heads = split(name, tmp_path)
    with loaded(KIT[name].write(tmp_path / "whole.gguf"), spec="mtp") as whole:
        expected, plan = drafted(whole), whole.plan
    with loaded(path) as plain:
        assert plain.plan is not None
        assert not any("nextn" in each for each in plain.plan.tensors)
    for spec in ("mtp", "draft"):
        with loaded(path, model_draft=heads, spec=spec) as model:
            assert model.draft is None
            assert drafted(model) == expected
            assert model.plan is not None
            assert plan is not None
            assert model.plan.tensors == plan.tensors  # embeddings and output are held once
    with pytest.raises(ModelError, match="has only next-token heads; open the model's own file, with model_draft=FILE"):
        loaded(heads)


def test_heads_beside_the_model_are_found(tmp_path: Path) -> None:
    path, heads = split(NAME, tmp_path, "mtp-model-Q8_0.gguf")
    (tmp_path / "mtp-a.gguf").write_bytes(b"GGUF")
    KIT["glm4moe-mtp"].write(tmp_path / "mtp-model.gguf")  # a whole model, with a more similar name
    with loaded(path, spec="mtp") as model:
        assert model.drafter is not None
        assert model.drafter.path == heads
        expected = drafted(model)
    other = heads.rename(tmp_path / "other.gguf")
    with pytest.raises(LocalLLMError, match="none in the file or its folder"):
        loaded(path, spec="mtp")
    with loaded(path, model_draft=other, spec="mtp") as model:
        assert drafted(model) == expected


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"general.architecture": "qwen35moe"}, "general.architecture: expected qwen35, as in the model, found qwen"),
        ({"embedding_length": 64}, "qwen35.embedding_length: expected 128, as in the model, found 64"),
        ({"block_count": 6}, "qwen35.block_count: expected 4 layers before the heads, as in the model, found 5"),
        ({"nextn_predict_layers": 0}, "qwen35.block_count: expected 4 layers before the heads, as in the model, found"),
        ({"nextn_predict_layers": 5}, "qwen35.nextn_predict_layers: expected"),
        ({"nextn_predict_layers": (1 << 32) - 1}, "qwen35.nextn_predict_layers: expected"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "qwen35.vocab_size: expected 128, as in the model, found 2"),
    ],
)
def test_keys_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], problem: str
) -> None:
    path, heads = split(NAME, tmp_path, **changed)
    assert main(["bench", str(path), "-md", str(heads)]) != 0
    line = capsys.readouterr().err.strip()
    assert f"{heads}: cannot draft for {path}: {problem}" in line
    assert "\n" not in line
    assert line.endswith("use a file made for this model")


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path, heads = split(NAME, tmp_path)
    metadata, tensors = KIT[NAME].loaded()
    new = [NewTensor(t.name, t.format, t.shape, t.rows) for t in tensors.values() if t.name.startswith("blk.4.")]
    for name in ("nextn.eh_proj", "nextn.hnorm", "attn_k"):
        write_gguf(heads, metadata, [each for each in new if each.name != f"blk.4.{name}.weight"], overwrite=True)
        with pytest.raises(LocalLLMError, match=rf"blk\.4\.{name}\.weight: this tensor is missing") as error:
            loaded(path, model_draft=heads)
        assert str(error.value).startswith(f"{heads}: cannot draft for {path}: ")
    wide = NewTensor("blk.4.nextn.eh_proj.weight", "F32", (128, 128), np.zeros((128, 512), np.uint8))
    write_gguf(heads, metadata, [wide if each.name == wide.name else each for each in new], overwrite=True)
    with pytest.raises(LocalLLMError, match=r"eh_proj\.weight: expected shape \(128, 256\)"):
        loaded(path, model_draft=heads)


def test_a_whole_model_is_not_a_file_of_heads(tmp_path: Path) -> None:
    path = KIT[NAME].write(tmp_path / "m.gguf")
    with pytest.raises(LocalLLMError, match="a whole model, not a file of prediction heads; use draft or auto"):
        loaded(path, model_draft=path, spec="mtp")
