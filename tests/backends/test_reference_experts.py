"""The reference backend's mixture of experts against sums computed one expert at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from localllm.plan import Recorder, Value
from tests.backends.test_reference import X, bind, close, random, run, weight
from tests.models.support import stack

EXPERTS, USED, INNER = 6, 2, 3
ROUTER = random.standard_normal((EXPERTS, 8)).astype(np.float32)
GATE, UP, DOWN = (
    random.standard_normal((EXPERTS, *shape)).astype(np.float32) for shape in ((INNER, 8), (INNER, 8), (8, INNER))
)
BIASES = [random.standard_normal((EXPERTS, rows)).astype(np.float32) for rows in (INNER, INNER, 8)]
SCALES = [random.standard_normal(EXPERTS).astype(np.float32) for _ in range(3)]
CHOICE = 3.0 * random.standard_normal(EXPERTS).astype(np.float32)


def mixture(
    gating: Any, normalize: bool = False, choice: bool = False, extras: bool = False, routes: np.ndarray = ROUTER
) -> Callable[[Recorder, Value], Value]:
    def build(r: Recorder, x: Value) -> Value:
        stacks = [
            stack(
                weight(w, f"w{i}"),
                weight(SCALES[i], f"s{i}") if extras else None,
                weight(BIASES[i], f"b{i}") if extras else None,
            )
            for i, w in enumerate((GATE, UP, DOWN))
        ]
        router = r.linear(x, weight(routes, "router"))
        bias = weight(CHOICE, "choice") if choice else None
        return r.experts(x, router, *stacks, USED, gating, normalize, 1.5, "silu", bias)

    return build


def mixture_by_hand(
    weigh: Callable[[np.ndarray], dict[int, float]], extras: bool = False, routes: np.ndarray = ROUTER
) -> np.ndarray:
    """Return the mixture. `weigh` maps the router logits of a token to expert weights."""
    out = np.zeros_like(X)
    scales, biases = (SCALES, BIASES) if extras else (np.ones((3, EXPERTS)), [np.zeros((EXPERTS, 1))] * 3)
    for t, x in enumerate(X):
        logits = (routes.astype(np.float64) @ x).astype(np.float32).astype(np.float64)
        for e, share in weigh(logits).items():
            gate = GATE[e] @ x * scales[0][e] + biases[0][e]
            up = UP[e] @ x * scales[1][e] + biases[1][e]
            hidden = gate / (1.0 + np.exp(-gate)) * up
            out[t] += 1.5 * share * (DOWN[e] @ hidden * scales[2][e] + biases[2][e])
    return out


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


def best(scores: np.ndarray) -> list[int]:
    return sorted(range(EXPERTS), key=lambda e: -scores[e])[:USED]


def test_experts_weighted_by_their_share_of_all() -> None:
    close(run(mixture("softmax")), mixture_by_hand(lambda z: {e: softmax(z)[e] for e in best(z)}))


def test_experts_whose_weights_sum_to_one_or_are_a_softmax_of_the_chosen() -> None:
    def share(z: np.ndarray) -> dict[int, float]:
        return dict(zip(best(z), softmax(z[best(z)]), strict=True))

    close(run(mixture("softmax", normalize=True)), mixture_by_hand(share))
    close(run(mixture("softmax_of_chosen")), mixture_by_hand(share))


def test_a_bias_of_the_choice_is_no_part_of_the_weights() -> None:
    def share(z: np.ndarray) -> dict[int, float]:
        p = 1.0 / (1.0 + np.exp(-z))
        chosen = best(p + CHOICE)
        return {e: p[e] / sum(p[c] for c in chosen) for e in chosen}

    close(run(mixture("sigmoid", normalize=True, choice=True)), mixture_by_hand(share))
    assert np.abs(run(mixture("sigmoid", True, True)) - run(mixture("sigmoid", True))).max() > 1e-2


def test_scales_and_biases_belong_to_the_experts_matrices() -> None:
    truth = mixture_by_hand(lambda z: {e: softmax(z)[e] for e in best(z)}, extras=True)
    close(run(mixture("softmax", extras=True)), truth)


def test_of_equal_experts_the_lower_are_chosen() -> None:
    def build(r: Recorder, x: Value) -> Value:
        stacks = [stack(weight(w, f"w{i}")) for i, w in enumerate((GATE, UP, DOWN))]
        return r.experts(x, r.linear(x, weight(0.0 * ROUTER, "router")), *stacks, USED, "softmax", True, 1.5, "silu")

    close(run(build), mixture_by_hand(lambda z: {0: 0.5, 1: 0.5}))


def test_weights_that_sum_to_nothing_stay_finite() -> None:
    """The sum that divides the weights is at least 2^-14."""

    def build(r: Recorder, x: Value) -> Value:
        stacks = [stack(weight(w, f"w{i}")) for i, w in enumerate((GATE, UP, DOWN))]
        router = r.linear(x, weight(0.0 * ROUTER, "router"), weight(np.full(EXPERTS, -20.0), "low"))
        return r.experts(x, router, *stacks, USED, "sigmoid", True, 1.5, "silu")

    share = 2.0**14 / (1.0 + math.exp(20.0))
    assert share < 1e-4
    close(run(build) * 1e4, mixture_by_hand(lambda z: {0: share, 1: share}) * 1e4)


def test_memory_counts_the_experts_a_token_reads() -> None:
    memory = bind(mixture("softmax")).memory
    stacks = 4 * EXPERTS * 3 * INNER * 8
    assert memory.weights == 4 * (11 * 8 + EXPERTS * 8) + stacks
    assert memory.weights_per_token == 4 * (8 + EXPERTS * 8) + stacks * USED // EXPERTS


def test_the_sparse_mixer_weighs_each_choice_among_the_close_experts_that_are_left() -> None:
    """In Phi MoE, a score counts only if its distance to the best score is at most 2 % of the larger magnitude
    of both.
    """

    def share(z: np.ndarray) -> dict[int, float]:
        left, found = z.copy(), {}
        for e in best(z):
            masked = np.where((z[e] - z) / np.maximum(np.abs(z), z[e]) > 0.02, -np.inf, left)
            found[e] = softmax(masked)[e]
            left[e] = -np.inf
        shares.extend(found.values())
        return found

    shares: list[float] = []
    routes = (ROUTER[:1] + 0.04 * ROUTER).astype(np.float32)
    close(run(mixture("sparse_mixer", routes=routes)), mixture_by_hand(share, routes=routes))
    assert {round(x, 1) for x in shares} >= {0.3, 0.5, 1.0}  # some tokens have one close expert, some have several


def test_experts_weighted_by_the_root_of_softplus() -> None:
    def share(z: np.ndarray) -> dict[int, float]:
        p = np.sqrt(np.log(1.0 + np.exp(z)))
        chosen = best(p + CHOICE)
        return {e: p[e] / sum(p[c] for c in chosen) for e in chosen}

    close(run(mixture("sqrt_softplus", normalize=True, choice=True)), mixture_by_hand(share))


def test_given_experts_are_weighted_by_their_logits() -> None:
    def build(r: Recorder, x: Value) -> Value:
        stacks = [stack(weight(w, f"w{i}")) for i, w in enumerate((GATE, UP, DOWN))]
        choices = r.embed(weight(np.tile([4.0, 1.0], (11, 1)), "choices"))
        router = r.linear(x, weight(ROUTER, "router"))
        return r.experts(x, router, *stacks, USED, "softmax", False, 1.5, "silu", choices=choices)

    close(run(build), mixture_by_hand(lambda z: {e: softmax(z)[e] for e in (4, 1)}))
