"""Tiny models of every architecture on the CPU against llama.cpp's logits, prefilled in one batch and decoded.

llama.cpp computed the logits with a float32 KV cache, and with GELU from a float16 table.
"""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.base import Backend, CacheTypes, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.models.layers import LayerRecorder
from localllm.plan import BLOCK, Attention
from tests.models.kit import DEPARTURES, KIT, LIMIT, KitModel
from tests.models.support import Driver, nmse, plan_of
from tests.models.test_grove_moe import model as grove_moe
from tests.models.tiny import TOKENS


def logits(backend: Backend, model: KitModel) -> np.ndarray:
    room, cache = model.room, CacheTypes("f32", "f32")
    limits = Limits(rows=room, logit_rows=room, blocks=2 * room // BLOCK, positions=room)
    executable = backend.bind(plan_of(*model.loaded()), limits, cache)
    try:
        return model.logits(Driver(executable))
    finally:
        executable.close()


@pytest.mark.parametrize("name", KIT)
def test_every_position(cpu: CpuBackend, name: str) -> None:
    model = KIT[name]
    assert model.error(logits(cpu, model)) < model.limit()


@pytest.mark.parametrize("name", [name for name, model in KIT.items() if model.limit() > LIMIT])
def test_exact_gelu(cpu: CpuBackend, name: str) -> None:
    """Some models are sensitive to llama.cpp's GELU table. Such models are compared with the reference
    backend and exact GELU.
    """
    ours, theirs = (logits(backend, KIT[name]) for backend in (cpu, ReferenceBackend()))
    assert nmse(ours, theirs).max() < LIMIT


@pytest.mark.parametrize("name", DEPARTURES)
def test_where_llama_cpp_computes_something_else(cpu: CpuBackend, name: str) -> None:
    """`tests.models` compares the reference backend with the model as it was trained."""
    ours, theirs = (logits(backend, DEPARTURES[name]) for backend in (cpu, ReferenceBackend()))
    assert nmse(ours, theirs).max() < LIMIT


def test_experts_that_groups_share(cpu: CpuBackend) -> None:
    limits, plan = Limits(rows=64, logit_rows=64, blocks=2, positions=BLOCK), plan_of(*grove_moe())
    bound = [backend.bind(plan, limits, CacheTypes("f32", "f32")) for backend in (cpu, ReferenceBackend())]
    ours, theirs = (Driver(executable).step([(0, TOKENS)]) for executable in bound)
    bound[0].close()
    assert nmse(ours, theirs).max() < LIMIT


@pytest.mark.parametrize("name", ["gemma3n-e2b", "gemma4-e2b"])
def test_rows_are_dropped_after_the_last_layer_that_stores_keys(
    cpu: CpuBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later layers process only the tokens whose logits are wanted. The logits are bitwise identical to a
    plan that drops tokens in the last layer.
    """
    model, results = KIT[name], []
    parts, wanted = (model.tokens[:20], model.tokens[20:33], model.tokens[33:34]), ([19], [0, 5, 12], [0])
    for last in (False, True):
        if last:
            selects = lambda self, layer: layer == self.builder.config.layers - 1  # noqa: E731
            monkeypatch.setattr(LayerRecorder, "selects", selects)
        plan = plan_of(*model.loaded())
        rows = {op.out.rows for op in plan.operations if isinstance(op, Attention)}
        assert rows == ({"batch"} if last else {"batch", "logits"})
        executable = cpu.bind(plan, Limits(rows=64, logit_rows=64, blocks=2, positions=BLOCK), CacheTypes("f32", "f32"))
        driver = Driver(executable)
        results.append([driver.step([(0, part)], own) for part, own in zip(parts, wanted, strict=True)])
        executable.close()
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)
