"""Cuts of plans into stages: what each stage has and reads, which cuts are possible, and where even cuts fall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from localllm.backends.base import F16_CACHE, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.cluster.cut import cut_at, even_cut, possible_cuts
from localllm.cluster.errors import ClusterError
from localllm.cluster.stage import Layout, bind_stage
from localllm.models import architecture_of, record_with_heads
from localllm.plan import BLOCK, EmbedNgrams, Plan
from tests.backends.test_assistant import plans
from tests.models.kit import KIT
from tests.models.support import MemoryWeight, plan_of

LIMITS = Limits(64, 64, 4, 4 * BLOCK)


def model(name: str) -> Plan:
    return plan_of(*KIT[name].loaded())


def with_heads(name: str) -> Plan:
    metadata, tensors = KIT[name].loaded()
    return record_with_heads(metadata, architecture_of(metadata), tensors, None, 3)


@dataclass
class Counted:
    """A tensor that records whether it was read."""

    tensor: MemoryWeight
    read_by: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def read(self, start: int, stop: int) -> np.ndarray:
        self.read_by.append(self.tensor.name)
        return self.tensor.read(start, stop)


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3-12", "qwen3moe-8x"])
def test_a_stage_reads_only_the_tensors_of_its_layers(name: str) -> None:
    metadata, tensors = KIT[name].loaded()
    read: list[str] = []
    plan = plan_of(metadata, {name: Counted(tensor, read) for name, tensor in tensors.items()})  # type: ignore[misc]
    cut, backend = even_cut(plan, 3), CpuBackend(1)
    layout = Layout(cut.firsts, LIMITS, F16_CACHE)
    found = []
    for number, part in enumerate(cut.parts):
        read.clear()
        bind_stage(number, cut, layout, backend).close()
        found.append(set(read))
        assert found[-1] == {weight.tensor for weight in part.weights.values()}
    own = [{name for name in names if name.startswith("blk.")} for names in found]
    for number, names in enumerate(own):
        stop = [*cut.firsts, len(plan.starts) - 1][number + 1]
        assert {int(name.split(".")[1]) for name in names} == set(range(cut.firsts[number], stop))
    assert not own[0] & own[1]
    assert not own[1] & own[2]
    assert set.union(*found) == {weight.tensor for weight in plan.weights.values()}
    tied = {"token_embd.weight"} if "output.weight" not in tensors else {"output.weight"}
    assert found[0] - own[0] == {"token_embd.weight"}
    assert found[2] - own[2] == tied | {"output_norm.weight"}
    assert not found[1] - own[1]
    backend.close()


def test_cache_layers_and_states_belong_to_the_stage_of_their_layer() -> None:
    plan = model("jamba-dense")
    cut = even_cut(plan, 2)
    assert sorted(cut.layers) == [(s, n) for s, part in enumerate(cut.parts) for n in range(len(part.layers))]
    for layer, (stage, number) in zip(plan.layers, cut.layers, strict=True):
        assert cut.parts[stage].layers[number] == layer


def test_the_stage_with_the_most_weights_has_as_few_as_possible() -> None:
    plan = with_heads("step35-mtp")
    possible = possible_cuts(plan)

    def largest(firsts: Sequence[int]) -> int:
        parts = cut_at(plan, firsts).parts
        return max(sum(w.bytes for op in p.operations for w in (*op.matrices, *op.vectors)) for p in parts)

    for stages in (1, 2, 3):
        every = [largest((0, *more)) for more in combinations(possible, stages - 1)]
        assert largest(even_cut(plan, stages).firsts) == min(every)


def test_heads_for_drafting_are_stages_of_the_last_part() -> None:
    plan = with_heads("step35-mtp")
    cut = even_cut(plan, 3)
    assert len(plan.drafts) == 2
    assert [len(part.drafts) for part in cut.parts] == [0, 0, 2]
    assert [len(part.stages) for part in cut.parts] == [1, 1, 3]
    assert [cut.stage_of(head.logits) for head in plan.drafts] == [2, 2]


def test_tables_that_are_looked_up_stay_in_the_first_stage() -> None:
    plan = model("qwen4exp-8of40")
    cut = cut_at(plan, (0, 1, 2))
    assert any(isinstance(op, EmbedNgrams) for op in plan.operations[plan.starts[1] :])
    assert [bool(part.lookups) for part in cut.parts] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "firsts", "message"),
    [
        ("gemma4-e2b", (0, 5), "cannot cut before layer 5: layer 8 reads the cache of layer 3; it can be cut before "
         "layers 1, 2, 3, 10 (at most 5 stages)"),
        ("glm5-next-8of40", (0, 2), "cannot cut before layer 2: layer 2 reads the selected positions of layer 0; it "
         "can be cut before layers 3, 4 (at most 3 stages)"),
        ("llama-gqa", (0, 4), "the first layers of stages are 0 and larger numbers below 4, found [0, 4]"),
        ("llama-gqa", (1, 2), "the first layers of stages are 0 and larger numbers below 4, found [1, 2]"),
        ("llama-gqa", (0, 2, 2), "the first layers of stages are 0 and larger numbers below 4, found [0, 2, 2]"),
        ("t5-gated", (0, 2), "a model with an encoder runs in one process; it cannot be split into stages"),
    ],
)  # fmt: skip
def test_an_impossible_cut_is_refused_by_name(name: str, firsts: tuple[int, ...], message: str) -> None:
    with pytest.raises(ClusterError) as error:
        cut_at(model(name), firsts)
    assert str(error.value) == message


def test_a_head_that_reads_the_model_s_cache_stays_with_it() -> None:
    _, plan = plans("assistant")
    layers = len(plan.starts) - 1
    assert max(possible_cuts(plan)) < layers - 1
    with pytest.raises(ClusterError, match=f"before layer {layers}: a head for drafting reads the cache of layer"):
        cut_at(plan, (0, layers))


def test_more_stages_than_cuts_are_refused() -> None:
    plan = model("llama-gqa")
    assert even_cut(plan, 4).firsts == (0, 1, 2, 3)
    with pytest.raises(ClusterError, match=r"cannot make 5 stages of this model; it can be cut before layers 1, 2, 3"):
        even_cut(plan, 5)


def test_a_plan_without_cuts_names_one_process() -> None:
    plan = replace(model("llama-gqa"), starts=(0,))
    with pytest.raises(ClusterError, match="cannot make 2 stages of this model; it runs in one process"):
        even_cut(plan, 2)


def test_stages_of_different_plans_or_sizes_do_not_fit_together() -> None:
    plan = model("llama-gqa")
    one, other = even_cut(plan, 2), cut_at(plan, (0, 1))
    layouts = [
        Layout(one.firsts, LIMITS, F16_CACHE),
        Layout(one.firsts, replace(LIMITS, blocks=5), F16_CACHE),
        Layout(one.firsts, LIMITS, F16_CACHE, (3,)),
    ]
    digests = [layout.digest(one) for layout in layouts]
    digests.append(Layout(other.firsts, LIMITS, F16_CACHE).digest(other))
    digests.append(layouts[0].digest(even_cut(model("qwen3-dense"), 2)))
    assert len(set(digests)) == 5
    assert layouts[0].digest(even_cut(model("llama-gqa"), 2)) == digests[0]
