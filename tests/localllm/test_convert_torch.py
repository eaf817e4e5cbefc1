"""Every architecture of the table, converted: the logits of transformers, stored ones and, with torch, fresh ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.convert import open_checkpoint
from localllm.convert.recipes import RECIPES
from models import ARCHITECTURES
from tests.localllm.convert_support import logits_of
from tests.localllm.hf_models import MODELS, ids, make
from tests.localllm.hf_synthetic import DATA, LEFT_OUT, POSITIONS, read_specs, write_folder
from tests.models.support import nmse


def test_every_architecture_that_runs_can_be_converted() -> None:
    assert list(RECIPES) == list(ARCHITECTURES)


def test_every_recipe_has_a_model_here() -> None:
    made = {name.split("-")[0] if name not in ARCHITECTURES and name != "gpt-oss-mxfp4" else name for name in MODELS}
    assert set(RECIPES) <= made


SPECS, STORED = read_specs(), np.load(DATA / "hf_all.npz")


def test_stored_logits_are_of_every_model() -> None:
    assert {*SPECS} == {*STORED.files} == set(MODELS) - set(LEFT_OUT)


@pytest.mark.parametrize("name", SPECS)
def test_stored_logits_are_those_of_the_converted_folder(name: str, tmp_path: Path) -> None:
    write_folder(SPECS[name], tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert model.notes == ()
        assert nmse(logits_of(model, ids())[POSITIONS], STORED[name]).max() < 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: the stored logits stand in")
    pytest.importorskip("transformers", reason="transformers is not installed: the stored logits stand in")
    theirs = make(name, tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert model.notes == ()
        assert nmse(logits_of(model, ids()), theirs).max() < 1e-9
