"""Plans that together use every kernel, with the shapes and options of real models, for `localllm doctor`.

Weights are samples, which the check renames and reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

from localllm.backends.base import F16_CACHE, CacheTypes, Limits
from localllm.backends.gpu import formats
from localllm.backends.gpu.cachetypes import CACHE
from localllm.backends.gpu.conformance.samples import Sample
from localllm.backends.gpu.conformance.segments import Segment, segments
from localllm.plan import (
    BLOCK,
    Activation,
    Gating,
    GluActivation,
    Plan,
    Recorder,
    Rope,
    RopeStyle,
    Stack,
    Value,
    Weight,
)
from localllm.plan.connections import hyper_connection_width

VOCABULARY = 67
SOURCE = Sample("source", "F32", (VOCABULARY, 1 << 13))  # the table of all rows from outside
LIMITS = Limits(rows=512, logit_rows=128, blocks=16, positions=64 * BLOCK)


@dataclass
class Sheet:
    """Records a plan, and gives every weight a unique name."""

    r: Recorder = field(default_factory=Recorder)
    count: int = 0

    def weight(self, *shape: int, format: str = "F32") -> Sample:
        self.count += 1
        return Sample(f"weight {self.count}", format, shape)

    def rows(self, width: int) -> Value:
        """Return a value whose rows come from outside the operations under test."""
        return self.r.slice(self.r.embed(SOURCE), 0, width)

    def stack(self, format: str, *shape: int, extras: bool = False) -> Stack:
        bias = Weight.of(self.weight(*shape[:2])) if extras else None
        scale = Weight.of(self.weight(shape[0])) if extras else None
        return Stack(Weight.of(self.weight(*shape, format=format)), scale, bias)


def catalogue() -> Iterator[tuple[str, list[Segment], CacheTypes]]:
    """Yield (title, segments, cache types), each segment once."""
    seen: set[object] = set()
    for name, plan, cache in _plans():
        own = []
        for segment in segments(plan):
            key = segment.plan.operations, segment.plan.layers, cache if segment.stored else None
            if key not in seen:
                seen.add(key)
                own.append(segment)
        yield name, own, cache


def _plans() -> Iterator[tuple[str, Plan, CacheTypes]]:
    for name in formats.FORMATS:
        yield f"format {name}", _plan(partial(_format, name)), F16_CACHE
    yield "rows", _plan(_rows), F16_CACHE
    yield "attention", _plan(_attention), F16_CACHE
    yield "attention in both directions", _plan(_both_directions), F16_CACHE
    for name in CACHE:
        if name != "f16":
            yield f"cache {name}", _plan(_heads), CacheTypes(name, name)
    for cache in (F16_CACHE, CacheTypes("q8_0", "q8_0")):
        yield f"selected positions, {cache.keys}", _plan(_selected), cache
    yield "experts", _plan(_experts), F16_CACHE
    yield "recurrent layers", _plan(_recurrent), F16_CACHE


def _plan(build: Callable[[Sheet], Value]) -> Plan:
    sheet = Sheet()
    last = build(sheet)
    return sheet.r.finish(last)


def _format(name: str, s: Sheet) -> Value:
    """Record an embedding and the products of a layer: one matrix, three together, two with a GLU, and heads."""
    r, x = s.r, s.r.embed(s.weight(VOCABULARY, 512, format=name))
    normed = r.rms_norm(x, s.weight(512), 1e-5)
    q, k, v = (r.linear(normed, s.weight(rows, 512, format=name)) for rows in (512, 130, 130))
    gate = r.linear(normed, s.weight(512, 512, format=name), s.weight(512))
    both = r.glu(r.concat(k, v), r.slice(q, 0, 260), "silu")
    x = r.add(x, r.linear(gate, s.weight(512, 512, format=name), s.weight(512), 0.5))
    normed = r.rms_norm(x, s.weight(512), 1e-5)
    gate, up = (r.linear(normed, s.weight(512, 512, format=name)) for _ in range(2))
    hidden = r.glu(gate, up, "silu")
    x = r.add(x, r.linear(hidden, s.weight(512, 512, format=name)))
    heads = r.head_linear(x, s.weight(2, 96, 256, format=name))
    x = r.add(x, r.linear(r.concat(heads, both), s.weight(512, heads.width + both.width)))
    router = r.linear(x, s.weight(8, 512))
    gates, ups, downs = (s.stack(name, 8, 512, 512, extras=extras) for extras in (False, False, True))
    x = r.add(x, r.experts(x, router, gates, ups, downs, 2, "softmax", True, 1.0, "silu"))
    return r.linear(r.select_rows(r.rms_norm(x, s.weight(512), 1e-5)), s.weight(1500, 512, format=name))


def _rows(s: Sheet) -> Value:
    """Record elementwise operations, and operations on rows and slices."""
    r, x, y = s.r, s.rows(320), s.rows(320)
    for style in ("interleaved", "neox"):
        for head, rotated in ((64, 64), (80, 32)):
            x = r.rotate(x, head, Rope(style, rotated, tuple(100.0 ** (-2 * i / rotated) for i in range(rotated // 2))))
    for groups in (1, 5):
        x = r.layer_norm(r.rms_norm(x, s.weight(320 // groups), 1e-5, groups), s.weight(320), s.weight(320), 1e-5)
        x = r.scale_columns(x, s.weight(320 // groups), groups)
    for activation in (*get_args(Activation), "exp", "signed_root"):
        y = r.activate(y, activation)
    for unit in get_args(GluActivation):
        y = r.glu(x, y, unit, 1.5 if unit in ("swiglu_clamp", "silu_clamp", "situ") else 0.0)
    y = r.glu(r.slice(x, 0, 5), r.softcap(r.clamp(r.scale(y, 0.5), 3.0), 5.0), "sigmoid")
    x = r.add(x, r.xielu(y, 0.8, 0.6, 0.5, -1e-6))
    x = r.mul(r.gaussian_top_k(r.match(x, y, 1e-5, 4), 1.0), s.weight(320))
    x = r.blend(r.concat(x, r.slice(y, 0, 320)), y, s.weight(320), 1e-5)
    x = r.slice(r.concat(x, y, 4), 7, 100, 4)
    media = r.embed_media(2 * x.width + 8)
    x = r.splice(r.splice(x, media, 8), media, x.width + 3, add=True)
    streams = s.rows(4 * 96)
    for parts in (1, 2, 3):
        width = hyper_connection_width(4, parts)
        shares = r.hyper_connection(r.slice(x, 0, width), 4, s.weight(parts), s.weight(width), 1e-5, 2.0, 1e-5, 3)
        if parts == 3:
            streams = r.mix(streams, 4, r.slice(shares, 8, 24), r.scale(streams, 0.5))
    read = r.mix(streams, 4, s.weight(4))
    return r.select_rows(r.add(read, r.embed(s.weight(100, 96), positions=True)))


def _attend(
    s: Sheet, heads: int, kv_heads: int, width: int, value: int = 0, rope: str = "", window: int = 0,
    softcap: float = 0.0, sinks: bool = False, slopes: bool = False, chunked: bool = False, causal: bool = True,
    reach: int = 0, spans: bool = False,
) -> Value:  # fmt: skip
    r, value = s.r, value or width
    q, k, v = s.rows(heads * width), s.rows(kv_heads * width), s.rows(kv_heads * value)
    if rope:
        style: RopeStyle = "neox" if rope == "neox" else "interleaved"
        turn = Rope(style, width, tuple(1000.0 ** (-2 * i / width) for i in range(width // 2)))
        if rope == "neox":
            q, k = (r.rms_norm(x, s.weight(width), 1e-5, n) for x, n in ((q, heads), (k, kv_heads)))
        q, k = r.rotate(q, width, turn), r.rotate(k, width, turn)
    distances = s.weight(heads, 2 * reach + 1) if reach else None
    layer = r.append(k, v, kv_heads)
    own, far = (s.weight(heads) if given else None for given in (sinks, slopes))
    how = (window, softcap, own, far, chunked, causal, distances)
    return r.attention(q, layer, heads, width**-0.5, *how, spans=spans)


def _heads(s: Sheet) -> Value:
    """Record attention with common head dimensions, for each cache type."""
    _attend(s, 8, 2, 64, rope="neox")
    _attend(s, 6, 1, 128, rope="interleaved")
    return s.r.select_rows(_attend(s, 4, 4, 80))


def _attention(s: Sheet) -> Value:
    for width in (64, 96, 128, 192, 256, 512):
        _attend(s, 8, 2, width, rope="neox" if width != 192 else "interleaved")
    _attend(s, 9, 1, 80, sinks=True, window=100)
    _attend(s, 4, 2, 128, softcap=30.0, window=100)
    _attend(s, 4, 2, 64, slopes=True)
    _attend(s, 4, 1, 64, window=128, chunked=True)
    _attend(s, 3, 3, 40, reach=20)
    _attend(s, 4, 2, 64, spans=True)
    _attend(s, 4, 1, 128, window=100, spans=True)
    return s.r.select_rows(_attend(s, 8, 1, 576, 512))


def _both_directions(s: Sheet) -> Value:
    _attend(s, 12, 12, 64, causal=False, slopes=True)
    return _attend(s, 4, 2, 64, window=65, causal=False)


def _selected(s: Sheet) -> Value:
    """Record indexers over single positions, over blocks and over pools."""
    r = s.r
    for weighted, block, pooled in ((True, 1, False), (False, 4, False), (True, 4, True)):
        keys = r.append_index(s.rows(128), 4 if pooled else 1)
        weights = s.rows(4) if weighted else None
        groups = 4 if weighted else 2
        chosen = r.indexer_top_k(s.rows(groups * 128), weights, keys, groups, 12, block, int(not pooled), pooled)
        if pooled:
            near, far = (r.append(s.rows(128), s.rows(128), 1, every) for every in (1, 4))
            last = r.attention(s.rows(8 * 128), near, 8, 0.1, 20, selection=chosen, pools=far)
        else:
            layer = r.append(s.rows(256), s.rows(256), 2)
            last = r.attention(s.rows(8 * 128), layer, 8, 0.1, selection=chosen, slices=1 if weighted else 2)
    return r.select_rows(last)


def _experts(s: Sheet) -> Value:
    r, x = s.r, s.rows(256)
    for number, gating in enumerate(get_args(Gating)):
        router, extras = s.rows(24), number % 2 == 1
        gate, up, down = (s.stack(kind, 24, 256, 256, extras=extras) for kind in ("Q4_K", "Q4_K", "Q6_K"))
        groups, used = (8, 3) if gating in ("softmax", "sigmoid") else (1, 1)
        bias = s.weight(24) if extras else None
        x = r.experts(
            x, router, gate, up, down, 4, gating, extras, 1.5, "silu", bias, 0.0, number == 3, groups, used
        )  # fmt: skip
    return r.select_rows(x)


def _recurrent(s: Sheet) -> Value:
    r = s.r
    r.convolve(s.rows(200), s.weight(200, 4), s.weight(200))
    for delta, channels, tiled in ((True, False, False), (False, False, True), (True, True, False)):
        steps = s.rows(4 * 64 if channels else 4)
        skip = None if delta else s.weight(4)
        q, k, v, strength = s.rows(128), s.rows(128), s.rows(4 * 96), s.rows(4)
        r.linear_attention(q, k, v, steps, strength, s.weight(4), 2, delta, tiled, skip)
    r.linear_attention(s.rows(128), s.rows(128), s.rows(128), None, None, s.weight(2), 2)
    r.selective_scan(s.rows(200), s.rows(200), s.rows(16), s.rows(16), s.weight(200, 16), s.weight(200))
    for parts in (1, 2):
        r.pool(s.rows(128), s.rows(128), s.weight(4, 128), parts)
    q, k, v, decay = s.rows(128), s.rows(128), s.rows(128), s.rows(128)
    r.wkv(q, k, v, decay, 2, True)
    q, k, v, decay, probe, erase = (s.rows(128) for _ in range(6))
    return r.select_rows(r.wkv(q, k, v, decay, 2, False, probe, erase))
