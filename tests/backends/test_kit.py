"""Tiny models of every architecture on the CPU against llama.cpp's logits, prefilled in one batch and decoded.

The logits were made with a float32 cache, and GELU read from a table of halves.
"""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.plan import BLOCK
from tests.models.kit import KIT
from tests.models.support import Driver, nmse, plan_of


@pytest.mark.parametrize("name", KIT)
def test_every_position(cpu: CpuBackend, name: str) -> None:
    model = KIT[name]
    limits, cache = Limits(rows=64, logit_rows=64, blocks=2, positions=BLOCK), CacheTypes("f32", "f32")
    executable = cpu.bind(plan_of(*model.loaded()), limits, cache)
    try:
        driver = Driver(executable)
        parts = [model.tokens[: model.prompt], *([token] for token in model.tokens[model.prompt :])]
        ours = np.concatenate([driver.step([(0, part)]) for part in parts])
    finally:
        executable.close()
    assert nmse(ours, model.stored["logits"]).max() < model.limit
