"""The one forward pass: walks the layers of a dense transformer and records every operation.

A backend reaches this module only as the `Recorder` argument; its values and plan stay opaque here. What the file holds
(biases, q/k norms, output matrix, frequency factors) decides what is recorded; `Architecture` says the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from models.architectures import Architecture
from models.config import Config
from models.errors import ModelError
from models.rope import inverse_frequencies, magnitude
from models.tensors import Tensors, Weight

V = TypeVar("V")  # a recorded value
R = TypeVar("R")  # a rotation
P = TypeVar("P")  # what recording ends in: the plan
P_co = TypeVar("P_co", covariant=True)


class Recorder(Protocol[V, R, P_co]):
    """What the forward needs of a recorder; `backends.plan.Recorder` is one, `models.summary` has another."""

    def embed(self, table: Weight) -> V: ...
    def rms_norm(self, x: V, weight: Weight, eps: float, groups: int = 1) -> V: ...
    def linear(self, x: V, weight: Weight, bias: Weight | None = None, scale: float = 1.0) -> V: ...
    def rope(
        self,
        style: Literal["norm", "neox"],
        n_rot: int,
        inverse_frequency: tuple[float, ...],
        magnitude: float = 1.0,
        temperature: float = 0.0,
        temperature_length: int = 1,
    ) -> R: ...
    def rotate(self, x: V, head_dim: int, rope: R) -> V: ...
    def append(self, layer: int, k: V, v: V, kv_heads: int) -> None: ...
    def attention(self, q: V, layer: int, heads: int, scale: float) -> V: ...
    def glu(self, gate: V, up: V, activation: Literal["silu", "gelu"]) -> V: ...
    def add(self, a: V, b: V) -> V: ...
    def scale(self, x: V, factor: float) -> V: ...
    def select_rows(self, x: V) -> V: ...
    def finish(self, logits: V) -> P_co: ...


def record(config: Config, architecture: Architecture, tensors: Mapping[str, Weight], recorder: Recorder[V, R, P]) -> P:
    """What `recorder.finish` returns for this model's forward; ModelError for a missing or unfit tensor."""
    return walk(config, architecture, Tensors(tensors), recorder)


def walk(config: Config, architecture: Architecture, tensors: Tensors, recorder: Recorder[V, R, P]) -> P:
    """`record` over tensors whose use is remembered."""
    table = tensors.matrix("token_embd.weight", config.vocabulary, config.width)
    x = recorder.embed(table)
    block = _Block(config, architecture, tensors, recorder, *_ropes(config, architecture, tensors, recorder))
    for layer in range(config.layers):
        x = block.attention(x, layer)
        x = block.feed_forward(x, layer)
    x = recorder.rms_norm(x, tensors.vector("output_norm.weight", config.width), config.eps)
    if "output.weight" in tensors:
        return recorder.finish(block.linear("output", x, config.vocabulary, config.width))
    bias = tensors.optional_vector("output.bias", config.vocabulary)
    return recorder.finish(recorder.linear(x, table, bias))


