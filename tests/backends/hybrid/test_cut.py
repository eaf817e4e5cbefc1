"""Assign a plan's operations to the GPU and the host."""

from __future__ import annotations

import pytest

from localllm.backends.hybrid.cut import Placement, cut_plan, most_layers, sides
from localllm.plan import Attention, Embed, Experts, Linear, Plan, Receive, Send
from tests.backends.support import Shape, plan
from tests.models.kit import KIT
from tests.models.support import plan_of
from tests.models.tiny_families import FAMILIES

DENSE, EXPERTS = "dense", "qwen2moe"
PLANS = {DENSE: lambda: plan("F32", Shape(layers=3)), EXPERTS: lambda: plan_of(*FAMILIES[EXPERTS]())}


def names(plan: Plan) -> set[str]:
    """Return the names of the matrices in a plan's products."""
    found = {op.weight.name for op in plan.operations if isinstance(op, Linear)}
    return found | {op.gate.weight.name for op in plan.operations if isinstance(op, Experts)}


def test_the_last_layers_go_to_the_card_and_the_output_counts_as_one() -> None:
    """Layers are counted in the same way as for llama.cpp's -ngl."""
    model = PLANS[DENSE]()
    assert most_layers(model) == 4
    for layers, first in ((1, 3), (2, 2), (3, 1)):
        parts = cut_plan(model, Placement(layers))
        assert parts.order == ("host", "gpu")
        assert names(parts.plans["gpu"]) == {
            name for name in names(model) if name == "output.weight" or int(name.split(".")[1]) >= first
        }
        assert any(isinstance(op, Embed) for op in parts.plans["host"].operations)
        assert len(parts.plans["gpu"].layers) == 3 - first
        assert [side for side, _ in parts.layers] == ["host"] * first + ["gpu"] * (3 - first)


@pytest.mark.parametrize("layers", [4, 5, 1000])
def test_all_layers_take_the_embeddings_along(layers: int) -> None:
    model = PLANS[DENSE]()
    assert set(sides(model, Placement(layers))) == {"gpu"}
    assert set(sides(model, Placement(0, 7))) == {"host"}
    assert cut_plan(model, Placement(layers)).plans["gpu"].operations == model.operations


def test_experts_of_the_first_layers_alone_stay_on_the_host() -> None:
    """The router, shared expert, attention and KV cache go to the GPU, as with llama.cpp's -ncmoe."""
    model = PLANS[EXPERTS]()
    for count, layers in ((1, {0}), (2, {0, 1}), (9, {0, 1})):
        parts = cut_plan(model, Placement(99, count))
        own = parts.plans["host"].operations
        assert names(parts.plans["host"]) == {f"blk.{n}.ffn_gate_exps.weight" for n in layers}
        assert {type(op) for op in own} == {Experts, Receive, Send}
        assert parts.plans["host"].layers == ()
        assert parts.order == ("gpu", *("host", "gpu") * len(layers))


def test_a_layer_attends_where_the_cache_is_that_it_reads() -> None:
    """The last five of the ten layers reuse the KV caches of two earlier layers. Their attention runs on the device
    that holds the cache. The rest of the layer runs on the GPU.
    """
    model = plan_of(*KIT["gemma4-e2b"].loaded())
    # The output layer, and 6, 5 and 1 layers.
    whole, some, few = (cut_plan(model, Placement(layers)) for layers in (7, 6, 2))
    assert [side for side, _ in whole.layers] == ["host"] * 4 + ["gpu"]
    assert [side for side, _ in some.layers] == [side for side, _ in few.layers] == ["host"] * 5
    for parts, on_card in ((whole, 2), (some, 0), (few, 0)):
        assert sum(isinstance(op, Attention) for op in parts.plans["gpu"].operations) == on_card
    assert "blk.5.attn_q.weight" in names(some.plans["gpu"]) - names(few.plans["gpu"])
