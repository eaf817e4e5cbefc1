"""The plan: what a forward pass is, written down once as a flat list of operations over named values.

`models` calls the methods of `Recorder` while it walks an architecture; `Recorder.finish` returns a `Plan`; a backend
binds the plan once and replays it for every batch. Nothing here computes.

A value is a float32 matrix of one row per batch row ("batch", T rows) or per row whose logits are wanted ("logits",
L rows). Values are single-assignment: an operation never changes a value that another operation made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Rows = Literal["batch", "logits"]
Activation = Literal["silu", "gelu", "sigmoid"]  # gelu: the tanh form
GluActivation = Literal["silu", "gelu", "sigmoid", "swiglu_oai"]
Gating = Literal["softmax", "sigmoid", "softmax_of_chosen"]
RopeStyle = Literal["norm", "neox"]  # rotate (2i, 2i+1), or (i, i + n_rot/2)


class Weight(Protocol):
    """A tensor of the model file, still in its file format."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...  # "F32", "Q4_0", ... : a key of quant.FORMATS
    @property
    def shape(self) -> tuple[int, ...]: ...  # row-major: (experts, rows, columns), (rows, columns) or (columns,)
    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows start..stop as uint8 (stop - start, bytes per row), counted over all leading dimensions.

        A one-dimensional tensor is one row; row r of expert e is row e * rows + r.
        """
        ...


@dataclass(frozen=True, slots=True)
class Value:
    """A float32 matrix (T or L rows, width) that one operation makes and later ones read."""

    index: int
    width: int
    rows: Rows
    name: str


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the first `n_rot` of every head's dimensions.

    The angle of pair i at position p is `p * inverse_frequency[i]`; cosine and sine are multiplied by `magnitude` and,
    where `temperature` is not zero, by `1 + temperature * ln(1 + floor(p / temperature_length))` (queries of Ministral
    3 past their original context). `rope_table` is the definition.
    """

    style: RopeStyle
    n_rot: int
    inverse_frequency: tuple[float, ...]  # (n_rot/2,)
    magnitude: float = 1.0
    temperature: float = 0.0
    temperature_length: int = 1


