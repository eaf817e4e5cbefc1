"""Converted encoders and embedding models give transformers' hidden states, embeddings and scores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.backends import reference_operations
from localllm.convert import ConvertError, open_checkpoint
from localllm.models import ARCHITECTURES, Pooler, PoolingHead, head, read_config, record
from tests.localllm.convert.hf_encoders import ENCODERS, read_encoders, write_encoder
from tests.localllm.convert.hf_models import ids
from tests.localllm.convert.hf_synthetic import DATA, POSITIONS, numbers, read_specs, write_folder
from tests.localllm.convert.hf_tokenizers import TEXT, bpe_tokenizer
from tests.localllm.convert.support import save
from tests.models.support import Driver, bind_reference, nmse

SPECS, STORED = read_encoders(), np.load(DATA / "hf_encoders.npz")
POOLINGS = {"": "mean", "mean": "mean", "cls": "cls", "lasttoken": "last"}


def exact_gelu(x: np.ndarray) -> np.ndarray:
    """Return exact GELU, which these models were trained with.

    The kernels use the tanh approximation, as llama.cpp does.
    """
    return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


@pytest.mark.parametrize("name", ENCODERS)
def test_results_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not name.startswith("gemma"):
        monkeypatch.setattr(reference_operations, "_gelu", exact_gelu)
        monkeypatch.setitem(reference_operations._ACTIVATIONS, "gelu", exact_gelu)
        monkeypatch.setattr(head, "_gelu", exact_gelu)
    write_encoder(name, SPECS[name], tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert model.notes == ()
        architecture = ARCHITECTURES[model.metadata["general.architecture"]]
        config = read_config(model.metadata, architecture.name)
        plan = record(config, architecture, model.tensors, embeddings=True)
        rows = Driver(bind_reference(plan)).step([(0, ids())])
        pooler = Pooler(config, PoolingHead.of(config, architecture, model.tensors))
    assert nmse(rows[POSITIONS], STORED[name]).max() < 1e-10
    ranks = f"{name}:scores" in STORED
    assert config.pooling == ("rank" if ranks else POOLINGS[ENCODERS[name][4]])
    if ranks:
        scores = STORED[f"{name}:scores"]
        if name.startswith("qwen3"):  # softmax over the "yes" and "no" logits
            scores = 1.0 / (1.0 + np.exp([-scores[0], scores[0]]))
        assert nmse(pooler(rows, "rank"), scores) < 1e-10
    if f"{name}:pooled" in STORED:
        assert nmse(pooler(rows, config.pooling), STORED[f"{name}:pooled"]) < 1e-10


def test_keys_of_a_reranker(tmp_path: Path) -> None:
    write_encoder("bert-rank", SPECS["bert-rank"], tmp_path)
    with open_checkpoint(tmp_path) as model:
        keys = {key.removeprefix("bert."): value for key, value in model.stored.items()}
        shapes = {name: tensor.shape for name, tensor in model.tensors.items() if name.startswith("cls")}
    assert keys["attention.causal"] is False
    assert keys["pooling_type"] == 4
    assert keys["classifier.output_labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert keys["tokenizer.ggml.token_type_count"] == 2
    assert shapes == {"cls.weight": (32, 32), "cls.bias": (32,), "cls.output.weight": (3, 32), "cls.output.bias": (3,)}
    write_encoder("modern-bert-rank", SPECS["modern-bert-rank"], tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert model.stored["modern-bert.classifier.pooling_type"] == 1


def test_positions_of_roberta_begin_behind_those_of_the_padding(tmp_path: Path) -> None:
    write_encoder("roberta", SPECS["roberta"], tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert model.metadata["bert.context_length"] == 255
        assert model.tensors["position_embd.weight"].shape == (255, 32)


def test_config_json_of_nomics_own_code(tmp_path: Path) -> None:
    spec = read_encoders()["nomic-bert"]
    older = {
        "num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
        "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
    }  # fmt: skip
    left_out = ("hidden_act", "rope_parameters", "head_dim")
    spec["config"] = {older.get(key, key): value for key, value in spec["config"].items() if key not in left_out}
    spec["config"] |= {"activation_function": "swiglu", "rotary_emb_base": 500, "max_trained_positions": 100}
    write_encoder("nomic-bert", spec, tmp_path)
    with open_checkpoint(tmp_path) as model:
        keys = {key.removeprefix("nomic-bert."): value for key, value in model.metadata.items()}
    expected = {
        "block_count": 2, "embedding_length": 32, "attention.head_count": 4, "feed_forward_length": 48,
        "context_length": 100, "attention.layer_norm_epsilon": 1e-12, "rope.freq_base": 500.0,
    }  # fmt: skip
    assert {key: keys[key] for key in expected} == expected


def _edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return edit


BAD: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "relative positions": (
        "bert", _edit("config.json", lambda c: {**c, "position_embedding_type": "relative_key"}),
        "position_embedding_type is relative_key",
    ),
    "adapters": ("xlm-roberta", _edit("config.json", lambda c: {**c, "lora_adaptations": ["x"]}), "adapters of tasks"),
    "experts": (
        "nomic-bert", _edit("config.json", lambda c: {**c, "moe_every_n_layers": 2}),
        "moe_every_n_layers is 2; the GGUF architecture has no place for the bias of experts' sums",
    ),
    "causal gemma": (
        "gemma-embedding", _edit("config.json", lambda c: {**c, "use_bidirectional_attention": False}),
        "use_bidirectional_attention is False",
    ),
    "layers": (
        "modern-bert", _edit("config.json", lambda c: {**c, "layer_types": ["sliding_attention"] * 5}),
        "full attention in layers 0, n, 2n",
    ),
    "pooling": (
        "bert", _edit("1_Pooling/config.json", lambda c: {**c, "pooling_mode_mean_tokens": True}),
        "the pooling is mean, cls; supported: one of mean, cls, lasttoken",
    ),
    "no pooling": ("bert", lambda folder: (folder / "1_Pooling" / "config.json").unlink(), "json: cannot be read"),
    "modules": ("bert", _edit("modules.json", lambda c: [{**c[0], "path": "../x"}]), "is not a folder inside this one"),
    "activation of a dense layer": (
        "gemma-embedding", _edit("2_Dense/config.json", lambda c: {**c, "activation_function": "torch.nn.Tanh"}),
        "with activation torch.nn.Tanh; supported: two layers",
    ),
    "no dense layer": (
        "gemma-embedding", lambda folder: (folder / "3_Dense" / "model.safetensors").unlink(), "cannot be opened",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_a_file_cannot_hold_is_one_line(case: str, tmp_path: Path) -> None:
    name, change, expected = BAD[case]
    write_encoder(name, SPECS[name], tmp_path)
    change(tmp_path)
    with pytest.raises(ConvertError) as caught:
        open_checkpoint(tmp_path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_dense_layer_that_a_file_cannot_hold_is_told(tmp_path: Path) -> None:
    write_encoder("bert", SPECS["bert"], tmp_path)
    _edit("modules.json", lambda modules: [*modules, {"path": "2_Dense", "type": "models.Dense"}])(tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert model.notes == ("2_Dense is left out: files of bert hold no dense layer behind the pooling",)


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3_rerankers_score_yes_against_no(tied: bool, tmp_path: Path) -> None:
    """If the model card names a reranker, the score is the probability of "yes" from the logits of the last token."""
    spec = read_specs()["qwen3"]
    assert spec["config"]["tie_word_embeddings"] is True
    write_folder(spec, tmp_path)
    bpe_tokenizer("qwen2", texts=["yes\nno\n" * 9, TEXT]).save(str(tmp_path / "tokenizer.json"))
    ids_of = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    (tmp_path / "README.md").write_text("# Qwen3-Reranker-0.6B")
    if not tied:
        tensors = {key: numbers(key, *rest) for key, *rest in spec["tensors"]}
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0
        save(tmp_path / "model.safetensors", tensors)
        (tmp_path / "config.json").write_text(json.dumps({**spec["config"], "tie_word_embeddings": False}))
    with open_checkpoint(tmp_path) as model:
        config = read_config(model.metadata, "qwen3")
        rows = Driver(bind_reference(record(config, ARCHITECTURES["qwen3"], model.tensors, embeddings=True)))
        pooler = Pooler(config, PoolingHead.of(config, ARCHITECTURES["qwen3"], model.tensors))
        score = pooler(rows.step([(0, ids())]), config.pooling)
        assert "{query}" in model.metadata["tokenizer.chat_template.rerank"]
        assert list(model.stored["qwen3.classifier.output_labels"]) == ["yes", "no"]
    two = np.load(DATA / "hf_all.npz")["qwen3"][-1][[ids_of["yes"], ids_of["no"]]].astype(np.float64)
    np.testing.assert_allclose(score, np.exp(two) / np.exp(two).sum(), rtol=1e-5)
