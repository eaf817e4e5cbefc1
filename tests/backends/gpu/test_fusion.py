"""The kernel launches of a step. Fused operations give the bits of separate operations.

A plan that keeps all values cannot be fused, so its results serve for comparison.
"""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.base import F16_CACHE, Backend, CacheTypes, Limits
from localllm.backends.gpu import bind
from localllm.backends.gpu.kernels.kernel import FEW_ROWS
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK, Plan, Recorder, Value
from tests.backends.cases import VOCABULARY
from tests.backends.support import Shape, plan, record, tokens
from tests.backends.test_experts import TABLE, mixture
from tests.models.support import Driver, MemoryWeight, nmse, plan_of
from tests.models.tiny import VARIANTS
from tests.models.tiny_families import FAMILIES

LIMITS = Limits(40, 40, 4, 4 * BLOCK)
SHAPE = Shape(head_dim=32, layers=3)
LAYER = [
    "norm_rows", "matvec_together", "append", "attend_partition", "attend_combine", "matvec",
    "norm_rows", "matvec_gated", "matvec",
]  # fmt: skip
LAST = [*LAYER[:5], "select_rows", "select_rows", *LAYER[5:]]  # continues with the tokens whose logits are wanted
WHOLE = ["embed", *LAYER, *LAYER, *LAST, "norm_rows", "matvec"]


def launched(model: Plan, rows: int = 1, cache: CacheTypes = F16_CACHE) -> list[str]:
    """Return the names of the kernels that a step launches, in order."""
    dispatches = bind.program(model, LIMITS, cache).dispatches
    return [launch.kernel.name for dispatch in dispatches for launch in dispatch.launches(rows)]


@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS])
def test_a_layer_is_nine_launches(rows: int) -> None:
    """If all matrices have one format, a layer is nine launches, also with biases, normalized heads, and
    unquantized inputs.
    """
    for format in ("Q4_0", "Q8_0", "F16"):
        assert launched(plan(format, SHAPE), rows) == WHOLE
    assert launched(plan("Q4_0", Shape(head_dim=32, layers=3, biased=True)), rows) == WHOLE
    assert launched(plan("Q4_0", Shape("qwen3", head_dim=32, layers=3)), rows) == WHOLE


def test_what_cannot_be_one_is_few() -> None:
    """Three things prevent fusion: value matrices of another format, heads that end within a block of 32, and
    quantized keys.
    """

    def count(model: Plan, cache: CacheTypes = F16_CACHE) -> dict[str, int]:
        names = launched(model, 1, cache)
        return {name: names.count(name) - WHOLE.count(name) for name in {*names, *WHOLE}}

    def more(**kinds: int) -> dict[str, int]:
        return dict.fromkeys(WHOLE, 0) | kinds

    assert count(plan(lambda name: "Q5_1" if "attn_v" in name else "Q4_0", SHAPE)) == more(matvec=3)
    assert count(plan(lambda name: "Q5_1" if "ffn_up" in name else "Q4_0", SHAPE)) == more(
        matvec_gated=-3, matvec=6, elements=3
    )
    assert count(plan("Q4_0", Shape(head_dim=16, layers=3))) == more(elements=2)  # select_rows quantizes its output
    assert count(plan("Q4_0", SHAPE), CacheTypes("q8_0", "q8_0")) == more(prepare_queries=3)


def test_experts_make_blocks_with_their_glu() -> None:
    model = record(TABLE, mixture("softmax", 3, formats=lambda name: "Q8_0"))
    assert launched(model) == [
        "embed", "matvec", "route", "elements", "matvec", "matvec", "elements", "matvec", "combine", "elements"
    ]  # fmt: skip


# -- the same bits ---------------------------------------------------------------------------------------------------


def side_by_side(r: Recorder, x: Value) -> Value:
    """Build six products of one input, in two formats, with different scales and few rows, some with biases. Then build
    two products whose GLU is read twice.
    """
    random = np.random.RandomState(9)

    def product(number: int, format: str, biased: bool, height: int = 37) -> Value:
        weight = MemoryWeight.of(f"w{number}", random.standard_normal((height, x.width)) / 8, format)
        bias = MemoryWeight.of(f"b{number}", random.standard_normal(height)) if biased else None
        return r.linear(x, weight, bias, 0.5 + number)

    kinds = [("Q4_0", True, 1), ("Q4_0", True), ("F16", False), ("Q4_0", True, 1), ("Q4_0", False), ("Q4_0", True)]
    made = [product(number, *kind) for number, kind in enumerate(kinds)]
    first = made[1]
    for other in made:
        first = r.glu(other, first, "sigmoid")
    y = r.glu(product(7, "F32", True), product(8, "F32", True), "gelu")
    return r.add(r.add(first, y), r.scale(y, 0.5))


MODELS = {
    "Q4_0, biased": plan("Q4_0", Shape(head_dim=32, biased=True)),
    "Q4_K and Q6_K": plan(
        lambda name: "Q6_K" if "attn_v" in name else "Q4_K", Shape(width=256, ffn=512, heads=4, head_dim=64)
    ),
    "F16, half heads": plan("F16", Shape(ffn=90)),
    "qwen3, Q8_0": plan("Q8_0", Shape("qwen3", head_dim=32)),
    **{
        name: plan_of(*{**VARIANTS, **FAMILIES}[name]())
        for name in ("llama fused qkv", "mistral3 temperature", "qwen2moe", "gemma2", "gpt-oss")
    },
    "side by side": record(
        MemoryWeight.of("table", np.random.RandomState(8).standard_normal((VOCABULARY, 64))), side_by_side
    ),
}
CACHES = [(name, F16_CACHE) for name in MODELS] + [("Q4_0, biased", CacheTypes("q8_0", "q4_0"))]


@pytest.mark.parametrize(("name", "cache"), CACHES, ids=str)
def test_fused_operations_have_the_bits_of_single_ones(gpu: Backend, name: str, cache: CacheTypes) -> None:
    """Decode, steps of few tokens, and prefill have the same bits with and without fusion.

    The error against float32 comes from int8 activations.
    """
    model = MODELS[name]
    single = bind.program(model, LIMITS, cache, model.values)
    assert len(launched(model, 1, cache)) < sum(len(d.launches(1)) for d in single.dispatches)
    ids = tokens(80, 29)  # token ids below the smallest vocabulary size
    found = []
    for backend, keep in ((gpu, []), (gpu, model.values), (ReferenceBackend(), [])):
        executable = backend.bind(model, LIMITS, cache, keep=keep)
        driver = Driver(executable, sequences=2)
        steps = [[(0, ids[:20])], [(1, ids[:1])], [(0, ids[20:21])], [(0, ids[21:25]), (1, ids[30:40])]]
        found.append(np.concatenate([driver.step(parts) for parts in [*steps, [(1, ids[40:70])], [(0, ids[:1])]]]))
        executable.close()
    fused, alone, truth = found
    np.testing.assert_array_equal(fused, alone)
    assert nmse(fused, truth).max() < 0.05


def test_side_by_side_is_right(gpu: Backend) -> None:
    """The error of int8 activations is at most a hundredth of the largest result."""
    model = MODELS["side by side"]
    ours, theirs = (Driver(b.bind(model, LIMITS, F16_CACHE)) for b in (gpu, ReferenceBackend()))
    for count in (1, 3, 16, 20):
        ids = tokens(count, VOCABULARY)
        rows, truth = ours.step([(0, ids)]), theirs.step([(0, ids)])
        assert np.abs(rows - truth).max() < 0.01 * np.abs(truth).max()
