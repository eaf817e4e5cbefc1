"""KV cache types: harmful types are rejected, `auto` considers head dimensions and sizes, and byte counts are exact."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cache import CACHE_TYPES
from localllm.backends.cpu.backend import CpuBackend
from localllm.base.errors import LocalLLMError
from localllm.engine.cache_types import cache_bytes, choose_types
from localllm.plan import BLOCK, Plan, Recorder, RowLayer
from tests.models.kit import KIT
from tests.models.support import MemoryWeight
from tests.models.support import plan_of as model_plan


def plan_of(head_dim: int, window: int = 0) -> Plan:
    r = Recorder()
    x = r.embed(MemoryWeight.of("table", np.ones((4, 2 * head_dim))))
    r.append(x, x, 2)
    return r.finish(r.attention(x, 0, 2, 1.0, window))


def limits_of(blocks: int, window_blocks: int = 0) -> Limits:
    return Limits(1, 1, blocks, blocks * BLOCK, window_blocks)


@pytest.mark.parametrize(
    ("head_dim", "keys", "values", "told"),
    [
        (8, "q8_0", "f16", 'cache_type_k="q8_0": heads of 8 values do not fill its blocks of 32'),
        (8, "f16", "q4_0", 'cache_type_v="q4_0": heads of 8 values'),
        (24, "q4_0", "f16", 'cache_type_k="q4_0": heads of 24 values are too short for the rotation that spreads'),
        (64, "q4_0", "q4_0", ""),
        (8, "fp8", "bf16", ""),
    ],
)
def test_what_harms_is_refused_but_for_force(head_dim: int, keys: str, values: str, told: str) -> None:
    plan, asked = plan_of(head_dim), CacheTypes(keys, values)
    if told:
        with pytest.raises(LocalLLMError, match=f"^{told}.*; use f16 or q8_0, or force it$"):
            choose_types(asked, plan, limits_of(2), 1000, any_type=False)
    assert choose_types(asked, plan, limits_of(2), 1000, any_type=bool(told)).types == asked
    assert choose_types(asked, plan, limits_of(2), 1000, any_type=bool(told)).note == ""


@pytest.mark.parametrize("name", ["deepseek32-8of40", "deepseek4-8of50"])
def test_an_indexer_without_values_harms_no_type(name: str) -> None:
    asked = CacheTypes("q8_0", "q4_0")
    assert choose_types(asked, model_plan(*KIT[name].loaded()), limits_of(8), 1, any_type=False).types == asked


def test_a_layer_of_pools_counts_for_its_share() -> None:
    """Keys and values have 64 elements of 2 bytes. They are stored for each position, for every 4th, and for
    every 128th.
    """
    limits, plan, types = limits_of(8), model_plan(*KIT["deepseek4-8of50"].loaded()), CacheTypes()
    states = sum(4 * 8 * (BLOCK * layer.row) for layer in plan.layers if isinstance(layer, RowLayer))
    rows = 3 * BLOCK + BLOCK // 4 + 1
    assert cache_bytes(plan, limits, types) - states == 8 * (rows * 2 * 64 * 2 + BLOCK // 4 * 128 * 2)


def test_auto_is_q8_0_where_the_cache_is_a_tenth_of_the_weights_or_more() -> None:
    """Two heads of dimension 64 need 512 bytes per token for keys and values of two bytes."""
    plan, auto = plan_of(64), CacheTypes("auto", "auto")
    small, large = (choose_types(auto, plan, limits_of(blocks), 512 * 1280, any_type=False) for blocks in (1, 2))
    assert (small.types, large.types) == (CacheTypes(), CacheTypes("q8_0", "q8_0"))
    assert large.note == (
        "cache: keys q8_0, values q8_0 (f16 would take 10% of the weights' size; from 10%, a smaller type is worth it)"
    )
    mixed = choose_types(CacheTypes("auto", "q4_0"), plan, limits_of(2), 512, any_type=False)
    assert mixed.types == CacheTypes("q8_0", "q4_0")
    tiny = choose_types(auto, plan_of(8), limits_of(64), 1, any_type=False)
    assert tiny.types == CacheTypes()
    assert "heads of 8 values" in tiny.note


def test_auto_counts_of_a_window_what_is_kept_of_it() -> None:
    """A full KV cache of 1000 blocks would be ten times the size of the weights. The two blocks that a
    sliding-window layer stores are only 2 % of the weights.
    """
    for window, chosen in ((0, "q8_0"), (100, "f16")):
        found = choose_types(
            CacheTypes("auto", "auto"), plan_of(64, window), limits_of(1000, 2), 512 * BLOCK * 100, any_type=False
        )
        assert found.types == CacheTypes(chosen, chosen)


@pytest.mark.parametrize("name", CACHE_TYPES)
def test_bytes_per_token_are_what_is_allocated(cpu_backend: CpuBackend, name: str) -> None:
    plan, types = plan_of(64), CacheTypes(name, "f16")
    bound = cpu_backend.bind(plan, limits_of(2), types)
    assert bound.memory.cache == cache_bytes(plan, limits_of(2), types)
    floats = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8}
    bits = {**floats, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5}[name]
    assert bound.memory.cache_per_token == 2 * 64 * (bits + 16) / 8
    bound.close()


@pytest.fixture(scope="module")
def cpu_backend() -> CpuBackend:
    return CpuBackend(1)
