"""Tiny models of every architecture against llama.cpp's logits, which are stored in `kit_models`.

They were made with a float32 cache, and GELU read from a table of halves: 32 tokens in one batch, then one by one.
"""

from __future__ import annotations

import numpy as np
import pytest

from localllm.models import ARCHITECTURES
from tests.models.kit import KIT
from tests.models.support import Driver, bind_reference, nmse, plan_of


@pytest.mark.parametrize("name", KIT)
def test_every_position(name: str) -> None:
    model = KIT[name]
    driver = Driver(bind_reference(plan_of(*model.loaded())))
    parts = [model.tokens[: model.prompt], *([token] for token in model.tokens[model.prompt :])]
    ours = np.concatenate([driver.step([(0, part)]) for part in parts])
    assert nmse(ours, model.stored["logits"]).max() < model.limit


def test_every_architecture_has_a_model() -> None:
    found = {str(model.loaded()[0]["general.architecture"]) for model in KIT.values()}
    assert found == set(ARCHITECTURES)
