"""Small plans that together launch every kernel, in shapes that leave work-groups and tiles partly empty.

They are small because they run on slow platforms: Oclgrind, PoCL with shapes and types as constants, emulated CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from localllm import quant
from localllm.backends.base import F16_CACHE, Backend, CacheTypes
from localllm.backends.gpu import formats
from localllm.backends.gpu.executable import GpuExecutable
from localllm.backends.gpu.kernels.kernel import FEW_ROWS
from localllm.backends.gpu.kernels.largest import SORTED
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK, Batch, Recorder, Rope, Value
from tests.backends.attending import Heads, distances
from tests.backends.cases import (
    RECURRENT,
    VOCABULARY,
    connect,
    lightning,
    linear_attention,
    pool,
    selective_scan,
    wkv,
)
from tests.backends.selecting import Pooling, Selecting, attend_pools, attend_selected, rows_of
from tests.backends.support import Build, bind, record, stored
from tests.models.support import Driver, MemoryWeight, stack

MANY = FEW_ROWS + 1  # smallest prefill: 17 tokens, or 3 on Oclgrind (`simulate.py`)
STEPS = (1, 2, MANY)  # tokens per step: decode, verification of drafts, prefill
# Inner dimension of products: three tensor-core steps; one chunk on Oclgrind, which has no tensor cores.
DEPTH = 96 if MANY > 16 else 32


@dataclass(frozen=True)
class Small:
    """A plan, its steps, and the allowed error relative to the largest result.

    The results of the tokens `before` are not compared. A faster backend may evaluate them, because a
    simulator is slow.
    """

    build: Build
    table: MemoryWeight
    cache: CacheTypes = F16_CACHE
    off: float = 1e-5
    steps: tuple[int, ...] = STEPS
    before: int = 0


WIDTH = 96
VECTOR = MemoryWeight.of("vector", np.linspace(0.5, 1.5, WIDTH))
GROUPS = MemoryWeight.of("groups", np.linspace(0.5, 1.5, WIDTH).reshape(3, 32))
FEW = MemoryWeight.of("few", np.linspace(0.5, 1.5, 78))
FREQUENCIES = tuple(0.5**i for i in range(5))


def table(width: int) -> MemoryWeight:
    return MemoryWeight.of("table", np.random.RandomState(width).standard_normal((VOCABULARY, width)))


def rows(r: Recorder, x: Value) -> Value:
    """Build every operation that treats each token separately."""
    y = r.layer_norm(r.rms_norm(x, VECTOR, 1e-5), VECTOR, VECTOR, 1e-5)
    y = r.splice(r.rms_norm(y, GROUPS, 1e-5, 3), r.embed_media(y.width))
    for style in ("interleaved", "neox"):
        y = r.rotate(y, 12, Rope(style, 10, FREQUENCIES))
    y = r.glu(r.activate(y, "gelu"), r.scale(y, 0.5), "silu")
    y = r.glu(r.activate(y, "sigmoid"), r.activate(y, "silu"), "swiglu_oai")
    y = r.glu(r.slice(x, 3, 29, 3), r.slice(y, 0, 26, 3), "silu")
    y = r.blend(r.concat(y, y), r.scale(y, 0.5), FEW, 1e-5)
    shares = connect(r, x, 2, 3)
    y = r.mix(r.match(r.mul(y, FEW), x, 1e-5, 2), 2, r.slice(shares, 4, 8), r.slice(x, 5, 44, 2))
    y = r.select_rows(r.concat(r.gaussian_top_k(y, 0.5), r.slice(x, 0, 5, 3), 3))
    return r.softcap(r.rotate(y, 31, Rope("interleaved", 10, FREQUENCIES)), 3.0)


def layer(r: Recorder, x: Value) -> Value:
    """Build a layer with every fused operation. It has two heads of 32, normalized and rotated."""

    def product(name: str, y: Value, rows: int) -> Value:
        values = np.random.RandomState(len(name)).standard_normal((rows, y.width)) / y.width**0.5
        return r.linear(y, MemoryWeight.of(name, values, "Q8_0"))

    weight, rope = MemoryWeight.of("weight", np.linspace(0.5, 1.5, 32)), Rope("neox", 10, FREQUENCIES)
    normed = r.rms_norm(x, weight, 1e-5)
    q, k, v = product("queries", normed, 64), product("keys", normed, 32), product("value", normed, 32)
    q, k = (r.rotate(r.rms_norm(y, weight, 1e-5, heads), 32, rope) for y, heads in ((q, 2), (k, 1)))
    r.append(k, v, 1)
    x = r.add(x, product("output", r.attention(q, 0, 2, 32**-0.5), 32))
    normed = r.rms_norm(x, weight, 1e-5)
    hidden = r.glu(product("gate", normed, 32), product("up", normed, 32), "silu")
    return r.add(x, product("down", hidden, 32))


def products(*names: str, depth: int) -> Small:
    """Build the sum of matrix products, one per format, each with five rows, a scale and a bias."""

    def build(r: Recorder, x: Value) -> Value:
        bias, sum = MemoryWeight.of("bias", np.linspace(-1.0, 1.0, 5)), None
        for name in names:
            y = r.linear(x, stored(f"of {name}", name, (5, depth)), bias, 0.01)
            sum = y if sum is None else r.add(sum, y)
        return r.glu(r.linear(x, MemoryWeight.of("one", np.eye(1, depth))), sum, "sigmoid") if len(names) > 2 else sum

    return Small(build, table(depth), off=0.02)


def attended(h: Heads, keys: str = "f16", values: str = "f16", steps: tuple[int, ...] = (2, MANY)) -> Small:
    """Build attention whose queries are x; keys and values are derived from it. One token uses the kernels of few
    tokens.
    """
    width = h.heads * h.head_dim
    picks = [np.eye(h.kv_heads * h.head_dim, width, offset) for offset in (0, 3)]
    sinks = MemoryWeight.of("sinks", np.linspace(-1.0, 1.0, h.heads)) if h.sinks else None
    slopes = MemoryWeight.of("slopes", np.linspace(0.1, 0.5, h.heads)) if h.slopes else None

    def build(r: Recorder, x: Value) -> Value:
        k, v = r.scale(x, -0.75), r.activate(x, "gelu")
        if h.kv_heads < h.heads:
            k, v = (r.linear(x, MemoryWeight.of(f"pick{number}", pick)) for number, pick in enumerate(picks))
        r.append(k, v, h.kv_heads)
        how = (h.window, h.softcap, sinks, slopes, h.chunked, h.causal, distances(h))
        return r.attention(x, 0, h.heads, h.head_dim**-0.5, *how)

    return Small(build, table(width), CacheTypes(keys, values), 2e-3, steps)


def selected(s: Selecting, steps: tuple[int, ...], keys: str = "f16", values: str = "f16") -> Small:
    """Build sparse attention over the positions an indexer selects. Prefill uses the same kernels as decoding."""
    rows = MemoryWeight.of("table", rows_of(s, VOCABULARY))
    return Small(attend_selected(s), rows, CacheTypes(keys, values), 4e-3, steps)


def pools(p: Pooling, steps: tuple[int, ...], keys: str = "f16", values: str = "f16") -> Small:
    """Build attention over a sliding window and pooled keys."""
    rows = MemoryWeight.of("table", rows_of(p, VOCABULARY))
    return Small(attend_pools(p), rows, CacheTypes(keys, values), 4e-3, steps)


def heads(name: str, columns: int) -> Small:
    """Build per-head products: two heads of a format, with five rows each."""
    weight = replace(stored("heads", name, (10, columns)), shape=(2, 5, columns))
    return Small(lambda r, x: r.head_linear(x, weight), table(2 * columns), off=0.02)


def experts(
    kinds: str, used: int, *how: Any, count: int = 3, width: int = 32, ffn: int = 32, extras: bool = False,
    steps: tuple[int, ...] = (2,),
) -> Small:  # fmt: skip
    """Build a mixture of experts with gate, up and down in the formats `kinds`. One token uses the kernels of few
    tokens.
    """
    random = np.random.RandomState(6)
    shapes = {"gate": (count, ffn, width), "up": (count, ffn, width), "down": (count, width, ffn)}
    weights = [
        MemoryWeight.of(name, random.standard_normal(shape) / 4, kind)
        for (name, shape), kind in zip(shapes.items(), kinds.split(), strict=True)
    ]
    router = MemoryWeight.of("router", random.standard_normal((count, width)))
    scales = MemoryWeight.of("scales", 0.5 + random.random_sample(count)) if extras else None
    choice = MemoryWeight.of("choice", random.standard_normal(count)) if extras else None

    def build(r: Recorder, x: Value) -> Value:
        stacks = []
        for weight in weights:
            n = weight.shape[1]
            bias = MemoryWeight.of(f"bias of {weight.name}", np.linspace(-1.0, 1.0, count * n).reshape(count, n))
            stacks.append(stack(weight, scales, bias) if extras else stack(weight))
        return r.add(x, r.experts(x, r.linear(x, router), *stacks, used, *how, choice))

    return Small(build, table(width), off=0.02, steps=steps)


def of_format(name: str) -> Small:
    width = max(2 * quant.FORMATS[name].block_values, 21)
    return Small(lambda r, x: x, stored("table", name, (3, width)), off=0.0, steps=(3,))


PLANS: dict[str, tuple[Small, ...]] = {
    "rows": (Small(rows, table(WIDTH)),),
    "layer": (Small(layer, table(32), off=0.02),),
    "products": (
        products("Q4_0", "Q5_1", "BF16", depth=DEPTH),
        products("F16", "NVFP4", depth=64),
        products("Q2_K", depth=256),
        heads("Q4_1", 32),
        heads("F16", 34),
    ),
    "experts": (
        experts("F32 F32 F32", 2, "softmax", False, 1.5, "silu", width=10, ffn=7),
        experts("Q8_0 F16 Q4_0", 1, "sigmoid", True, 1.0, "gelu", count=2, extras=True, steps=(2, MANY)),
        experts("Q8_0 BF16 F32", 3, "softmax_of_chosen", False, 1.0, "swiglu_oai", ffn=6, extras=True),
        experts("F32 F32 F32", 2, "sparse_mixer", False, 1.0, "silu", width=10, ffn=7),
    ),
    "attention": (
        attended(Heads(3, 1, 8)),
        # The second and the last have queries and keys for several tiles, even with Oclgrind's tile sizes.
        attended(Heads(2, 2, 7, window=9, softcap=2.0, sinks=True), "bf16", "fp8", (2, MANY + 6)),
        attended(Heads(1, 1, 36, window=12, slopes=True, causal=False), "fp8", "bf16"),
        attended(Heads(2, 1, 5), "f32", "f32"),
        attended(Heads(2, 2, 6, reach=4, causal=False), steps=(2, MANY + 6)),
    ),
    "selections": (  # selections of all positions, of some, and of blocks with a short last block
        selected(Selecting(Heads(4, 1, 24, value_dim=16), 3, 20, 2), (1, 3)),
        selected(Selecting(Heads(2, 2, 20), 2, 7, 2, 2, 1, weighted=False), (1, 4), "q8_0", "q4_0"),
        selected(Selecting(Heads(4, 1, 24), 3, 20, 1, 2, pooled=True), (1, 4)),
        pools(Pooling(Heads(4, 1, 24, window=3, value_dim=16), 2, 1, prefix=True), (1, 3)),
        pools(Pooling(Heads(2, 2, 20, window=2, sinks=True), 2), (1, 3), "q8_0", "q4_0"),
    ),
    "keys and values in blocks": tuple(
        attended(Heads(1, 1, 12), *names, steps=(1, MANY))
        for names in (("q8_0", "q5_1"), ("q5_1", "q4_0"), ("q5_0", "q4_1"), ("q4_1", "q8_0"), ("q4_0", "q5_0"))
    ),
    "recurrent": (
        Small(RECURRENT["convolution"], table(48), steps=(1, 2, MANY, 1)),
        # One loop runs over all tokens of a sequence, so there are few tokens. The last step enters the next cache
        # block. The table is as wide as the operation's whole input, so the input is sliced and needs no matrices.
        Small(linear_attention(2, 1, 5, 7, delta=True, tiled=True), table(28), steps=(1, 2, 3)),
        Small(linear_attention(2, 2, 5, 7, delta=False, tiled=False), table(38), steps=(2, 1)),
        Small(linear_attention(1, 1, 5, 7, delta=False, tiled=False), table(19), steps=(3,), before=62),
        Small(linear_attention(1, 1, 5, 7, delta=True, tiled=False, channels=True), table(23), steps=(3,), before=62),
        Small(lightning(1, 5, 7), table(17), steps=(2,)),
        Small(pool(9, 2, 2), table(36), steps=(3, 2)),
        Small(selective_scan(20, 3), table(46), steps=(3,), before=62),
        Small(wkv(2, 5, 7, erases=False, before=True), table(64), steps=(2, 1)),
        Small(wkv(2, 5, 7, erases=True, before=False), table(64), steps=(3,), before=62),
    ),
    "formats": tuple(of_format(name) for name in formats.FORMATS),
    "largest": (Small(lambda r, x: r.select_rows(x), table(SORTED + 3), off=0.0, steps=(1,)),),
}


def check(backend: Backend, small: Small, quick: Backend | None = None) -> None:
    """Compare the steps of a plan with the reference backend. If the plan selects rows, compare the largest logits too.

    With `quick`, that backend evaluates the preceding tokens, and its KV cache blocks are copied to the device.
    """
    plan = record(small.table, small.build)
    blocks = -(-(small.before + sum(small.steps)) // BLOCK)
    rows = max(20, *small.steps)
    executable = bind(backend, plan, rows, blocks, small.cache)
    assert isinstance(executable, GpuExecutable)
    reference = bind(ReferenceBackend(), plan, max(rows, small.before), blocks, small.cache)
    ours, theirs = Driver(executable), Driver(reference)
    if small.before:
        tokens = np.arange(small.before) % len(small.table.rows)
        theirs.step([(0, tokens)])
        first = Driver(bind(quick or backend, plan, small.before, blocks, small.cache))
        first.step([(0, tokens)])
        ours.lengths = first.lengths
        for layer in range(len(plan.layers)):
            executable.write_blocks(layer, np.arange(blocks), first.executable.read_blocks(layer, np.arange(blocks)))
        first.executable.close()
    for count in small.steps:
        tokens = np.arange(count) % len(small.table.rows)
        expected = theirs.step([(0, tokens)])
        off = np.abs(ours.step([(0, tokens)]) - expected).max()
        assert off <= small.off * np.abs(expected).max(), (count, off, np.abs(expected).max())
    if plan.logits.rows == "logits":
        one = np.zeros(1, np.int32)
        found = executable.step_top_k(Batch(one, one, one, one, np.zeros((1, 1), np.int32), one), 5)
        expected = Driver(reference).step([(0, [0])])
        assert (found.ids[0] == np.argsort(-expected[0], kind="stable")[:5]).all()
    executable.close()
