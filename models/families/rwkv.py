"""RWKV-6 and 7, standalone and in Qwen2-based models. Token shift mixes every hidden state with the previous token's.

The time mix replaces attention and is a `plan.Wkv` (WKV). The channel mix is RWKV's feed-forward, which also uses token
shift; Qwen2-based models keep Qwen2's feed-forward. Before the first position, the hidden state is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from localllm.models.architecture import Architecture, LayerRecorder, Recurrence
from localllm.models.builder import Part
from localllm.models.config import Config, RecurrentConfig
from localllm.models.errors import ModelError
from localllm.models.properties import Properties, Recurrent
from localllm.models.reading import Keys, read_general
from localllm.models.reading.bounds import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS
from localllm.plan import Value, Weight

NORM_EPS = 64e-5  # epsilon of the head norms
UNIT_EPS = 1e-12  # minimum L2 norm of a probe
DECAY_SPEED = -0.606531  # RWKV-7: -exp(-1/2), the logarithm of the fastest decay


@dataclass(frozen=True, slots=True)
class RwkvConfig:
    """The properties of RWKV layers besides their sizes."""

    original: bool  # an original RWKV, and not another model converted to RWKV attention
    rescale: int  # RWKV-6: hidden states are halved after every `rescale` layers; 0: never


def _read(original: bool, keys: Keys, row: Properties, head: int) -> Config:
    config = read_general(keys, row, head)
    six, width = row.name.startswith("rwkv6"), config.width
    size = keys.integer("wkv.head_size", 2, MAX_HEAD_DIM)
    heads, shifts = width // size, 2 if original else 1
    if width % size or size % 2:
        raise ModelError(
            f"{keys.prefix}wkv.head_size: expected an even number that divides embedding_length {width}, found {size}"
        )
    keys.integer("token_shift_count", shifts, shifts, default=2)
    groups = keys.integer("attention.head_count_kv", 0, MAX_HEADS, default=0) if six else 0
    if groups and heads % groups:
        raise ModelError(f"{keys.prefix}attention.head_count_kv: {heads} heads are not a multiple of {groups}")
    rescale = keys.integer("rescale_every_n_layers", 0, MAX_LAYERS, default=0) if original else 0
    sizes = RecurrentConfig(2, width, size, heads, groups or heads, False)
    return replace(config, recurrent=sizes, own=RwkvConfig(original, rescale if six else 0))


@dataclass(frozen=True, slots=True)
class TimeMix(Recurrence):
    """Records the time mixes of all layers in order. RWKV-7 blends values with the first layer's values."""

    first_values: list[Value] = field(default_factory=list)

    def mixed(self, x: Value, layer: int) -> Value:
        mix = rwkv6 if self.builder.row.name.startswith("rwkv6") else rwkv7
        return mix(_Parts(self.builder, f"blk.{layer}.time_mix_", self.first_values), x)

    def output(self, mixed: Value, layer: int) -> Value:
        return self.builder.linear(f"blk.{layer}.time_mix_output", mixed, self.config.width, mixed.width)


@dataclass(frozen=True, slots=True)
class RwkvLayers(LayerRecorder):
    """Records an RWKV layer: a time mix, then a channel mix."""

    def layer(self, x: Value, layer: int) -> Value:
        builder, name = self.builder, f"blk.{layer}."
        recorder, rescale = builder.recorder, builder.own(RwkvConfig).rescale
        mixed = self.recurrence.mixed(builder.norm(name + builder.row.attention_norm, x), layer)
        x = recorder.add(x, self.recurrence.output(mixed, layer))
        normed = builder.norm(name + builder.row.ffn_norm, x)
        parts = _Parts(builder, name + "channel_mix_", [])
        shift = parts.shift(normed)
        if self.selects(layer):
            x, normed, shift = (recorder.select_rows(value) for value in (x, normed, shift))
        x = recorder.add(x, channel_mix(parts, normed, shift, builder.config.ffn_width[layer]))
        return recorder.scale(x, 0.5) if rescale and (layer + 1) % rescale == 0 else x


