"""Every model of the tables converts and gives the results that transformers stored."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.backends import reference_operations
from localllm.convert import Checkpoint, open_checkpoint
from localllm.convert.recipes.table import RECIPES
from localllm.models import ARCHITECTURES, Pooler, PoolingHead, architecture_of, head, read_config, record
from tests.localllm.convert.checkpoints import (
    LEFT_OUT,
    MODELS,
    OWN,
    SPECS,
    STORED,
    TABLES,
    check_logits,
    tensors_of,
    write,
)
from tests.localllm.convert.hf_encoders import ENCODERS, T5
from tests.localllm.convert.hf_multimodal import CLASSES, TEXT
from tests.localllm.convert.weights import ANSWER, POSITIONS, PROMPT, ids
from tests.models.support import Driver, bind_reference, nmse

GENERATING = [name for name in (*MODELS, *CLASSES) if name in SPECS]
POOLINGS = {"": "mean", "lasttoken": "last"}


def test_every_recipe_is_of_an_architecture_that_runs() -> None:
    """The architecture of every conversion recipe is implemented. All architectures except nomic-bert-moe and
    chameleon have a recipe.
    """
    assert set(RECIPES) <= set(ARCHITECTURES)
    assert set(ARCHITECTURES) - set(RECIPES) == {"chameleon", "nomic-bert-moe"}
    assert len(RECIPES) == 144


def test_every_recipe_has_a_model_here() -> None:
    names = {*MODELS, *ENCODERS, *T5, *OWN}
    assert set(RECIPES) <= {name if name in ARCHITECTURES else name.split("-")[0] for name in names}


def test_every_model_has_its_results() -> None:
    assert {*SPECS} == {name for table in (*TABLES.values(), OWN) for name in table} - set(LEFT_OUT)
    assert {name.partition(":")[0] for name in STORED} == {*SPECS} - {*OWN}


def known_names(architecture: str) -> set[str] | None:
    """Return the names of tensors that the gguf package knows, or None if it does not know the architecture."""
    from gguf import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES

    number = next((key for key, known in MODEL_ARCH_NAMES.items() if known == architecture), None)
    return None if number is None else {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[number]}


@pytest.mark.parametrize("name", GENERATING)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    beside = sum(TEXT.match(key) is None for key in tensors_of(name)) if name in CLASSES else 0
    with open_checkpoint(write(name, tmp_path)) as model:
        if beside:
            assert model.notes == (f"skipped {beside} tensors for images or audio: the file holds the text model",)
        else:
            assert len(model.notes) == (name in MODELS and "vision_config" in SPECS[name]["config"])
        check_logits(name, model)
        known = known_names(model.metadata["general.architecture"])
        found = {
            re.sub(r"^blk[.][0-9]+", "blk.{bid}", re.sub(r"[.](weight|bias|scale)$", "", x)) for x in model.tensors
        }
        assert known is None or found <= known


@pytest.mark.parametrize("name", [name for table in TABLES.values() for name in table if name in SPECS])
def test_transformers_makes_what_is_stored(name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed: only stored results are compared")
    pytest.importorskip("transformers", reason="transformers is not installed: only stored results are compared")
    from tests.localllm.convert.hf_make import remake

    before = SPECS[name]
    spec, results = remake(name)
    assert spec["tensors"] == before["tensors"]
    assert {**spec["config"], "transformers_version": ""} == {**before["config"], "transformers_version": ""}
    for key, found in results.items():
        np.testing.assert_allclose(found, STORED[key], rtol=1e-3, atol=1e-4)


# -- encoders ----------------------------------------------------------------------------------------------------------


def exact_gelu(x: np.ndarray) -> np.ndarray:
    """Return exact GELU, which these models were trained with.

    The kernels use the tanh approximation, as llama.cpp does.
    """
    return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def embedded(model: Checkpoint) -> tuple[Any, np.ndarray, Pooler]:
    """Return the configuration, the hidden states of the prompt, and the pooler of an encoder."""
    row = architecture_of(model.metadata)
    config = read_config(model.metadata, row.name)
    plan = record(config, row, model.tensors, embeddings=True)
    rows = Driver(bind_reference(plan)).step([(0, ids())])
    return config, rows, Pooler(config, PoolingHead.of(config, row, model.tensors))


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not name.startswith("gemma"):
        monkeypatch.setattr(reference_operations, "_gelu", exact_gelu)
        monkeypatch.setitem(reference_operations._ACTIVATIONS, "gelu", exact_gelu)
        monkeypatch.setattr(head, "_gelu", exact_gelu)
    with open_checkpoint(write(name, tmp_path)) as model:
        assert model.notes == ()
        config, rows, pooler = embedded(model)
    assert nmse(rows[POSITIONS], STORED[name]).max() < 1e-10
    ranks, pooling = f"{name}:scores" in STORED, ENCODERS[name].pooling
    assert config.pooling == ("rank" if ranks else POOLINGS.get(pooling, pooling))
    if ranks:
        scores = STORED[f"{name}:scores"]
        if name.startswith("qwen3"):  # softmax over the "yes" and "no" logits
            scores = 1.0 / (1.0 + np.exp([-scores[0], scores[0]]))
        assert nmse(pooler(rows, "rank"), scores) < 1e-10
    if f"{name}:pooled" in STORED:
        assert nmse(pooler(rows, config.pooling), STORED[f"{name}:pooled"]) < 1e-10


# -- T5 ----------------------------------------------------------------------------------------------------------------


def t5_rows(model: Checkpoint) -> np.ndarray:
    """Return the decoder's logits, or the hidden states of an encoder-only model."""
    architecture = architecture_of(model.metadata)
    config = read_config(model.metadata, architecture.name)
    embeds = architecture.encoder
    driver = Driver(bind_reference(record(config, architecture, model.tensors, embeddings=embeds)))
    if embeds:
        return driver.step([(0, PROMPT)])
    driver.borders = [len(PROMPT)]
    return driver.step([(0, PROMPT + ANSWER)], range(len(PROMPT), len(PROMPT + ANSWER)))


@pytest.mark.parametrize("name", T5)
def test_rows_of_t5_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    with open_checkpoint(write(name, tmp_path)) as model:
        assert model.metadata["general.architecture"] == name.split("-")[0] in ARCHITECTURES
        assert model.notes == ()
        assert nmse(t5_rows(model), STORED[name]).max() < 1e-10
