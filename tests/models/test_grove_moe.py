"""Grove MoE against its definition (arXiv:2508.07785, and the reference implementation), and against llama.cpp, which
differs in one point.

Every two neighboring experts share a small adjugate expert. The adjugate expert gets the same input as the
experts. It runs once for each chosen expert of the pair, with that expert's weight.
"""

from __future__ import annotations

import numpy as np
import pytest

from localllm.models import ModelError
from localllm.models.families.mixtures import GroveFeedForward
from localllm.models.tensors import Tensors
from tests.models import tiny
from tests.models.kit import DEPARTURES
from tests.models.straight_line import dense, forward
from tests.models.support import Driver, MemoryWeight, bind_reference, nmse, plan_of
from tests.models.test_forward import run
from tests.models.tiny import TOKENS, WIDTH

EXPERTS, USED, GROUP, INNER, ADJUGATE, SCALE = 6, 3, 2, 24, 20, 0.75
KEYS = {
    "expert_count": EXPERTS, "expert_used_count": USED, "expert_feed_forward_length": INNER,
    "expert_chunk_feed_forward_length": ADJUGATE, "experts_per_group": GROUP, "expert_group_scale": SCALE,
}  # fmt: skip


def stacks(random: np.random.RandomState) -> dict[str, np.ndarray]:
    found = {}
    for name in ("blk.0.ffn_", "blk.1.ffn_"):
        found[f"{name}gate_inp.weight"] = random.standard_normal((EXPERTS, WIDTH)) / WIDTH**0.5
        for kind, count, inner in (("exps", EXPERTS, INNER), ("chexps", EXPERTS // GROUP, ADJUGATE)):
            for part in ("gate", "up"):
                found[f"{name}{part}_{kind}.weight"] = random.standard_normal((count, inner, WIDTH)) / WIDTH**0.5
            found[f"{name}down_{kind}.weight"] = random.standard_normal((count, WIDTH, inner)) / inner**0.5
    return found


def model() -> tiny.Model:
    norms = ("attn_q_norm.weight", "attn_k_norm.weight")
    return tiny.make("grovemoe", seed=30, per_layer=norms, keys=KEYS, extra=stacks)


def experts_by_hand(w: dict[str, np.ndarray], name: str, h: np.ndarray) -> np.ndarray:
    out = np.zeros_like(h)
    for t, row in enumerate(h):
        probabilities = np.exp(row @ w[f"{name}gate_inp.weight"].T)
        chosen = np.argsort(-probabilities)[:USED]
        for expert in chosen:
            share = probabilities[expert] / probabilities[chosen].sum()
            for kind, number, scale in (("exps", expert, 1.0), ("chexps", expert // GROUP, SCALE)):
                own = {f"{part}.weight": w[f"{name}{part}_{kind}.weight"][number] for part in ("gate", "up", "down")}
                out[t] += share * scale * dense(own, "", row)
    return out


def test_logits_equal_a_straight_line_float64_forward() -> None:
    own = model()
    values = {name: tensor.values() for name, tensor in own[1].items()}
    shape = {"layers": 2, "heads": 4, "kv_heads": [2, 2], "head_dim": 8, "n_rot": 8, "neox": True}
    expected = forward(values, TOKENS, **shape, fed=experts_by_hand)
    assert nmse(run(own), expected).max() < 1e-11


def test_llama_cpp_but_for_what_adjugate_experts_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp feeds the output of the experts to the adjugate experts.

    The test model has one adjugate expert per expert, so weights are equal.
    """
    kit, own = DEPARTURES["grovemoe-moe"], GroveFeedForward.added

    def difference() -> float:
        return kit.error(kit.logits(Driver(bind_reference(plan_of(*kit.loaded())))))

    assert difference() > 0.1
    monkeypatch.setattr(GroveFeedForward, "added", lambda self, layer, y, x, *rest: own(self, layer, y, y, *rest))
    assert difference() < 1e-9


@pytest.mark.parametrize(("start", "stop"), [(0, 24), (0, 1), (3, 9), (4, 8), (11, 13), (23, 24)])
def test_rows_of_a_stack_that_groups_share(start: int, stop: int) -> None:
    values = np.arange(3.0 * 4 * 2).reshape(3, 4, 2)
    tensors = {
        "stack": MemoryWeight("stack", "F32", (3, 4, 2), values.astype(np.float32).reshape(12, 2).view(np.uint8))
    }
    shared = Tensors(tensors).shared_stack("stack", 6, 2, 4, 2)
    expected = np.repeat(values, 2, axis=0).reshape(24, 2)[start:stop]
    np.testing.assert_array_equal(shared.read(start, stop).view(np.float32), expected)


def test_groups_that_do_not_divide_the_experts_are_one_line() -> None:
    metadata, tensors = model()
    with pytest.raises(ModelError, match="experts_per_group: expected a divisor of expert_count 6, found 4"):
        plan_of(metadata | {"grovemoe.experts_per_group": 4}, tensors)