def rope_table(rope: Rope, positions: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosines and sines float64 (positions, n_rot/2) of every pair at every position, magnitude included."""
    p = positions.astype(np.float64)[:, None]
    angle = p * np.array(rope.inverse_frequency)  # (positions, n_rot/2)
    magnitude = rope.magnitude * (1.0 + rope.temperature * np.log1p(np.floor(p / rope.temperature_length)))
    return np.cos(angle) * magnitude, np.sin(angle) * magnitude


@dataclass(frozen=True, slots=True)
class Embed:
    """out[t] = table[tokens[t]], dequantized to float32."""

    out: Value
    table: Weight


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm or layer norm over each of `groups` equal slices of a row (groups = heads for q/k norms).

    `weight` and `bias` have the width of one group, or are (groups, width of one) where every group has its own. mean
    and variance as in the papers, eps inside the root.
    """

    out: Value
    x: Value
    weight: Weight
    bias: Weight | None
    eps: float
    groups: int
    kind: Literal["rms", "layer"]


@dataclass(frozen=True, slots=True)
class Linear:
    """out = (x @ weight.T) * scale + bias."""

    out: Value
    x: Value
    weight: Weight
    bias: Weight | None
    scale: float


@dataclass(frozen=True, slots=True)
class Rotate:
    """out = x with every head of `head_dim` rotated to its row's position."""

    out: Value
    x: Value
    head_dim: int
    rope: Rope


@dataclass(frozen=True, slots=True)
class Append:
    """Write k and v of every row to the cache of `layer`, at the row's slot."""

    layer: int
    k: Value
    v: Value


@dataclass(frozen=True, slots=True)
class Attention:
    """out = softmax(scale * q k^T over the row's sequence, positions 0..its own) v; grouped heads share k and v.

    Head h of q reads key-value head h // (heads / kv_heads). With a `window` a row sees only the positions above its
    own - window, itself included. With a `softcap` a score s becomes softcap * tanh(s / softcap) after scaling. `sinks`
    (heads,) are logits of one more position per head, whose value is zero: they only add to the sum of the softmax.
    """

    out: Value
    q: Value
    layer: int
    heads: int
    scale: float
    window: int = 0  # 0: all positions
    softcap: float = 0.0  # 0: none
    sinks: Weight | None = None  # (heads,)


@dataclass(frozen=True, slots=True)
class Glu:
    """out = activation(gate) * up; a gate of width 1 gates the whole row.

    "swiglu_oai" is the unit of gpt-oss: g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7) and u = up within +-7.
    """

    out: Value
    gate: Value
    up: Value
    activation: GluActivation


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix per expert: expert e maps x to (x @ weight[e].T) * scale[e] + bias[e]."""

    weight: Weight  # (experts, rows, columns)
    scale: Weight | None = None  # (experts,)
    bias: Weight | None = None  # (experts, rows)


@dataclass(frozen=True, slots=True)
class Experts:
    """out = sum over the `used` chosen experts e of weight_e * down_e(activation(gate_e x) * up_e x), row by row.

    `router` (rows, experts) holds one logit per expert. `gating` says what becomes of them:
    - "softmax": probabilities over all experts; the highest are chosen, and are the weights.
    - "sigmoid": every logit by itself; the highest are chosen, and are the weights.
    - "softmax_of_chosen": the highest logits are chosen; the weights are the softmax over these alone.
    `choice_bias` (experts,) is added for the choice only, not to the weights. Of equal ones the lower expert is chosen.
    With `normalize` the weights are divided by their sum, or by 2^-14 if that is more; then all are times `scale`.
    """

    out: Value
    x: Value
    router: Value
    gate: Stack  # (experts, ffn, width)
    up: Stack  # (experts, ffn, width)
    down: Stack  # (experts, width, ffn)
    used: int
    gating: Gating
    normalize: bool
    scale: float
    activation: GluActivation
    choice_bias: Weight | None = None  # (experts,)


@dataclass(frozen=True, slots=True)
class Activate:
    """out = activation(x)."""

    out: Value
    x: Value
    activation: Activation


@dataclass(frozen=True, slots=True)
class Softcap:
    """out = cap * tanh(x / cap)."""

    out: Value
    x: Value
    cap: float


@dataclass(frozen=True, slots=True)
class Add:
    """out = a + b."""

    out: Value
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Scale:
    """out = x * factor."""

    out: Value
    x: Value
    factor: float


@dataclass(frozen=True, slots=True)
class SelectRows:
    """out[l] = x[logit_rows[l]]: from batch rows to the rows whose logits are wanted."""

    out: Value
    x: Value


Operation = (
    Embed | Norm | Linear | Rotate | Append | Attention | Glu | Experts | Activate | Softcap | Add | Scale | SelectRows
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """What one attention layer keeps per token."""

    kv_heads: int
    head_dim: int
    window: int = 0  # positions that a row sees; 0: all


@dataclass(frozen=True, slots=True)
class Part:
    """Operations start..stop, which run without a break; values that come from outside before, and are wanted there
    afterwards."""

    start: int
    stop: int
    enters: tuple[Value, ...] = ()
    leaves: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Operations in order; `logits` is the value (L, vocabulary) that a step returns.

    What is recorded is one part; `backends.hybrid.cut` makes plans of several.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    layers: tuple[CacheLayer, ...]
    logits: Value
    parts: tuple[Part, ...]
    starts: tuple[int, ...] = ()  # the operation that each layer begins with, and the output after the last

    @property
    def window(self) -> int:
        """The largest window of a layer; 0 where none has one."""
        return max((layer.window for layer in self.layers), default=0)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input: T rows of any number of sequences, and which rows want logits.

    `slots[t]` is the cache slot row t is written to: physical block * BLOCK + offset. `tables[s]` lists the physical
    blocks of sequence s in order of position; row t belongs to `sequence[t]` and sees positions 0..positions[t].
    Rows of one sequence stand together, in order of position. Layers with a window go by `window_slots` and
    `window_tables` where they have blocks of their own (`Limits.window_blocks`); what a table says of blocks that have
    fallen out of the window is not looked at.
    """

    tokens: NDArray[np.int32]  # (T,)
    positions: NDArray[np.int32]  # (T,)
    slots: NDArray[np.int32]  # (T,)
    sequence: NDArray[np.int32]  # (T,)
    tables: NDArray[np.int32]  # (sequences, blocks)
    logit_rows: NDArray[np.int32]  # (L,)
    window_slots: NDArray[np.int32] | None = None  # (T,)
    window_tables: NDArray[np.int32] | None = None  # (sequences, blocks)


BLOCK = 64  # tokens in a cache block


class Recorder:
    """Writes a plan down. Every method that returns a value appends the one operation that makes it."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._values: list[Value] = []
        self._layers: dict[int, CacheLayer] = {}
        self._starts: list[int] = []

    def begin_layer(self) -> None:
        """What follows is of the next layer, or of the output after the last one."""
        self._starts.append(len(self._operations))

    def _value(self, width: int, rows: Rows, name: str) -> Value:
        value = Value(len(self._values), width, rows, name)
        self._values.append(value)
        return value

    def embed(self, table: Weight) -> Value:
        out = self._value(table.shape[1], "batch", "embedding")
        self._operations.append(Embed(out, table))
        return out

    def rms_norm(self, x: Value, weight: Weight, eps: float, groups: int = 1) -> Value:
        out = self._value(x.width, x.rows, weight.name)
        self._operations.append(Norm(out, x, weight, None, eps, groups, "rms"))
        return out

    def layer_norm(self, x: Value, weight: Weight, bias: Weight | None, eps: float, groups: int = 1) -> Value:
        out = self._value(x.width, x.rows, weight.name)
        self._operations.append(Norm(out, x, weight, bias, eps, groups, "layer"))
        return out

    def linear(self, x: Value, weight: Weight, bias: Weight | None = None, scale: float = 1.0) -> Value:
        out = self._value(weight.shape[0], x.rows, weight.name)
        self._operations.append(Linear(out, x, weight, bias, scale))
        return out

    def rope(
        self,
        style: RopeStyle,
        n_rot: int,
        inverse_frequency: tuple[float, ...],
        magnitude: float = 1.0,
        temperature: float = 0.0,
        temperature_length: int = 1,
    ) -> Rope:
        """A rotation for `rotate`: models make it here because they know backends only through this object."""
        return Rope(style, n_rot, inverse_frequency, magnitude, temperature, temperature_length)

    def rotate(self, x: Value, head_dim: int, rope: Rope) -> Value:
        out = self._value(x.width, x.rows, x.name + ".rope")
        self._operations.append(Rotate(out, x, head_dim, rope))
        return out

    def append(self, layer: int, k: Value, v: Value, kv_heads: int) -> None:
        self._layers[layer] = CacheLayer(kv_heads, k.width // kv_heads)
        self._operations.append(Append(layer, k, v))

    def attention(
        self, q: Value, layer: int, heads: int, scale: float, window: int = 0, softcap: float = 0.0,
        sinks: Weight | None = None,
    ) -> Value:  # fmt: skip
        out = self._value(q.width, q.rows, f"attention.{layer}")
        self._layers[layer] = replace(self._layers[layer], window=window)
        self._operations.append(Attention(out, q, layer, heads, scale, window, softcap, sinks))
        return out

    def glu(self, gate: Value, up: Value, activation: GluActivation) -> Value:
        out = self._value(up.width, up.rows, gate.name + ".glu")
        self._operations.append(Glu(out, gate, up, activation))
        return out

    def stack(self, weight: Weight, scale: Weight | None = None, bias: Weight | None = None) -> Stack:
        """The matrices of all experts, for `experts`."""
        return Stack(weight, scale, bias)

    def experts(
        self, x: Value, router: Value, gate: Stack, up: Stack, down: Stack, used: int, gating: Gating, normalize: bool,
        scale: float, activation: GluActivation, choice_bias: Weight | None = None,
    ) -> Value:  # fmt: skip
        out = self._value(down.weight.shape[1], x.rows, down.weight.name)
        operation = Experts(out, x, router, gate, up, down, used, gating, normalize, scale, activation, choice_bias)
        self._operations.append(operation)
        return out

    def activate(self, x: Value, activation: Activation) -> Value:
        out = self._value(x.width, x.rows, f"{x.name}.{activation}")
        self._operations.append(Activate(out, x, activation))
        return out

    def softcap(self, x: Value, cap: float) -> Value:
        out = self._value(x.width, x.rows, x.name + ".capped")
        self._operations.append(Softcap(out, x, cap))
        return out

    def add(self, a: Value, b: Value) -> Value:
        out = self._value(a.width, a.rows, a.name + ".sum")
        self._operations.append(Add(out, a, b))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        out = self._value(x.width, x.rows, x.name + ".scaled")
        self._operations.append(Scale(out, x, factor))
        return out

    def select_rows(self, x: Value) -> Value:
        out = self._value(x.width, "logits", "selected")
        self._operations.append(SelectRows(out, x))
        return out

    def finish(self, logits: Value) -> Plan:
        layers = tuple(self._layers[i] for i in range(len(self._layers)))
        operations = tuple(self._operations)
        whole = Part(0, len(operations))
        return Plan(operations, tuple(self._values), layers, logits, (whole,), tuple(self._starts))
