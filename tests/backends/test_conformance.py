"""The conformance table: every operation of a plan on the CPU backend, against the reference backend.

Both bind the same plan and get the same batches. What may differ is the rounding of float32, and every bound is worked
out from it: u = 2^-24 is one rounding, a chain of n additions errs by at most n u of the sum of magnitudes. The product
with quantized weights has a file of its own, `test_linear.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from localllm import quant
from localllm.backends.base import F16_CACHE, Backend, CacheTypes
from localllm.backends.cache import CACHE_TYPES
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.cpu.unpack import FORMATS
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK, Experts, Recorder, Rope, Value
from tests.backends.support import UNIT, Build, bind, feed, record, stored
from tests.models.support import EVERY_OPERATION, Driver, MemoryWeight

Slack = Callable[[np.ndarray, np.ndarray], Any]  # (x (T, width), truth) -> largest difference allowed, float64

VOCABULARY = 37
ROWS = (1, 3, 13, 17, 70)  # of one batch: tiles of one size and of several, packed and unpacked

random = np.random.RandomState(11)


def vector(width: int, name: str = "v") -> MemoryWeight:
    return MemoryWeight.of(f"{name}{width}", random.standard_normal(width))


def table(width: int) -> MemoryWeight:
    """Embedding rows; the first hold numbers at which exp and its neighbours end."""
    values = 4.0 * random.standard_normal((VOCABULARY, width)).astype(np.float32)
    edges = (-200.0, -100.0, -88.0, -87.0, -1e-30, 0.0, 1e-30, 60.0, 88.0, 200.0)
    values[0, :] = np.resize(edges, width)
    return MemoryWeight.of("table", values)


# -- how far two ways of rounding may be apart -----------------------------------------------------------------------


def exact(x: np.ndarray, truth: np.ndarray) -> float:
    """One operation, rounded once by both."""
    return 0.0


def few(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Two or three roundings of results that do not cancel."""
    return 4 * UNIT * np.abs(truth)


