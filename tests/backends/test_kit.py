"""Tiny models of every architecture on the CPU against llama.cpp's logits, prefilled in one batch and decoded.

The logits were made with a float32 cache, and GELU read from a table of halves.
"""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.base import Backend, CacheTypes, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK
from tests.models.kit import KIT, LIMIT, KitModel
from tests.models.support import Driver, nmse, plan_of


def logits(backend: Backend, model: KitModel) -> np.ndarray:
    limits, cache = Limits(rows=64, logit_rows=64, blocks=2, positions=BLOCK), CacheTypes("f32", "f32")
    executable = backend.bind(plan_of(*model.loaded()), limits, cache)
    try:
        driver = Driver(executable)
        parts = [model.tokens[: model.prompt], *([token] for token in model.tokens[model.prompt :])]
        return np.concatenate([driver.step([(0, part)]) for part in parts])
    finally:
        executable.close()


@pytest.mark.parametrize("name", KIT)
def test_every_position(cpu: CpuBackend, name: str) -> None:
    model = KIT[name]
    assert nmse(logits(cpu, model), model.stored["logits"]).max() < model.limit()


@pytest.mark.parametrize("name", [name for name, model in KIT.items() if model.limit() > LIMIT])
def test_exact_gelu(cpu: CpuBackend, name: str) -> None:
    """Where GELU of halves leads far away, the reference backend's results with exact GELU are near."""
    ours, theirs = (logits(backend, KIT[name]) for backend in (cpu, ReferenceBackend()))
    assert nmse(ours, theirs).max() < LIMIT
