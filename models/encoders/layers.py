"""The layers of an encoder: attention and feed-forward with residuals; tensors in the file choose most variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from localllm.models.encoders.network import Network
from localllm.models.errors import ModelError
from localllm.plan import Rope, Value

Turn = Callable[[Network, Value, int], Value]  # (network, queries or keys, heads) -> rotated


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of an encoder's layers."""

    prefix: str  # of the names of tensors, before the layer's number
    width: int
    heads: int
    kv_heads: int
    layers: int
    head_dim: int
    experts_used: int = 0  # in layers that have experts


@dataclass(frozen=True, slots=True)
class Style:
    """What the tensors in the file do not say about the layers of a projector's encoder."""

    turn: Turn | None = None
    scale: float = 0.0  # of attention scores; 0: one over the root of the head width
    unit_values: bool = False  # RMS norm of the values of each head
    post_norm: bool = False  # ln1 and ln2 come after attention and feed-forward
    sees: Literal["all", "earlier", "span"] = "all"  # "span": earlier rows, and within the first span all
    reaches: tuple[int, ...] = ()  # of each layer: the maximum distance of rows that see each other; 0: any


class Layers:
    """Records layers that share one cache layer."""

    def __init__(self, network: Network, shape: Shape, style: Style) -> None:
        self.network, self.shape, self.style = network, shape, style
        self._cache: dict[int, int] = {}  # width of keys -> cache layer
        self._reach = 0

    def layer(self, x: Value, number: int) -> Value:
        network, name = self.network, f"{self.shape.prefix}.{number}."
        self._reach = self.style.reaches[number] if self.style.reaches else 0
        post = self.style.post_norm
        y = self.attention(x if post else network.norm(x, name + "ln1"), name)
        x = self._residual(x, y, name + ("ln1" if post else "attn_post_norm"), name + "ls1")
        y = self.feed_forward(x if post else network.norm(x, name + "ln2"), name)
        return self._residual(x, y, name + ("ln2" if post else "ffn_post_norm"), name + "ls2")

    def _residual(self, x: Value, y: Value, norm: str, scale: str) -> Value:
        """Return x plus y, after the scale and the norm of a layer's output that the file may have."""
        network = self.network
        if f"{scale}.weight" in network.tensors:
            y = network.recorder.mul(y, network.tensors.vector(f"{scale}.weight", y.width))
        if f"{norm}.weight" in network.tensors:
            y = network.norm(y, norm)
        return network.recorder.add(x, y)

    def attention(self, x: Value, name: str) -> Value:
        network, shape = self.network, self.shape
        q, k, v = self.projections(x, name)
        q, k = (self._normed(each, f"{name}attn_{of}_norm") for of, each in (("q", q), ("k", k)))
        if self.style.unit_values:
            v = network.unit(v, shape.kv_heads)
        if self.style.turn is not None:
            q, k = self.style.turn(network, q, shape.heads), self.style.turn(network, k, shape.kv_heads)
        y = self.attended(q, k, v, name)
        return network.linear(y, name + "attn_out", shape.width)

    def attended(self, q: Value, k: Value, v: Value, name: str) -> Value:
        layer = self.stored(k, v)
        tensors, sinks = self.network.tensors, f"{name}attn_sinks"
        own = tensors.optional(sinks, self.shape.heads)
        scale = self.style.scale or self.shape.head_dim**-0.5
        sees, window = self.style.sees, 2 * self._reach
        if sees != "all" and self._reach:
            window = self._reach + 1  # with the row itself
        return self.network.recorder.attention(
            q, layer, self.shape.heads, scale, window, sinks=own, causal=sees != "all", spans=sees == "span"
        )

    def stored(self, k: Value, v: Value) -> int:
        """Store keys and values in place of the previous layer's, and return the cache layer."""
        recorder = self.network.recorder
        if k.width not in self._cache:
            self._cache[k.width] = recorder.append(k, v, self.shape.kv_heads)
        else:
            recorder.append_again(k, v, self._cache[k.width])
        return self._cache[k.width]

    def projections(self, x: Value, name: str) -> tuple[Value, Value, Value]:
        """Return queries, keys and values, from one matrix or from three."""
        network, shape = self.network, self.shape
        widths = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        whole = f"{name}attn_qkv"
        if f"{whole}.weight" not in network.tensors:
            q, k, v = (network.linear(x, f"{name}attn_{of}", rows) for of, rows in zip("qkv", widths, strict=True))
            return q, k, v
        starts, total = [0, widths[0], widths[0] + widths[1]], sum(widths)
        parts = []
        for start, width in zip(starts, widths, strict=True):
            weight = network.tensors.rows(f"{whole}.weight", start, start + width, total, x.width)
            bias = network.tensors.optional_part(f"{whole}.bias", start, start + width, total)
            parts.append(network.recorder.linear(x, weight, bias))
        return parts[0], parts[1], parts[2]

    def _normed(self, x: Value, name: str) -> Value:
        """Return the norm of each head, or of all heads together, as the weights in the file say."""
        width = self.network.tensors.width(f"{name}.weight")
        if not width:
            return x
        return self.network.norm(x, name, groups=1 if width == x.width else x.width // width)

    def feed_forward(self, x: Value, name: str) -> Value:
        network = self.network
        gate, up, down = (f"{name}ffn_{part}" for part in ("gate", "up", "down"))
        if f"{gate}_exps.weight" in network.tensors:
            router, bias = f"{name}ffn_gate_inp", f"{name}exp_probs_b"
            return network.experts(x, router, (gate, up, down), bias, self.shape.experts_used)
        if f"{gate}.weight" in network.tensors:
            return network.gated(x, gate, up, down, network.activation)
        return network.mlp(x, up, down)


# -- rotations ---------------------------------------------------------------------------------------------------------


def halves(theta: float = 10000.0) -> Callable[[int], Turn]:
    """Rotate pairs (i, i + half a head): the first half of the pairs by row, the others by column."""

    def of(head_dim: int) -> Turn:
        own = tuple(theta ** (-4 * i / head_dim) for i in range(head_dim // 4))
        axes = (0,) * len(own) + (1,) * len(own)
        rope = Rope("neox", head_dim, own + own, axes=axes)
        return lambda network, x, heads: network.recorder.rotate(x, head_dim, rope)

    return of


def sides(theta: float = 10000.0, first: int = 1, offset: bool = False) -> Callable[[int], Turn]:
    """Rotate adjacent pairs: the first half of a head by axis `first`, the second half by the other axis.

    With an `offset`, the second half has frequencies between the first half's.
    """

    def of(head_dim: int) -> Turn:
        own = tuple(theta ** (-4 * i / head_dim) for i in range(head_dim // 4))
        other = tuple(f * theta ** (-2 / head_dim) for f in own) if offset else own
        axes = (first,) * len(own) + (1 - first,) * len(own)
        rope = Rope("interleaved", head_dim, own + other, axes=axes)
        return lambda network, x, heads: network.recorder.rotate(x, head_dim, rope)

    return of


def blocks(theta: float, first: int, skipped: int = 0) -> Callable[[int], Turn]:
    """Rotate pairs (i, i + half a block) in two blocks of each head: one by axis `first`, then one by the other.

    The blocks are the halves of the head; with `skipped`, a third of a head each, after a block that is not rotated.
    """

    def of(head_dim: int) -> Turn:
        size = head_dim // 2 if not skipped else 2 * (head_dim // 2) // 3 // 2 * 2
        if size < 2:
            raise ModelError(f"clip.vision.attention.head_count: heads of {head_dim} values are too narrow to rotate")
        own = tuple(theta ** (-2 * i / size) for i in range(size // 2))
        ropes = [Rope("neox", size, own, axes=(axis,) * len(own)) for axis in (first, 1 - first)]
        start = size * skipped

        def turn(network: Network, x: Value, heads: int) -> Value:
            recorder = network.recorder
            a, b = (
                recorder.rotate(recorder.slice(x, at, at + size, heads), size, rope)
                for at, rope in zip((start, start + size), ropes, strict=True)
            )
            y = recorder.concat(a, b, heads)
            if start:
                y = recorder.concat(recorder.slice(x, 0, start, heads), y, heads)
            end = start + 2 * size
            return y if end == head_dim else recorder.concat(y, recorder.slice(x, end, head_dim, heads), heads)

        return turn

    return of


def by_position(theta: float) -> Callable[[int], Turn]:
    """Rotate pairs (i, i + half a head) by the row's position."""

    def of(head_dim: int) -> Turn:
        rope = Rope("neox", head_dim, tuple(theta ** (-2 * i / head_dim) for i in range(head_dim // 2)))
        return lambda network, x, heads: network.recorder.rotate(x, head_dim, rope)

    return of


def partly(head_dim: int) -> Turn:
    """Rotate the first half of each head by the frame, in pairs (i, i + a quarter of the head)."""
    size = head_dim // 2
    rope = Rope("neox", size, tuple(10000.0 ** (-2 * i / size) for i in range(size // 2)))
    return lambda network, x, heads: network.recorder.rotate(x, head_dim, rope)