def soft(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """exp errs by 2e-7 of itself, the logarithm by 1e-7 of itself; below e^-87 exp is 0."""
    return (5e-7 + 8 * UNIT) * np.abs(truth) + np.abs(x).max(axis=1, keepdims=True) * np.exp(-87.0)


def xielu(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """exp and a difference round as their terms do: near 0 that is the rounding of x."""
    return (4e-7 + 8 * UNIT) * (np.abs(truth) + np.abs(x) + x * x * (x > 0))


def rms(width: int) -> Slack:
    """16 lanes sum squares, then 4 additions, division, root, reciprocal and two products."""
    return lambda x, truth: (width / 16 + 10) * UNIT * np.abs(truth)


def layer(groups: int, weight: MemoryWeight, bias: MemoryWeight | None) -> Slack:
    """As rms, of x less its mean: the rounding is that of the largest x, not of the difference."""

    def slack(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
        x = x.reshape(len(x), groups, -1)
        ratio = np.abs(x).max(axis=2, keepdims=True) / x.std(axis=2, keepdims=True)
        size = ratio * np.abs(weight.values()) + (0.0 if bias is None else np.abs(bias.values()))
        return 4 * (x.shape[2] / 16 + 10) * UNIT * size.reshape(len(x), -1)

    return slack


def rotated(x: np.ndarray, truth: np.ndarray) -> Any:
    """Cosine and sine rounded, two products, one sum: 4 u of |a| + |b|; the magnitude of the table is below 2."""
    return 2 * 8 * UNIT * np.abs(x).max(axis=1, keepdims=True)


def sigmoid(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """exp(-x) errs by 2e-7 of itself (Cephes) and ends at e^88; the other factor is not larger than x gets."""
    return (2e-7 + 8 * UNIT) * np.abs(truth) + (x * x).max(axis=1, keepdims=True) * np.exp(-88.0)


def mixed(x: np.ndarray, truth: np.ndarray) -> Any:
    """Up to four products and a base, each rounded once; coefficients are numbers of the row, or below 4."""
    most = np.abs(x).max(axis=1, keepdims=True)
    return 6 * UNIT * 4 * most * np.maximum(most, 4.0)


def sized(width: int) -> Slack:
    """As rms, of two rows, and with a root of the quotient."""
    return lambda x, truth: 2 * (width / 16 + 14) * UNIT * np.abs(truth)


def exceeding(x: np.ndarray, truth: np.ndarray) -> Any:
    """The rounding of the cutoff: sums of 16 lanes, as of `layer`, relative to the largest x."""
    return 4 * (x.shape[1] / 16 + 10) * UNIT * np.abs(x).max(axis=1, keepdims=True)


def tanh_form(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """exp's argument errs by 4 u of itself; the truth is 1 + tanh, which near -1 is rounded at 1e-16."""
    argument = 1.6 * (np.abs(x) + 0.045 * np.abs(x) ** 3)
    return (2e-7 + (8 + 4 * argument) * UNIT) * np.abs(truth) + 1e-15 * np.abs(x)


def oai(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """A sigmoid of 1.702 x, and u + 1, whose rounding is that of 1."""
    return (2e-7 + 16 * UNIT) * np.abs(truth) + 4 * UNIT * np.abs(x)


def capped(x: np.ndarray, truth: np.ndarray) -> float:
    """5 * tanh is 5 * (1 - 2 / (e^2x + 1)): good to the rounding of 1, not to that of small results."""
    return 5 * (4e-7 + 4 * UNIT)


def product(*weights: MemoryWeight) -> Slack:
    """Chains of fused multiply-adds, each of its own input; a scale, a bias and a residual round once more. BF16 has
    each activation rounded to 8 bits before."""

    def slack(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
        each = [np.abs(x) @ np.abs(w.values().astype(np.float64)).T for w in weights]
        rounded = sum(terms for terms, w in zip(each, weights, strict=True) if w.format == "BF16")
        return (x.shape[1] + 4) * UNIT * (sum(each) + np.abs(truth) + 4.0) + 2.0**-8 * rounded

    return slack


def of_heads(weight: MemoryWeight) -> Slack:
    """`product` of each head's slice of x with the head's matrix."""
    matrices = [MemoryWeight.of(weight.name, matrix, weight.format) for matrix in weight.values()]

    def slack(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
        slices = [np.split(rows, len(matrices), axis=1) for rows in (x, truth)]
        return np.concatenate([product(w)(*own) for w, *own in zip(matrices, *slices, strict=True)], axis=1)

    return slack


# -- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    width: int
    build: Build
    slack: Slack


def first(width: int) -> MemoryWeight:
    """The matrix (1, width) that picks the first number of a row."""
    return MemoryWeight.of("first", np.eye(1, width))


CASES: dict[str, Case] = {
    "add": Case(50, lambda r, x: r.add(x, r.scale(x, 0.75)), exact),
    "add to itself": Case(64, lambda r, x: r.add(x, x), exact),
    "scale": Case(17, lambda r, x: r.scale(x, -0.375), exact),
    "scale, and what was scaled": Case(33, lambda r, x: r.add(r.scale(x, 2.0), x), exact),
    "silu": Case(70, lambda r, x: r.glu(x, r.scale(x, -0.5), "silu"), sigmoid),
    "silu of itself": Case(32, lambda r, x: r.glu(x, x, "silu"), sigmoid),
    "gelu": Case(41, lambda r, x: r.glu(r.scale(x, 0.25), x, "gelu"), lambda x, t: 4 * tanh_form(x / 4, t)),
    "gelu alone": Case(41, lambda r, x: r.glu(r.scale(x, 0.25), x, "gelu_alone"), lambda x, t: tanh_form(x / 4, t)),
    "sigmoid gate": Case(20, lambda r, x: r.glu(x, x, "sigmoid"), sigmoid),
    "swiglu of gpt-oss": Case(47, lambda r, x: r.glu(x, r.scale(x, -2.0), "swiglu_oai"), oai),
    "relu gate": Case(23, lambda r, x: r.glu(x, r.scale(x, 0.5), "relu"), few),
    "softplus gate": Case(37, lambda r, x: r.glu(x, r.scale(x, 0.5), "softplus"), soft),
    "product": Case(37, lambda r, x: r.glu(x, x, "identity"), exact),
    "swiglu within limits": Case(40, lambda r, x: r.glu(x, r.scale(x, 3.0), "swiglu_clamp", 2.5), sigmoid),
    "silu within limits": Case(40, lambda r, x: r.glu(r.scale(x, 2.0), x, "silu_clamp", 1.5), sigmoid),
    "gates of slices": Case(
        60, lambda r, x: r.glu(r.linear(x, MemoryWeight.of("three", np.eye(3, 60))), x, "sigmoid"), sigmoid
    ),
    "gates of slices, softplus": Case(
        128, lambda r, x: r.glu(r.linear(x, MemoryWeight.of("eight", np.eye(8, 128))), x, "softplus"), soft
    ),
    "gate of a row": Case(50, lambda r, x: r.glu(r.linear(x, first(x.width)), x, "sigmoid"), sigmoid),
    "gate of a row, narrow": Case(24, lambda r, x: r.glu(r.linear(x, first(x.width)), x, "silu"), sigmoid),
    "activate silu": Case(30, lambda r, x: r.activate(x, "silu"), sigmoid),
    "activate gelu": Case(31, lambda r, x: r.activate(r.scale(x, 0.25), "gelu"), lambda x, t: tanh_form(x / 4, t)),
    "activate sigmoid": Case(32, lambda r, x: r.activate(x, "sigmoid"), sigmoid),
    "activate relu": Case(33, lambda r, x: r.activate(x, "relu"), exact),
    "activate relu2": Case(34, lambda r, x: r.activate(x, "relu2"), few),
    "xielu": Case(45, lambda r, x: r.xielu(r.scale(x, 0.25), 0.8, 0.6, 0.5, -1e-6), xielu),
    "softcap": Case(33, lambda r, x: r.softcap(x, 5.0), capped),
    "clamp": Case(34, lambda r, x: r.clamp(x, 0.5), exact),
    "columns": Case(50, lambda r, x: r.columns(x, 7, 40), exact),
    "join": Case(50, lambda r, x: r.join(x, r.scale(x, 2.0)), exact),
    "join slices": Case(60, lambda r, x: r.join(r.columns(x, 1, 20, 3), x, 3), exact),
    "join slices of one number, and what they came from": Case(
        33, lambda r, x: r.add(r.join(x, r.scale(x, 0.5), 33), r.join(x, x, 3)), exact
    ),
    "columns, one of each slice": Case(60, lambda r, x: r.columns(x, 2, 3, 12), exact),
    "weigh": Case(37, lambda r, x: r.weigh(x, vector(37, "weigh")), exact),
    "mix": Case(60, lambda r, x: r.mix(x, 3, r.columns(x, 0, 12)), mixed),
    "mix on a base": Case(64, lambda r, x: r.mix(x, 4, r.columns(x, 3, 19), r.scale(x, 0.5)), mixed),
    "mix by the same numbers": Case(28, lambda r, x: r.mix(x, 1, vector(5, "mix")), mixed),
    "match": Case(50, lambda r, x: r.match(x, r.columns(x, 3, 40), 1e-5), sized(50)),
    "match slices": Case(51, lambda r, x: r.match(r.scale(x, 3.0), x, 1e-5, 3), sized(17)),
    "match what is all but zero": Case(32, lambda r, x: r.match(r.scale(x, 1e-9), x, 1e-5), sized(32)),
    "excess": Case(90, lambda r, x: r.excess(x, 1.5), exceeding),
    "excess below the mean": Case(33, lambda r, x: r.excess(x, -0.5), exceeding),
    "columns of slices, and what they came from": Case(
        96, lambda r, x: r.add(r.columns(x, 3, 24, 4), r.columns(r.scale(x, 0.5), 0, 21, 4)), exact
    ),
}
for width, groups in ((7, 1), (64, 1), (100, 1), (60, 3), (128, 8), (35, 5)):
    weight = vector(width // groups, "rms")
    CASES[f"rms {width} in {groups}"] = Case(
        width, lambda r, x, w=weight, g=groups: r.rms_norm(x, w, 1e-5, g), rms(width // groups)
    )
weight = MemoryWeight.of("rms of each", random.standard_normal((3, 20)))
NUMBERS = vector(60)
CASES["multiply"] = Case(60, lambda r, x: r.multiply(x, NUMBERS), exact)
CASES["multiply, by head"] = Case(60, lambda r, x, w=weight: r.multiply(x, w, 3), exact)
CASES["rms 60 in 3 with weights of their own"] = Case(60, lambda r, x, w=weight: r.rms_norm(x, w, 1e-5, 3), rms(20))
for shape, groups, bias in (((64,), 1, True), ((45,), 1, True), ((9,), 1, False), ((20,), 3, True), ((3, 20), 3, True)):
    weight = MemoryWeight.of("layer", random.standard_normal(shape))
    added = MemoryWeight.of("bias", random.standard_normal(shape)) if bias else None
    CASES[f"layer {shape} in {groups}" + " with bias" * bias] = Case(
        groups * shape[-1],
        lambda r, x, w=weight, b=added, g=groups: r.layer_norm(x, w, b, 1e-5, g),
        layer(groups, weight, added),
    )
for style in ("norm", "neox"):
    for head_dim, n_rot in ((8, 8), (16, 16), (20, 20), (64, 64), (80, 80), (96, 40), (10, 6), (12, 2), (128, 128)):
        frequencies = tuple(500.0 ** (-2 * i / n_rot) for i in range(n_rot // 2))
        CASES[f"rotate {style}, {n_rot} of {head_dim}"] = Case(
            3 * head_dim,
            lambda r, x, s=style, d=head_dim, n=n_rot, f=frequencies: r.rotate(x, d, Rope(s, n, f, 1.25, 0.1, 7)),
            rotated,
        )
    CASES[f"rotate {style}, and what was rotated"] = Case(
        24, lambda r, x, s=style: r.add(r.rotate(x, 12, Rope(s, 6, (1.0, 0.3, 0.1))), r.scale(x, 0.5)), rotated
    )
for format in ("F32", "F16", "BF16"):
    for rows, columns in ((1, 7), (5, 33), (16, 16), (33, 100), (70, 257)):
        w = stored(f"w{rows}", format, (rows, columns))
        b = vector(rows, "b")
        CASES[f"linear {format} {rows} x {columns}"] = Case(columns, lambda r, x, w=w: r.linear(x, w), product(w))
        CASES[f"linear {format} {rows} x {columns}, scale and bias"] = Case(
            columns, lambda r, x, w=w, b=b: r.linear(x, w, b, 0.3), product(w)
        )
for format, heads, rows, columns in (
    ("F32", 3, 5, 14), ("F16", 2, 70, 34), ("BF16", 3, 33, 18), ("F32", 5, 32, 64), ("F16", 1, 64, 96),
):  # fmt: skip
    w = stored(f"heads{rows}", format, (heads * rows, columns))
    w = replace(w, shape=(heads, rows, columns))
    CASES[f"head linear {format} {heads} x {rows} x {columns}"] = Case(
        heads * columns, lambda r, x, w=w: r.head_linear(x, w), of_heads(w)
    )
SQUARE, OTHER = stored("square", "F32", (48, 48)), stored("other", "F16", (48, 48))
BIAS = vector(48, "b")
CASES |= {
    "residual": Case(48, lambda r, x: r.add(x, r.linear(x, SQUARE)), product(SQUARE)),
    "residual with bias and scale": Case(48, lambda r, x: r.add(r.linear(x, SQUARE, BIAS, 0.5), x), product(SQUARE)),
    "residual read again": Case(
        48, lambda r, x: r.add(r.scale(x, -1.0), r.add(r.linear(x, SQUARE), x)), product(SQUARE, SQUARE)
    ),
    "sum of two products": Case(
        48, lambda r, x: r.add(r.linear(x, SQUARE), r.linear(x, OTHER)), product(SQUARE, OTHER)
    ),
    "product used twice": Case(48, lambda r, x: twice(r, r.linear(x, SQUARE)), product(SQUARE, SQUARE)),
    "residual older than its product's input": Case(
        48, lambda r, x: r.add(r.linear(r.scale(x, 2.0), OTHER), x), product(OTHER, OTHER)
    ),
}


def twice(r: Recorder, y: Value) -> Value:
    return r.add(r.scale(y, 0.5), y)


@pytest.mark.parametrize("name", CASES)
def test_rows(cpu: CpuBackend, name: str) -> None:
    """Every row within the rounding of float32, and the same bits whatever the number of rows in the batch."""
    case = CASES[name]
    embedding = table(case.width)
    plan = record(embedding, case.build)
    ours, theirs = bind(cpu, plan), bind(ReferenceBackend(), plan)
    tokens = np.resize(np.random.RandomState(2).permutation(VOCABULARY), max(ROWS))
    truth = feed(theirs, tokens).astype(np.float64)
    slack = case.slack(embedding.values()[tokens].astype(np.float64), truth)
    whole = feed(ours, tokens)
    assert (np.abs(whole - truth) <= slack).all(), np.abs(whole - truth).max()
    for rows in ROWS:
        np.testing.assert_array_equal(feed(ours, tokens, [rows]), whole)


def head_matrices(format: str, rows: int) -> MemoryWeight:
    """Two matrices (rows, columns) of a format, as one stack."""
    columns = max(quant.FORMATS[format].block_values, 30)
    return replace(stored("heads", format, (2 * rows, columns)), shape=(2, rows, columns))


def side_by_side(weight: MemoryWeight) -> Build:
    """`head_linear`, as a product for each head."""
    _, rows, columns = weight.shape

    def build(r: Recorder, x: Value) -> Value:
        parts = [
            replace(weight, name=str(n), shape=(rows, columns), rows=weight.rows[n * rows :][:rows]) for n in (0, 1)
        ]
        a, b = (r.linear(r.columns(x, n * columns, (n + 1) * columns), part) for n, part in enumerate(parts))
        return r.join(a, b)

    return build


@pytest.mark.parametrize("rows", [32, 41])
@pytest.mark.parametrize("format", FORMATS)
def test_a_head_has_the_bits_of_a_product_of_its_own(cpu: CpuBackend, format: str, rows: int) -> None:
    weight = head_matrices(format, rows)
    embedding = table(2 * weight.shape[2])
    ours = bind(cpu, record(embedding, lambda r, x: r.head_linear(x, weight)))
    theirs = bind(cpu, record(embedding, side_by_side(weight)))
    tokens = np.resize(np.random.RandomState(2).permutation(VOCABULARY), 70)
    for sizes in ([], [1, 2, 17]):
        np.testing.assert_array_equal(feed(ours, tokens, sizes), feed(theirs, tokens))


@pytest.mark.parametrize("format", FORMATS)
def test_embed_gives_the_numbers_of_the_file(cpu: CpuBackend, format: str) -> None:
    """To the bit, for blocks of every size from subnormal up; 37 tokens do not fill their panels."""
    columns = 2 * quant.FORMATS[format].block_values if quant.FORMATS[format].block_values > 1 else 21
    weight = stored("table", format, (VOCABULARY, columns), low=0.0, high=3e38)
    tokens = np.resize(np.arange(VOCABULARY)[::-1], 70)
    ours = bind(cpu, record(weight, lambda r, x: x))
    for sizes in ([], [1, 2]):
        np.testing.assert_array_equal(feed(ours, tokens, sizes), weight.values()[tokens])


def test_select_rows(cpu: CpuBackend) -> None:
    embedding = table(40)
    executable = bind(cpu, record(embedding, lambda r, x: r.scale(r.select_rows(x), 2.0)))
    driver = Driver(executable)
    for wanted in ([4, 0, 2], [], [1], [4] * 30):
        rows = driver.step([(0, [7, 1, 30, 1, 5])], logit_rows=wanted)
        np.testing.assert_array_equal(rows, 2 * embedding.values()[np.array([7, 1, 30, 1, 5])[wanted].astype(int)])


def test_positions_have_rows_of_a_table(cpu: CpuBackend) -> None:
    """Of the position, whatever the token is; positions past the table's end have the last row."""
    embedding, positions = table(40), MemoryWeight.of("positions", random.standard_normal((50, 40)))
    plan = record(embedding, lambda r, x: r.add(x, r.embed(positions, positions=True)))
    tokens = np.resize(np.arange(VOCABULARY)[::-1], 70)
    expected = embedding.values()[tokens] + positions.values()[np.minimum(np.arange(70), 49)]
    for sizes in ([], [1, 2]):
        np.testing.assert_array_equal(feed(bind(cpu, plan), tokens, sizes), expected)


# -- recurrent layers ------------------------------------------------------------------------------------------------


def convolution(r: Recorder, x: Value) -> Value:
    return r.convolve(x, MemoryWeight.of("kernel", np.cos(np.arange(x.width * 4.0)).reshape(-1, 4)), vector(x.width))


def products(r: Recorder, x: Value, **widths: int) -> list[Value]:
    """Small products of x, one of each width."""
    seeded = np.random.RandomState(3)
    made = {name: 0.3 * seeded.standard_normal((width, x.width)) for name, width in widths.items()}
    return [r.linear(x, MemoryWeight.of(name, values)) for name, values in made.items()]


def linear_attention(heads: int, key_heads: int, key_dim: int, dim: int, delta: bool, tiled: bool) -> Build:
    def build(r: Recorder, x: Value) -> Value:
        q, k, v, g, b = products(r, x, q=key_heads * key_dim, k=key_heads * key_dim, v=heads * dim, g=heads, b=heads)
        k = r.rms_norm(k, MemoryWeight.of("unit", np.full(key_dim, key_dim**-0.5)), 1e-6, key_heads)
        steps, strength, rate = r.activate(g, "softplus"), r.activate(b, "sigmoid"), -vectors("rate", heads)
        skip = None if delta else vectors("skip", heads)
        negative = MemoryWeight.of("rate", rate)
        return r.linear_attention(
            q, k, v, steps, strength, negative, key_heads, delta, tiled,
            None if skip is None else MemoryWeight.of("skip", skip),
        )  # fmt: skip

    return build


def vectors(name: str, width: int) -> np.ndarray:
    return np.asarray(np.random.RandomState(len(name)).uniform(0.05, 0.5, width))


def selective_scan(width: int, state_dim: int) -> Build:
    def build(r: Recorder, x: Value) -> Value:
        inner, dt, b, c = products(r, x, inner=width, dt=width, B=state_dim, C=state_dim)
        a = MemoryWeight.of("A", -np.random.RandomState(4).uniform(0.1, 1.0, (width, state_dim)))
        return r.selective_scan(inner, r.activate(dt, "softplus"), b, c, a, MemoryWeight.of("D", vectors("D", width)))

    return build


RECURRENT: dict[str, Build] = {
    "convolution": convolution,
    "delta rule, a key head for two": linear_attention(4, 2, 24, 40, delta=True, tiled=False),
    "delta rule, tiled": linear_attention(6, 3, 33, 17, delta=True, tiled=True),
    "Mamba-2": linear_attention(6, 2, 16, 80, delta=False, tiled=False),
    "selective scan": selective_scan(40, 10),
}


def check_recurrent(backend: Backend, name: str) -> None:
    """Rows within a block, a block to its end, several blocks; then back into a block, and on with other tokens.

    The stores round every row to float32 and the chains are short: allow 2e-6, 30 units, of the largest result.
    """
    plan = record(MemoryWeight.of("table", np.random.RandomState(6).standard_normal((VOCABULARY, 48))), RECURRENT[name])
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, 400)
    ours, theirs = (Driver(bind(b, plan, rows=160), sequences=2) for b in (backend, ReferenceBackend()))
    for start, parts in enumerate([[(0, 1)], [(0, 63), (1, 3)], [(0, 1), (1, 60)], [(1, 150)], [(0, 1), (1, 1)]]):
        batch = [(s, tokens[start + 7 * s : start + 7 * s + count]) for s, count in parts]
        found, expected = ours.step(batch), theirs.step(batch)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    for back in (200, 195):
        for driver in (ours, theirs):
            driver.lengths[1] = back
        found, expected = (
            ours.step([(1, tokens[back - 150 : back - 100])]),
            theirs.step([(1, tokens[back - 150 : back - 100])]),
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(cpu: CpuBackend, name: str) -> None:
    check_recurrent(cpu, name)


# -- the cache -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """Query heads, key-value heads, width of a key, and what else attention may be asked for."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    chunked: bool = False
    value_dim: int = 0  # 0: as wide as a key
    causal: bool = True

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of the queries, the keys and the values of a row."""
        value_dim = self.value_dim or self.head_dim
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * value_dim


HEADS = (  # groups of 1, 2, 3, 4, 7, 8, 9; widths that fill no vector; windows within a block, over one and over many
    Heads(1, 1, 8),
    Heads(3, 3, 7),
    Heads(2, 1, 64),
    Heads(6, 2, 16),
    Heads(4, 1, 20),
    Heads(7, 1, 96),
    Heads(8, 1, 80),
    Heads(4, 2, 128),
    Heads(9, 1, 12),
    Heads(4, 2, 16, window=9),
    Heads(2, 2, 32, window=70),
    Heads(2, 1, 16, softcap=1.5),
    Heads(6, 2, 16, sinks=True),
    Heads(8, 2, 24, window=33, softcap=2.0, sinks=True),
    Heads(4, 2, 32, slopes=True),
    Heads(6, 2, 16, window=70, softcap=1.5, sinks=True, slopes=True),
    Heads(4, 2, 16, window=48, chunked=True),
    Heads(4, 2, 24, value_dim=16),
    Heads(3, 1, 7, value_dim=20),
    Heads(6, 2, 16, window=9, sinks=True, value_dim=40),
    Heads(16, 1, 72, value_dim=64),
    Heads(5, 1, 576, value_dim=512),
)


def attend(h: Heads) -> Build:
    """The row is queries, keys and values side by side."""
    cuts = np.cumsum([0, *h.widths])
    sinks = MemoryWeight.of("sinks", 2 * np.random.RandomState(4).standard_normal(h.heads)) if h.sinks else None

    slopes = MemoryWeight.of("slopes", 2.0 ** -np.arange(1, h.heads + 1)) if h.slopes else None

    def build(r: Recorder, x: Value) -> Value:
        q, k, v = (r.columns(x, int(start), int(stop)) for start, stop in pairwise(cuts))
        r.append(k, v, h.kv_heads)
        return r.attention(q, 0, h.heads, h.head_dim**-0.5, h.window, h.softcap, sinks, slopes, h.chunked, h.causal)

    return build


def attend_twice(h: Heads) -> Build:
    """Two attentions, of different queries, over the keys and values that only the first one's layer writes."""
    once = attend(h)

    def build(r: Recorder, x: Value) -> Value:
        first = once(r, x)
        q = r.linear(first, MemoryWeight.of("own queries", np.eye(first.width)[::-1].copy()))
        return r.add(first, r.attention(q, 0, h.heads, h.head_dim**-0.5, h.window))

    return build


def attention_slack(values: np.ndarray, h: Heads, seen: int, blocks: bool = False) -> float:
    """A score errs by (D + 3) u of its terms (twice their root mean square), a capped one by that of tanh; every weight
    moves by twice that and by exp's own error; then come sums of at most `seen` terms. For values in blocks weights are
    rounded by 2^-15 of the largest of 64, up or down: so much of a sum as the root of their number."""
    q, k, v = np.split(np.abs(values.astype(np.float64)), np.cumsum(h.widths[:2]), axis=1)
    terms = 2 * h.head_dim**0.5 * np.sqrt((q**2).mean() * (k**2).mean())
    score = (h.head_dim + 3) * UNIT * terms + 4e-7 * h.softcap + h.slopes * UNIT * seen
    rounded = blocks * BLOCK**0.5 * 2.0**-15
    return float((2 * score + 4e-7 + 2 * seen * UNIT + rounded) * v.max())


CACHES = (  # every type of keys and of values; heads that fill no block, one block, several; one and many rotated
    *((Heads(4, 2, width), CacheTypes(name, name)) for width in (20, 64) for name in CACHE_TYPES if name != "f16"),
    (Heads(7, 1, 96), CacheTypes("q8_0", "q4_0")),
    (Heads(8, 1, 80), CacheTypes("q5_1", "f16")),
    (Heads(4, 2, 128), CacheTypes("f16", "q5_0")),
    (Heads(8, 2, 24, window=33, softcap=2.0, sinks=True), CacheTypes("q4_1", "fp8")),
    (Heads(4, 2, 256, window=70), CacheTypes("bf16", "q8_0")),
    *((Heads(4, 2, 48, value_dim=32), CacheTypes(name, name)) for name in CACHE_TYPES if name != "f16"),
    (Heads(17, 1, 80, value_dim=64), CacheTypes("q4_0", "q5_1")),
    (Heads(6, 2, 20, value_dim=34, sinks=True), CacheTypes("q8_0", "q4_1")),
)


MANY = (
    Heads(17, 1, 4),
    Heads(37, 1, 4),
    Heads(263, 1, 4, sinks=True),
    Heads(37, 1, 4, slopes=True),
)  # groups that kernels loop over


BOTH_WAYS = (
    Heads(4, 2, 16, causal=False),
    Heads(2, 1, 24, softcap=1.5, sinks=True, causal=False),
    Heads(4, 2, 32, slopes=True, causal=False),
    Heads(6, 2, 16, window=9, causal=False),
    Heads(2, 2, 32, window=140, slopes=True, causal=False),
)


@pytest.mark.parametrize(("h", "cache"), [*((h, F16_CACHE) for h in HEADS + MANY + BOTH_WAYS), *CACHES], ids=str)
def test_attention(cpu: CpuBackend, h: Heads, cache: CacheTypes) -> None:
    """Two sequences in one batch, cut anywhere, over several blocks; then one goes on from a copy of the other's."""
    values = np.random.RandomState(h.head_dim).standard_normal((VOCABULARY, sum(h.widths))).astype(np.float32)
    plan = record(MemoryWeight.of("table", values), attend(h))
    ours, theirs = (Driver(bind(b, plan, rows=128, cache=cache), sequences=2) for b in (cpu, ReferenceBackend()))
    slack = attention_slack(values, h, 3 * BLOCK, CACHE_TYPES[cache.values].blocks)
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, 400)
    steps = [[(0, 1)], [(0, 5), (1, 3)], [(1, 1), (0, 1)], [(0, 70), (1, 40)], [(0, 1), (1, 1)], [(1, 17), (0, 50)]]

    def step(parts: list[tuple[int, int]], start: int) -> None:
        batch = [(s, tokens[start + 7 * s : start + 7 * s + count]) for s, count in parts]
        np.testing.assert_allclose(ours.step(batch), theirs.step(batch), rtol=0, atol=slack)

    for start, parts in enumerate(steps):
        step(parts, 31 * start)
    for driver in (ours, theirs):
        driver.executable.copy_blocks(driver.tables[0, :2], driver.tables[1, :2])
        driver.lengths = [driver.lengths[0], 2 * BLOCK - 5]
    step([(1, 30), (0, 2)], 300)


@pytest.mark.parametrize("h", [Heads(4, 2, 16), Heads(4, 2, 16, window=9)], ids=str)
def test_a_layer_may_read_the_cache_of_another(cpu: CpuBackend, h: Heads) -> None:
    """An error of the first attention moves the second one's queries: allow ten times the bound of one."""
    values = np.random.RandomState(6).standard_normal((VOCABULARY, 128)).astype(np.float32)
    plan = record(MemoryWeight.of("table", values), attend_twice(h))
    assert len(plan.layers) == 1
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, 100)
    ours, theirs = (feed(bind(b, plan, rows=100), tokens, [30, 1]) for b in (cpu, ReferenceBackend()))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=10 * attention_slack(values, h, 2 * BLOCK))


def attend_wanted(h: Heads, early: bool) -> Build:
    """Rotated queries of the rows whose logits are wanted, selected before they are rotated or after attention."""
    width = (h.heads + 2 * h.kv_heads) * h.head_dim
    cuts = np.cumsum([0, h.heads * h.head_dim, h.kv_heads * h.head_dim, h.kv_heads * h.head_dim])
    rope = Rope("neox", h.head_dim, tuple(0.8**i for i in range(h.head_dim // 2)))

    def build(r: Recorder, x: Value) -> Value:
        q, k, v = (r.linear(x, MemoryWeight.of(f"pick{i}", np.eye(width)[cuts[i] : cuts[i + 1]])) for i in range(3))
        r.append(r.rotate(k, h.head_dim, rope), v, h.kv_heads)
        q = r.select_rows(q) if early else q
        y = r.attention(r.rotate(q, h.head_dim, rope), 0, h.heads, h.head_dim**-0.5, h.window)
        return y if early else r.select_rows(y)

    return build


WANTED = (  # of 60 rows of one sequence and 20 of another: all, none, few, out of order, one of them often
    list(range(80)), [], [79], [3, 17, 59, 60, 61], [70, 2, 40, 1], [33] * 30, [*range(79, 40, -1)],
)  # fmt: skip


def wanted_rows(backend: Backend, h: Heads, early: bool, cache: CacheTypes = F16_CACHE) -> list[np.ndarray]:
    """Results of `attend_wanted` for each of WANTED, after a block of other positions."""
    width = (h.heads + 2 * h.kv_heads) * h.head_dim
    values = np.random.RandomState(6).standard_normal((VOCABULARY, width)).astype(np.float32)
    tokens, found = np.random.RandomState(1).randint(0, VOCABULARY, 180), []
    plan = record(MemoryWeight.of("table", values), attend_wanted(h, early))
    for wanted in WANTED:
        driver = Driver(bind(backend, plan, rows=100, cache=cache), sequences=2)
        driver.step([(0, tokens[:70]), (1, tokens[70:100])], logit_rows=[])
        found.append(driver.step([(0, tokens[100:160]), (1, tokens[160:])], logit_rows=wanted))
        driver.executable.close()
    return found


@pytest.mark.parametrize("cache", [F16_CACHE, CacheTypes("q8_0", "q8_0")], ids=str)
@pytest.mark.parametrize("h", [Heads(4, 2, 16), Heads(4, 1, 32, window=9)], ids=str)
def test_rows_that_are_wanted_keep_their_positions(cpu: CpuBackend, h: Heads, cache: CacheTypes) -> None:
    """The same bits whether rows are selected before they are rotated and attend, or after."""
    for early, late in zip(wanted_rows(cpu, h, True, cache), wanted_rows(cpu, h, False, cache), strict=True):
        np.testing.assert_array_equal(early, late)


@pytest.mark.parametrize("cache", [F16_CACHE, CacheTypes("q8_0", "q8_0")], ids=str)
@pytest.mark.parametrize("heads", [37, 263])
def test_a_head_among_many_has_the_bits_that_it_has_alone(cpu: CpuBackend, heads: int, cache: CacheTypes) -> None:
    """Many query heads of one key-value head are a loop; a few are written out."""
    h = Heads(heads, 1, 8)
    values = np.random.RandomState(8).standard_normal((VOCABULARY, (heads + 2) * 8)).astype(np.float32)

    def run(h: Heads, columns: np.ndarray) -> np.ndarray:
        plan = record(MemoryWeight.of("table", np.ascontiguousarray(values[:, columns])), attend(h))
        driver = Driver(bind(cpu, plan, rows=128, cache=cache))
        return np.concatenate([driver.step([(0, np.arange(count) % VOCABULARY)]) for count in (1, 90, 1)])

    together = run(h, np.arange(values.shape[1]))
    for head in (0, 1, heads // 2, heads - 1):
        own = np.r_[head * 8 : head * 8 + 8, heads * 8 : heads * 8 + 16]
        np.testing.assert_array_equal(run(Heads(1, 1, 8), own), together[:, head * 8 : head * 8 + 8])


@pytest.mark.parametrize("name", [name for name, type_ in CACHE_TYPES.items() if type_.blocks])
def test_a_sink_coarsens_no_other_weight(cpu: CpuBackend, name: str) -> None:
    """One position takes nearly all weight and has next to no value, as first tokens do: the others' weights are
    rounded as shares of what reaches the sum, and the answer is as exact as without it."""
    values = np.random.RandomState(0).standard_normal((8, 96)).astype(np.float32)
    values[:, :64] = 0.0
    values[:, 0] = 1.0  # queries
    values[0, 32], values[0, 64:] = 7.0 * 32**0.5, 1e-6  # the sink: 1100 times the weight of another
    plan = record(MemoryWeight.of("table", values), attend(Heads(1, 1, 32)))
    tokens = np.concatenate([[0], np.random.RandomState(1).randint(1, 8, 40)])
    ours, theirs = (feed(bind(b, plan, cache=CacheTypes("f16", name)), tokens)[40] for b in (cpu, ReferenceBackend()))
    assert np.abs(theirs).max() < 0.05
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4 * np.abs(theirs).max())


def test_large_keys_and_values_stay_in_the_range_of_halves(cpu: CpuBackend) -> None:
    """Half precision ends at 65504: beyond it the cache holds that, not infinity, so the answer stays a number."""
    values = np.zeros((4, 24), np.float32)
    values[:, 16:] = np.array([1e6, -1e6, 65504, 3.0])[:, None]
    executable = bind(cpu, record(MemoryWeight.of("table", values), attend(Heads(1, 1, 8))))
    rows = feed(executable, np.arange(4))
    np.testing.assert_allclose(rows[:, 0], [65504, 0, 65504 / 3, 65507 / 4], rtol=1e-6)


NONE: dict[str, Build] = {
    "silu": lambda r, x: r.activate(x, "silu"),
    "gelu": lambda r, x: r.activate(x, "gelu"),
    "sigmoid": lambda r, x: r.activate(x, "sigmoid"),
    "softcap": lambda r, x: r.softcap(x, 3.0),
    "clamp": lambda r, x: r.clamp(x, 3.0),
    "relu": lambda r, x: r.activate(x, "relu"),
    "relu2": lambda r, x: r.activate(x, "relu2"),
    "xielu": lambda r, x: r.xielu(x, 0.8, 0.6, 0.5, -1e-6),
    "softplus": lambda r, x: r.glu(x, r.scale(x, 0.0), "softplus"),
    "swiglu within limits": lambda r, x: r.glu(r.scale(x, 0.0), x, "swiglu_clamp", 3.0),
    "silu within limits": lambda r, x: r.glu(x, r.scale(x, 0.0), "silu_clamp", 3.0),
    "columns": lambda r, x: r.columns(x, 1, 6, 4),
    "weigh": lambda r, x: r.weigh(x, vector(24)),
    "mix": lambda r, x: r.mix(x, 4, vector(8, "mix")),
    "match": lambda r, x: r.match(x, r.scale(x, 2.0), 1e-5, 2),
    "excess": lambda r, x: r.excess(x, 0.5),
    "join": lambda r, x: r.join(x, x, 4),
    "swiglu of gpt-oss": lambda r, x: r.glu(r.scale(x, 0.0), x, "swiglu_oai"),
    "rms": lambda r, x: r.rms_norm(x, vector(24), 1e-5),
    "layer": lambda r, x: r.layer_norm(x, vector(24), None, 1e-5),
    "linear": lambda r, x: r.linear(x, stored("w", "F16", (5, 24))),
    "attention": attend(Heads(1, 1, 8)),
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_number_is_not_lost(cpu: CpuBackend, name: str) -> None:
    """A NaN, from a damaged file perhaps, stays to be seen by whoever samples; in attention, that of a query."""
    values = np.ones((2, 24), np.float32)
    values[0, 3] = np.nan
    rows = feed(bind(cpu, record(MemoryWeight.of("table", values), NONE[name])), np.array([1, 0, 1]))
    assert [np.isnan(row).any() for row in rows] == [False, True, False]


def test_every_operation_is_in_the_table() -> None:
    """The plans above hold every operation that there is; experts have a file of their own, `test_experts.py`."""
    plans = [record(table(case.width), case.build) for case in CASES.values()]
    plans.append(record(table(24), attend(Heads(1, 1, 8))))
    plans.append(record(table(24), lambda r, x: r.select_rows(x)))
    plans += [record(table(48), build) for build in RECURRENT.values()]
    assert {type(op) for plan in plans for op in plan.operations} == EVERY_OPERATION - {Experts}
