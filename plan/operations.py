"""Operations: what each one computes, from which values and weights. Nothing here computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plan.values import Rope, Value
from plan.weights import Weight

Activation = Literal["silu", "gelu", "sigmoid"]  # gelu: the tanh form
GluActivation = Literal["silu", "gelu", "sigmoid", "swiglu_oai"]
Gating = Literal["softmax", "sigmoid", "softmax_of_chosen"]


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