def _ropes(config: Config, architecture: Architecture, tensors: Tensors, recorder: Recorder[V, R, P]) -> tuple[R, R]:
    """The rotations of queries and of keys: the same, but for a temperature that belongs to queries."""
    rope = config.rope
    factors = tensors.optional_numbers("rope_freqs.weight", rope.n_rot // 2)
    if factors is not None and not factors.all():
        raise ModelError("rope_freqs.weight: holds a zero; frequencies are divided by these numbers")
    if rope.temperature and rope.n_rot != config.head_dim:
        raise ModelError(
            f"{config.architecture}.attention.temperature_scale: needs rope.dimension_count equal to the head width "
            f"{config.head_dim}, found {rope.n_rot}"
        )
    frequencies = inverse_frequencies(rope, None if factors is None else [float(f) for f in factors])
    style, scale = architecture.rope_style, magnitude(rope)
    keys = recorder.rope(style, rope.n_rot, frequencies, scale)
    if not rope.temperature:
        return keys, keys
    return recorder.rope(style, rope.n_rot, frequencies, scale, rope.temperature, rope.original_context), keys


@dataclass(frozen=True, slots=True)
class _Block(Generic[V, R, P]):
    """One layer at a time: T rows in, T rows out; the last layer goes on with the rows whose logits are wanted."""

    config: Config
    architecture: Architecture
    tensors: Tensors
    recorder: Recorder[V, R, P]
    query_rope: R
    key_rope: R

    def attention(self, x: V, layer: int) -> V:
        config, recorder, name = self.config, self.recorder, f"blk.{layer}."
        heads, kv_heads, head_dim = config.heads[layer], config.kv_heads[layer], config.head_dim
        normed = self.norm(name + "attn_norm", x)  # (T, width)
        q = self.linear(name + "attn_q", normed, heads * head_dim, config.width)
        k = self.linear(name + "attn_k", normed, kv_heads * head_dim, config.width)
        v = self.linear(name + "attn_v", normed, kv_heads * head_dim, config.width)
        q = self.head_norm(name + "attn_q_norm", q, heads)
        k = self.head_norm(name + "attn_k_norm", k, kv_heads)
        every = self.architecture.no_rope_every
        if not every or (layer + 1) % every:
            q = recorder.rotate(q, head_dim, self.query_rope)
            k = recorder.rotate(k, head_dim, self.key_rope)
        recorder.append(layer, k, v, kv_heads)
        mixed = recorder.attention(q, layer, heads, 1.0 / math.sqrt(head_dim))  # (T, heads * head_dim)
        if layer == config.layers - 1:  # nothing later looks at other rows: they skip the last feed-forward too
            mixed, x = recorder.select_rows(mixed), recorder.select_rows(x)
        return recorder.add(x, self.linear(name + "attn_output", mixed, config.width, heads * head_dim))

    def feed_forward(self, x: V, layer: int) -> V:
        width, inner, name = self.config.width, self.config.ffn_width[layer], f"blk.{layer}."
        normed = self.norm(name + "ffn_norm", x)
        gate = self.ffn_linear(name + "ffn_gate", normed, inner, width)
        up = self.ffn_linear(name + "ffn_up", normed, inner, width)
        hidden = self.recorder.glu(gate, up, self.architecture.activation)  # (T, inner)
        return self.recorder.add(x, self.ffn_linear(name + "ffn_down", hidden, width, inner))

    def norm(self, name: str, x: V) -> V:
        weight = self.tensors.vector(name + ".weight", self.config.width)
        return self.recorder.rms_norm(x, weight, self.config.eps)

    def head_norm(self, name: str, x: V, heads: int) -> V:
        """Every head normed by itself with the same weights, where the file holds them."""
        if not self.architecture.qk_norm and name + ".weight" not in self.tensors:
            return x
        weight = self.tensors.vector(name + ".weight", self.config.head_dim)
        return self.recorder.rms_norm(x, weight, self.config.eps, groups=heads)

    def linear(self, name: str, x: V, rows: int, columns: int) -> V:
        """(x @ weight.T) * scale + bias: the scale belongs to the matrix, as NVFP4 files mean it."""
        weight = self.tensors.matrix(name + ".weight", rows, columns)
        bias = self.tensors.optional_vector(name + ".bias", rows)
        return self.recorder.linear(x, weight, bias, self.scale(name))

    def ffn_linear(self, name: str, x: V, rows: int, columns: int) -> V:
        """(x @ weight.T + bias) * scale: llama.cpp's feed-forward scales after the bias."""
        weight = self.tensors.matrix(name + ".weight", rows, columns)
        bias = self.tensors.optional_vector(name + ".bias", rows)
        scale = self.scale(name) if self.architecture.ffn_scales else 1.0
        if bias is None or scale == 1.0:
            return self.recorder.linear(x, weight, bias, scale)
        return self.recorder.scale(self.recorder.linear(x, weight, bias), scale)

    def scale(self, name: str) -> float:
        scale = self.tensors.optional_numbers(name + ".scale", 1)
        return 1.0 if scale is None else float(scale[0])