@dataclass(frozen=True, slots=True)
class _Parts(Part):
    """Records the parts of a mix; names are tensor names after `blk.N.time_mix_` or `blk.N.channel_mix_`."""

    prefix: str
    first_values: list[Value]

    @property
    def sizes(self) -> RecurrentConfig:
        sizes = self.config.recurrent
        assert sizes is not None
        return sizes

    def has(self, name: str) -> bool:
        return f"{self.prefix}{name}.weight" in self.tensors

    def linear(self, name: str, x: Value, rows: int = 0) -> Value:
        return self.builder.linear(self.prefix + name, x, rows or self.config.width, x.width)

    def low_rank(self, names: str, x: Value, between: Callable[[Value], Value], bias: Weight | None = None) -> Value:
        """Multiply x by the low-rank matrices `names` + "1" and `names` + "2", with `between` applied in between."""
        rank = self.tensors.height(f"{self.prefix}{names}1.weight")
        if not rank:
            raise ModelError(f"{self.prefix}{names}1.weight: this matrix is missing")
        inner = between(self.linear(names + "1", x, rank))
        second = self.tensors.matrix(f"{self.prefix}{names}2.weight", self.config.width, rank)
        return self.recorder.linear(inner, second, bias)

    def vector(self, name: str) -> Weight:
        """Return one value per channel, from any of the shapes that GGUFs use."""
        width = self.config.width
        stored = (width,), (1, 1, width)
        return self.tensors.shaped(f"{self.prefix}{name}.weight", (width,), *stored)

    def lerps(self, names: str) -> list[Weight]:
        """Return one vector of token-shift weights per letter; a GGUF may fuse them in one tensor."""
        width, count = self.config.width, len(names)
        if not self.has("lerp_fused"):
            return [self.vector(f"lerp_{name}") for name in names]
        name = f"{self.prefix}lerp_fused.weight"
        fused = self.tensors.shaped(name, (count * width,), (count, 1, 1, width))
        return [fused.part(i * width, (i + 1) * width) for i in range(count)]

    def by_head(self, name: str) -> Weight:
        """Return a matrix with one row per head."""
        heads, size = self.sizes.heads, self.sizes.state
        return self.tensors.shaped(f"{self.prefix}{name}.weight", (heads, 1, size), (heads, size), (heads * size,))

    def shift(self, x: Value) -> Value:
        """Return the token shift: the previous token's hidden state minus x."""
        kernel = self.tensors.constant_rows("shift", (1.0, -1.0), x.width)
        return self.recorder.convolve(x, kernel)

    def shifted(self, x: Value, shift: Value, lerp: Weight) -> Value:
        return self.recorder.add(x, self.recorder.mul(shift, lerp))

    def product(self, a: Value, b: Value) -> Value:
        return self.recorder.glu(a, b, "identity")

    def subtract(self, a: Value, b: Value) -> Value:
        """Return a - b."""
        return self.recorder.add(a, self.recorder.scale(b, -1.0))

    def tanh(self, x: Value) -> Value:
        return self.recorder.softcap(x, 1.0)

    def repeated(self, x: Value) -> Value:
        """Repeat each group's slice for all heads of the group."""
        heads, groups = self.sizes.heads, self.sizes.groups
        if heads == groups:
            return x
        wanted = [float(head * groups // heads == group) for head in range(heads) for group in range(groups)]
        numbers = self.tensors.numbers(f"repeated({heads}/{groups})", wanted)
        return self.recorder.mix(x, groups, numbers)

    def head_norm(self, x: Value) -> Value:
        """Return the layer norm of each head, or x if the GGUF has no such norm."""
        if not self.has("ln"):
            return x
        heads, size, tensors = self.sizes.heads, self.sizes.state, self.tensors
        weight, bias = (
            tensors.shaped(f"{self.prefix}ln.{kind}", (heads, size), (heads * size,)) for kind in ("weight", "bias")
        )
        return self.recorder.layer_norm(x, weight, bias, NORM_EPS, heads)

    def bonus(self, q: Value, k: Value, v: Value, weight: str) -> Value:
        """Return (q . weight k) v for each head: the contribution of the token's own key and value."""
        own = self.recorder.head_linear(self.product(q, k), self.by_head(weight))  # (T, heads)
        return self.product(own, v)


def rwkv6(parts: _Parts, x: Value) -> Value:
    """The time mix of RWKV-6, and of Qwen2 with gated linear attention, which has no bonus."""
    recorder, sizes, shift = parts.recorder, parts.sizes, parts.shift(x)
    to_w, to_k, to_v, to_r, to_g = _by_row(parts, x, shift)
    keys = sizes.groups * sizes.state
    r, k, v = parts.linear("receptance", to_r), parts.linear("key", to_k, keys), parts.linear("value", to_v, keys)
    gate = parts.linear("gate", to_g)
    k, v = parts.repeated(k), parts.repeated(v)
    speed = recorder.activate(parts.low_rank("decay_w", to_w, parts.tanh, parts.vector("decay")), "exp")
    decay = recorder.activate(recorder.scale(speed, -1.0), "exp")
    if parts.builder.own(RwkvConfig).original or parts.has("first"):
        seen = recorder.wkv(r, k, v, decay, sizes.heads, before=True)
        seen = parts.head_norm(recorder.add(seen, parts.bonus(r, k, v, "first")))
        return recorder.glu(gate, seen, "silu")
    k = parts.subtract(k, parts.product(decay, k))
    seen = recorder.wkv(recorder.scale(r, sizes.state**-0.5), k, v, decay, sizes.heads)
    return recorder.glu(gate, seen, "sigmoid")


def _by_row(parts: _Parts, x: Value, shift: Value) -> list[Value]:
    """Return x plus five different fractions of the token shift, each computed from the hidden states."""
    builder, width = parts.builder, x.width
    name, of_all = f"{parts.prefix}w1.weight", builder.tensors.height(f"{parts.prefix}w1.weight")
    if not of_all or of_all % 5:
        raise ModelError(f"{name}: expected a matrix of a multiple of 5 rows, found {of_all}")
    rank = of_all // 5
    inner = parts.tanh(parts.linear("w1", parts.shifted(x, shift, parts.vector("lerp_x")), of_all))
    second = builder.tensors.flat(f"{parts.prefix}w2.weight", 5, width, rank)
    found = []
    for i, lerp in enumerate(parts.lerps("wkvrg")):
        own = builder.recorder.slice(inner, i * rank, (i + 1) * rank)
        share = builder.recorder.linear(own, second.part(i * width, (i + 1) * width), lerp)
        found.append(builder.recorder.add(x, parts.product(share, shift)))
    return found


def rwkv7(parts: _Parts, x: Value) -> Value:
    """The time mix of RWKV-7; gate and norm are optional in the GGUF."""
    recorder, sizes, gated = parts.recorder, parts.sizes, parts.has("g1")
    shift = parts.shift(x)
    to_r, to_w, to_k, to_v, to_a, *to_g = (
        parts.shifted(x, shift, lerp) for lerp in parts.lerps("rwkvag" if gated else "rwkva")
    )
    r, k, v = parts.linear("receptance", to_r), parts.linear("key", to_k), parts.linear("value", to_v)
    speed = recorder.activate(parts.low_rank("w", to_w, parts.tanh, parts.vector("w0")), "sigmoid")
    decay = recorder.activate(recorder.scale(speed, DECAY_SPEED), "exp")
    if parts.first_values:
        share = parts.low_rank("v", to_v, lambda inner: inner, parts.vector("v0"))
        v = recorder.add(v, recorder.glu(share, parts.subtract(parts.first_values[0], v), "sigmoid"))
    else:
        parts.first_values.append(v)
    rate = parts.low_rank("a", to_a, lambda inner: inner, parts.vector("a0"))
    probe = _unit(parts, recorder.mul(k, parts.vector("k_k")))
    weighed = recorder.mul(k, parts.vector("k_a"))
    k = recorder.add(k, parts.subtract(recorder.glu(rate, weighed, "sigmoid"), weighed))
    erase = recorder.glu(rate, probe, "sigmoid")
    seen = recorder.wkv(r, k, v, decay, sizes.heads, probe=probe, erase=erase)
    seen = recorder.add(parts.head_norm(seen), parts.bonus(r, k, v, "r_k"))
    if not gated:
        return seen
    gate = parts.low_rank("g", to_g[0], lambda inner: recorder.activate(inner, "sigmoid"))
    return parts.product(gate, seen)


def _unit(parts: _Parts, x: Value) -> Value:
    """Return each head's slice divided by its L2 norm."""
    size = parts.sizes.state
    factor = size**-0.5
    weight = parts.tensors.numbers(f"{factor:.9g}({size})", [factor] * size)
    return parts.recorder.rms_norm(x, weight, UNIT_EPS**2 / size, parts.sizes.heads)


def channel_mix(parts: _Parts, x: Value, shift: Value, inner: int) -> Value:
    """The feed-forward of RWKV: squared ReLU after token shift; RWKV-6 also has a gate."""
    key = parts.linear("key", parts.shifted(x, shift, parts.vector("lerp_k")), inner)
    value = parts.linear("value", parts.recorder.activate(key, "relu2"))
    if not parts.has("receptance"):
        return value
    gate = parts.linear("receptance", parts.shifted(x, shift, parts.vector("lerp_r")))
    return parts.recorder.glu(gate, value, "sigmoid")


_rwkv = partial(
    Architecture, read=partial(_read, True), layers=RwkvLayers, recurrence=TimeMix, rope_style=None,
    activation="relu2", ffn_scales=True, norm="layer", ffn="plain", ffn_norm="attn_norm_2",
)  # fmt: skip
_converted = partial(Architecture, read=partial(_read, False), recurrence=TimeMix, rope_style=None)
ROWS = (
    _converted("arwkv7", recurrent=Recurrent("rwkv7", "all")),  # ARWKV
    _converted("rwkv6qwen2", recurrent=Recurrent("rwkv6", "all")),  # QRWKV6
    _rwkv("rwkv6", recurrent=Recurrent("rwkv6", "all")),  # RWKV-6 Finch
    _rwkv("rwkv7", recurrent=Recurrent("rwkv7", "all")),  # RWKV-7 Goose
)  # fmt: skip
