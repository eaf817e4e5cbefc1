"""Tiny models of every architecture against llama.cpp's logits, which are stored in `kit_models`.

They were made with a float32 cache: 32 tokens in one batch, then one by one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.models import ARCHITECTURES
from tests.models.kit import KitModel
from tests.models.support import Driver, bind_reference, nmse

MODELS = {path.stem: KitModel(path) for path in sorted((Path(__file__).parent / "kit_models").glob("*.npz"))}
WITHOUT = {"granitemoe"}  # has no reference yet


@pytest.mark.parametrize("name", MODELS)
def test_every_position(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    with model.plan(tmp_path) as plan:
        driver = Driver(bind_reference(plan))
        parts = [model.tokens[: model.prompt], *([token] for token in model.tokens[model.prompt :])]
        ours = np.concatenate([driver.step([(0, part)]) for part in parts])
    assert nmse(ours, model.stored["logits"]).max() < 1e-4


def test_every_architecture_has_a_model(tmp_path: Path) -> None:
    assert {model.architecture(tmp_path) for model in MODELS.values()} == set(ARCHITECTURES) - WITHOUT
