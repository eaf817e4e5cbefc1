"""The conformance table: plans of one operation, each with its rounding bound, and plans of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from localllm.plan import Recorder, Rope, RopeStyle, Value
from localllm.plan.connections import hyper_connection_width
from tests.backends.rounding import (
    Slack,
    blended,
    capped,
    connected,
    erf_form,
    exact,
    exceeding,
    exponential,
    few,
    layer,
    mixed,
    oai,
    of_heads,
    product,
    quick,
    rms,
    rotated,
    sigmoid,
    situated,
    sized,
    soft,
    tanh_form,
    xielu,
)  # fmt: skip
from tests.backends.support import Build, stored
from tests.models.support import MemoryWeight

VOCABULARY = 37

random = np.random.RandomState(11)


def vector(width: int, name: str = "v") -> MemoryWeight:
    return MemoryWeight.of(f"{name}{width}", random.standard_normal(width))


def table(width: int) -> MemoryWeight:
    """Return an embedding table whose first row holds the range limits of exp and similar functions."""
    values = 4.0 * random.standard_normal((VOCABULARY, width)).astype(np.float32)
    edges = (-200.0, -100.0, -88.0, -87.0, -1e-30, 0.0, 1e-30, 60.0, 88.0, 200.0)
    values[0, :] = np.resize(edges, width)
    return MemoryWeight.of("table", values)


def turned_ends(r: Recorder, x: Value, style: RopeStyle, size: int, n_rot: int, again: bool) -> Value:
    """Rotate the last `n_rot` dimensions of each of three heads. With `again`, a later operation reads x too."""
    rope = Rope(style, n_rot, tuple(500.0 ** (-2 * i / n_rot) for i in range(n_rot // 2)), 1.25, 0.1, 7)
    ends = r.rotate(r.slice(x, size - n_rot, size, 3), n_rot, rope)
    y = r.concat(r.slice(x, 0, size - n_rot, 3), ends, 3)
    return r.add(y, r.scale(x, 0.5)) if again else y


@dataclass(frozen=True)
class Case:
    width: int
    build: Build
    slack: Slack


def first(width: int) -> MemoryWeight:
    """Return the matrix (1, width) that selects the first element of a vector."""
    return MemoryWeight.of("first", np.eye(1, width))


def connect(r: Recorder, x: Value, streams: int, parts: int) -> Value:
    """Build hyper-connection coefficients from the first elements of x."""
    width, name = hyper_connection_width(streams, parts), f"of {streams} in {parts}"
    scale = MemoryWeight.of(f"scale {name}", [0.5, 1.0, -0.75][:parts])
    bias = MemoryWeight.of(f"bias {name}", np.sin(np.arange(width)))
    return r.hyper_connection(r.slice(x, 0, width), streams, scale, bias, 1e-3, 1.5, 1e-2, 4)


BLENDS = MemoryWeight.of("blends", np.cos(np.arange(50.0)))
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
    "silu within limits": Case(40, lambda r, x: r.glu(r.scale(x, 2.0), x, "silu_clamp", 0.75), sigmoid),
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
    "activate gelu, exact": Case(31, lambda r, x: r.activate(r.scale(x, 0.25), "gelu_erf"), erf_form),
    "activate gelu, quick": Case(31, lambda r, x: r.activate(x, "gelu_quick"), quick),
    "gelu gate, exact": Case(
        41,
        lambda r, x: r.glu(r.scale(x, 0.25), x, "gelu_erf"),
        lambda x, t: np.abs(x) * erf_form(x, 0 * t) + erf_form(0 * x, t),
    ),
    "gelu gate, quick": Case(41, lambda r, x: r.glu(x, r.scale(x, 0.5), "gelu_quick"), quick),
    "activate sigmoid": Case(32, lambda r, x: r.activate(x, "sigmoid"), sigmoid),
    "activate relu": Case(33, lambda r, x: r.activate(x, "relu"), exact),
    "activate relu2": Case(34, lambda r, x: r.activate(x, "relu2"), few),
    "activate signed root": Case(36, lambda r, x: r.activate(x, "signed_root"), few),
    "activate exp": Case(35, lambda r, x: r.activate(r.clamp(x, 80.0), "exp"), exponential),
    "xielu": Case(45, lambda r, x: r.xielu(r.scale(x, 0.25), 0.8, 0.6, 0.5, -1e-6), xielu),
    "softcap": Case(33, lambda r, x: r.softcap(x, 5.0), capped),
    "clamp": Case(34, lambda r, x: r.clamp(x, 0.5), exact),
    "clamp to other bounds": Case(34, lambda r, x: r.clamp(x, 0.75, -1.5), exact),
    "splice, into a text": Case(50, lambda r, x: r.splice(x, r.embed_media(100), 7), exact),
    "columns": Case(50, lambda r, x: r.slice(x, 7, 40), exact),
    "join": Case(50, lambda r, x: r.concat(x, r.scale(x, 2.0)), exact),
    "join slices": Case(60, lambda r, x: r.concat(r.slice(x, 1, 20, 3), x, 3), exact),
    "join slices of one number, and what they came from": Case(
        33, lambda r, x: r.add(r.concat(x, r.scale(x, 0.5), 33), r.concat(x, x, 3)), exact
    ),
    "columns, one of each slice": Case(60, lambda r, x: r.slice(x, 2, 3, 12), exact),
    "weigh": Case(37, lambda r, x: r.mul(x, vector(37, "weigh")), exact),
    "mix": Case(60, lambda r, x: r.mix(x, 3, r.slice(x, 0, 12)), mixed),
    "mix on a base": Case(64, lambda r, x: r.mix(x, 4, r.slice(x, 3, 19), r.scale(x, 0.5)), mixed),
    "mix by the same numbers": Case(28, lambda r, x: r.mix(x, 1, vector(5, "mix")), mixed),
    "blend": Case(
        50, lambda r, x: r.blend(r.concat(r.scale(x, -0.5), r.slice(x, 0, 50)), x, BLENDS, 1e-5), blended(50)
    ),
    "blend with one": Case(64, lambda r, x: r.blend(r.scale(x, 2.0), x, vector(64, "own"), 1e-5), blended(64)),
    "connect, to read": Case(50, lambda r, x: connect(r, x, 5, 1), connected),
    "connect, to read and write": Case(50, lambda r, x: connect(r, x, 4, 2), connected),
    "connect, to read, write and mix": Case(50, lambda r, x: connect(r, x, 4, 3), connected),
    "connect three streams": Case(50, lambda r, x: connect(r, x, 3, 3), connected),
    "connect nine streams": Case(120, lambda r, x: connect(r, x, 9, 3), connected),
    "situ": Case(40, lambda r, x: r.glu(r.scale(x, 2.0), x, "situ", 1.5), situated),
    "match": Case(50, lambda r, x: r.match(x, r.slice(x, 3, 40), 1e-5), sized(50)),
    "match slices": Case(51, lambda r, x: r.match(r.scale(x, 3.0), x, 1e-5, 3), sized(17)),
    "match what is all but zero": Case(32, lambda r, x: r.match(r.scale(x, 1e-9), x, 1e-5), sized(32)),
    "excess": Case(90, lambda r, x: r.gaussian_top_k(x, 1.5), exceeding),
    "excess below the mean": Case(33, lambda r, x: r.gaussian_top_k(x, -0.5), exceeding),
    "columns of slices, and what they came from": Case(
        96, lambda r, x: r.add(r.slice(x, 3, 24, 4), r.slice(r.scale(x, 0.5), 0, 21, 4)), exact
    ),
}
for width, groups in ((7, 1), (64, 1), (100, 1), (60, 3), (128, 8), (35, 5)):
    weight = vector(width // groups, "rms")
    CASES[f"rms {width} in {groups}"] = Case(
        width, lambda r, x, w=weight, g=groups: r.rms_norm(x, w, 1e-5, g), rms(width // groups)
    )
weight = MemoryWeight.of("rms of each", random.standard_normal((3, 20)))
NUMBERS = vector(60)
CASES["multiply"] = Case(60, lambda r, x: r.scale_columns(x, NUMBERS), exact)
CASES["multiply, by head"] = Case(60, lambda r, x, w=weight: r.scale_columns(x, w, 3), exact)
CASES["rms 60 in 3 with weights of their own"] = Case(60, lambda r, x, w=weight: r.rms_norm(x, w, 1e-5, 3), rms(20))
for shape, groups, bias in (((64,), 1, True), ((45,), 1, True), ((9,), 1, False), ((20,), 3, True), ((3, 20), 3, True)):
    weight = MemoryWeight.of("layer", random.standard_normal(shape))
    added = MemoryWeight.of("bias", random.standard_normal(shape)) if bias else None
    CASES[f"layer {shape} in {groups}" + " with bias" * bias] = Case(
        groups * shape[-1],
        lambda r, x, w=weight, b=added, g=groups: r.layer_norm(x, w, b, 1e-5, g),
        layer(groups, weight, added),
    )
for style in ("interleaved", "neox"):
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
    for size, n_rot, again in ((10, 6, False), (42, 8, True), (100, 64, False)):
        CASES[f"rotate {style}, the last {n_rot} of {size}" + ", and what was rotated" * again] = Case(
            3 * size, lambda r, x, s=style, d=size, n=n_rot, a=again: turned_ends(r, x, s, d, n, a), rotated
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
# One format per unpacking routine is enough, because head matrices differ from other matrices only in their addresses.
HEAD_FORMATS = (
    "F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4", "NVFP4", "IQ2_XS",
    "IQ1_S", "TQ2_0",
)  # fmt: skip
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


# -- recurrent layers ------------------------------------------------------------------------------------------------


def convolution(r: Recorder, x: Value) -> Value:
    return r.convolve(x, MemoryWeight.of("kernel", np.cos(np.arange(x.width * 4.0)).reshape(-1, 4)), vector(x.width))


def products(r: Recorder, x: Value, **widths: int) -> list[Value]:
    """Return small products of x, one per width, or slices of x if its width is the sum of all widths."""
    if x.width == sum(widths.values()):
        cuts = np.cumsum([0, *widths.values()])
        return [r.slice(x, int(start), int(stop)) for start, stop in pairwise(cuts)]
    seeded = np.random.RandomState(3)
    made = {name: 0.3 * seeded.standard_normal((width, x.width)) for name, width in widths.items()}
    return [r.linear(x, MemoryWeight.of(name, values)) for name, values in made.items()]


def linear_attention(
    heads: int, key_heads: int, key_dim: int, dim: int, delta: bool, tiled: bool, channels: bool = False
) -> Build:
    def build(r: Recorder, x: Value) -> Value:
        keys, decays = key_heads * key_dim, heads * key_dim if channels else heads
        q, k, v, g, b = products(r, x, q=keys, k=keys, v=heads * dim, g=decays, b=heads)
        k = r.rms_norm(k, MemoryWeight.of("unit", np.full(key_dim, key_dim**-0.5)), 1e-6, key_heads)
        steps, strength, rate = r.activate(g, "softplus"), r.activate(b, "sigmoid"), -vectors("rate", heads)
        rate[0] *= 8.0 if channels else 1.0  # a head whose state decays to nothing within a few tokens
        skip = None if delta else vectors("skip", heads)
        negative = MemoryWeight.of("rate", rate)
        return r.linear_attention(
            q, k, v, steps, strength, negative, key_heads, delta, tiled,
            None if skip is None else MemoryWeight.of("skip", skip),
        )  # fmt: skip

    return build


def lightning(heads: int, key_dim: int, dim: int) -> Build:
    """Build lightning attention: linear attention in which all steps and strengths are 1."""

    def build(r: Recorder, x: Value) -> Value:
        q, k, v = products(r, x, q=heads * key_dim, k=heads * key_dim, v=heads * dim)
        return r.linear_attention(q, k, v, None, None, MemoryWeight.of("rate", -vectors("rate", heads)), heads)

    return build


def pool(width: int, size: int, parts: int) -> Build:
    def build(r: Recorder, x: Value) -> Value:
        y, scores = products(r, x, pooled=parts * width, scores=parts * width)
        return r.pool(
            y, scores, MemoryWeight.of("bias", np.sin(np.arange(size * parts * width)).reshape(size, -1)), parts
        )

    return build


def ngrams(format: str, width: int, tokens: int, heads: int, end: int = 5) -> Build:
    """Build n-gram embeddings in which an ordinary token ends a text. No hash selects some rows of the table."""
    sizes = [(7, 11, 13, 17, 19, 23)[n % 6] for n in range(heads * (tokens - 1))]
    firsts, multipliers = (1 + np.cumsum([0, *sizes[:-1]])).tolist(), [(3 << 50) + 1, 5 << 40, 1, 999][:tokens]
    values = stored(f"n-grams {format}", format, (sum(sizes) + 5, width))
    return lambda r, x: r.embed_ngrams(values, multipliers, sizes, firsts, end)


def vectors(name: str, width: int) -> np.ndarray:
    return np.asarray(np.random.RandomState(len(name)).uniform(0.05, 0.5, width))


def selective_scan(width: int, state_dim: int) -> Build:
    def build(r: Recorder, x: Value) -> Value:
        inner, dt, b, c = products(r, x, inner=width, dt=width, B=state_dim, C=state_dim)
        a = MemoryWeight.of("A", -np.random.RandomState(4).uniform(0.1, 1.0, (width, state_dim)))
        return r.selective_scan(inner, r.activate(dt, "softplus"), b, c, a, MemoryWeight.of("D", vectors("D", width)))

    return build


def wkv(heads: int, key_dim: int, dim: int, erases: bool, before: bool) -> Build:
    def build(r: Recorder, x: Value) -> Value:
        keys = heads * key_dim
        q, k, v, w, p, a = products(r, x, q=keys, k=keys, v=heads * dim, w=keys, p=keys, a=keys)
        decay, unit = r.activate(w, "sigmoid"), MemoryWeight.of("unit", np.full(key_dim, key_dim**-0.5))
        if not erases:
            return r.wkv(q, k, v, decay, heads, before)
        probe = r.rms_norm(p, unit, 1e-6, heads)
        return r.wkv(q, k, v, decay, heads, before, probe, r.glu(a, probe, "sigmoid"))

    return build


RECURRENT: dict[str, Build] = {
    "convolution": convolution,
    "delta rule, a key head for two": linear_attention(4, 2, 24, 40, delta=True, tiled=False),
    "delta rule, tiled": linear_attention(6, 3, 33, 17, delta=True, tiled=True),
    "Mamba-2": linear_attention(6, 2, 16, 80, delta=False, tiled=False),
    "lightning attention": lightning(3, 20, 24),
    "delta rule, decays by channel": linear_attention(4, 4, 24, 40, delta=True, tiled=False, channels=True),
    "delta rule, decays by channel, tiled": linear_attention(6, 3, 33, 17, delta=True, tiled=True, channels=True),
    "decays by channel, one key head": linear_attention(2, 1, 64, 80, delta=False, tiled=False, channels=True),
    "pool": pool(20, 4, 1),
    "pools that overlap": pool(33, 3, 2),
    "pools of more than a block": pool(16, 80, 1),
    "n-grams": ngrams("F32", 20, 3, 2),
    "n-grams, quantized": ngrams("Q4_K", 256, 4, 1),
    "n-grams, one head": ngrams("F16", 7, 2, 1),
    "selective scan": selective_scan(40, 10),
    "matrix scan": wkv(3, 10, 40, erases=False, before=False),
    "matrix scan, read first": wkv(2, 18, 100, erases=False, before=True),
    "matrix scan that erases": wkv(3, 33, 17, erases=True, before=False),
}
