"""Mixture of experts: the chosen experts and their weights equal the reference backend's, and products have the same
bits as with separate matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.plan import Gating, GluActivation, Recorder, Stack, Value
from tests.backends.support import Build, bind, feed, record
from tests.models.support import MemoryWeight, stack

EXPERTS, WIDTH, FFN, TOKENS = 40, 64, 96, 80

random = np.random.RandomState(6)
TABLE = MemoryWeight.of("table", random.standard_normal((TOKENS, WIDTH)))
ROUTER = MemoryWeight.of("router", random.standard_normal((EXPERTS, WIDTH)) / 4)
CHOICE = MemoryWeight.of("choice", random.standard_normal(EXPERTS))
SHAPES = {"gate": (FFN, WIDTH), "up": (FFN, WIDTH), "down": (WIDTH, FFN)}
VALUES = {name: random.standard_normal((EXPERTS, *shape)) / 8 for name, shape in SHAPES.items()}
SCALES = {name: 0.5 + random.random_sample(EXPERTS) for name in SHAPES}
BIASES = {name: random.standard_normal((EXPERTS, shape[0])) for name, shape in SHAPES.items()}

GIVEN = np.array([random.permutation(EXPERTS) for _ in range(TOKENS)], np.float64)  # the experts of each token


def matrix(name: str, format: str, expert: int) -> MemoryWeight:
    return MemoryWeight.of(f"{name}.{expert}", VALUES[name][expert], format)


def stacked(name: str, format: str, extras: bool) -> Stack:
    rows = np.concatenate([matrix(name, format, expert).rows for expert in range(EXPERTS)])
    weight = MemoryWeight(name, format, (EXPERTS, *SHAPES[name]), rows)
    if not extras:
        return stack(weight)
    return stack(weight, MemoryWeight.of(name + ".scale", SCALES[name]), MemoryWeight.of(name + ".bias", BIASES[name]))


def mixture(
    gating: Gating, used: int, formats: Callable[[str], str] = lambda name: "F32", extras: bool = False,
    normalize: bool = False, biased: bool = False, activation: GluActivation = "silu", limit: float = 0.0,
    weighted_input: bool = False, groups: int = 1, groups_used: int = 1, given: bool = False,
) -> Build:  # fmt: skip
    def build(r: Recorder, x: Value) -> Value:
        gate, up, down = (stacked(name, formats(name), extras) for name in SHAPES)
        choice = CHOICE if biased else None
        router = r.linear(x, ROUTER)
        choices = r.embed(MemoryWeight.of("choices", GIVEN[:, :used])) if given else None
        return r.add(
            x,
            r.experts(
                x,
                router,
                gate,
                up,
                down,
                used,
                gating,
                normalize,
                1.5,
                activation,
                choice,
                limit,
                weighted_input,
                groups,
                groups_used,
                choices,
            ),
        )

    return build


@pytest.mark.parametrize(
    "build",
    [
        mixture("softmax", 2),
        mixture("softmax", 4, normalize=True, biased=True),
        mixture("sigmoid", 3, normalize=True, biased=True),
        mixture("sigmoid", 1),
        mixture("softmax_of_chosen", 4, extras=True, activation="swiglu_oai"),
        mixture("sigmoid_of_chosen", 2, weighted_input=True),
        mixture("sigmoid_of_chosen", 34, formats=lambda name: "F16", extras=True, weighted_input=True),
        mixture("softmax", 3, activation="relu"),
        mixture("softmax", 3, activation="swiglu_clamp", limit=0.75),
        mixture("softmax_of_chosen", EXPERTS),  # more experts per token than kernels unroll
        mixture("softmax", 33, normalize=True),
        mixture("sigmoid", 6, normalize=True, biased=True, groups=8, groups_used=3),
        mixture("softmax", 4, groups=5, groups_used=1),
        mixture("sigmoid", 3, groups=EXPERTS, groups_used=7),
        mixture("sigmoid_of_chosen", 20, groups=2, groups_used=1),
        mixture("sqrt_softplus", 3, normalize=True, biased=True, activation="swiglu_clamp", limit=0.75),
        mixture("sqrt_softplus", 3, normalize=True, given=True),
        mixture("softmax_of_chosen", 34, given=True),
        mixture("sparse_mixer", 2),
        mixture("sparse_mixer", 30, biased=True, groups=5, groups_used=4),
    ],
)
def test_choice_weights_and_sum(cpu: CpuBackend, build: Build) -> None:
    """The bound: three float32 products of up to 96 terms have a few hundred roundings of 6e-8 each, of
    values near 1.
    """
    plan = record(TABLE, build)
    ours, theirs = (bind(backend, plan) for backend in (cpu, ReferenceBackend()))
    tokens = np.arange(TOKENS)
    whole = feed(ours, tokens)
    np.testing.assert_allclose(whole, feed(theirs, tokens), rtol=2e-5, atol=2e-5)
    for sizes in ([1] * TOKENS, [2, 3, 4, 17]):
        np.testing.assert_array_equal(feed(ours, tokens, sizes), whole)


@pytest.mark.parametrize("formats", [("F32",) * 3, ("Q8_0",) * 3, ("Q4_0", "F16", "Q8_0"), ("BF16", "Q4_1", "BF16")])
@pytest.mark.parametrize("extras", [False, True])
def test_products_are_those_of_the_matrices_alone(cpu: CpuBackend, formats: tuple[str, ...], extras: bool) -> None:
    """A mixture with one expert per token, whose weight is 1, gives the terms that a larger mixture adds up, bit for
    bit.
    """
    of = dict(zip(SHAPES, formats, strict=True))

    def alone(expert: int) -> Build:
        def product(r: Recorder, x: Value, name: str) -> Value:
            bias = MemoryWeight.of(f"bias.{name}", BIASES[name][expert]) if extras else None
            scale = float(np.float32(SCALES[name][expert])) if extras else 1.0
            return r.linear(x, matrix(name, of[name], expert), bias, scale)

        return lambda r, x: product(r, r.glu(product(r, x, "gate"), product(r, x, "up"), "silu"), "down")

    def only(r: Recorder, x: Value) -> Value:
        gate, up, down = (stacked(name, of[name], extras) for name in SHAPES)
        return r.experts(x, r.linear(x, ROUTER), gate, up, down, 1, "softmax_of_chosen", False, 1.0, "silu")

    tokens = np.arange(TOKENS)
    mixed = feed(bind(cpu, record(TABLE, only)), tokens)
    chosen = (TABLE.values().astype(np.float64) @ ROUTER.values().astype(np.float64).T).argmax(axis=1)
    assert len(np.unique(chosen)) > 8
    assert np.bincount(chosen).max() > 4  # some expert has more tokens than the kernels for packed weights accept
    for expert in np.unique(chosen):
        rows = tokens[chosen == expert]
        np.testing.assert_array_equal(mixed[rows], feed(bind(cpu, record(TABLE, alone(expert))), rows))
