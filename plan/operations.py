"""The operations, one class each, except those in `attention`, `experts` and `recurrence`.

`backends.reference_operations` defines their results.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from localllm.plan.operation import Operation, Producer, Read, Unary
from localllm.plan.values import Value
from localllm.plan.weights import Weight, given

# gelu: tanh form; gelu_erf: exact form; gelu_quick: x * sigmoid(1.702 x); relu2: relu squared
Activation = Literal["silu", "gelu", "gelu_erf", "gelu_quick", "sigmoid", "relu", "relu2", "softplus"]
GluActivation = Literal[
    "silu", "gelu", "gelu_erf", "gelu_quick", "sigmoid", "relu", "relu2", "softplus", "identity", "swiglu_oai",
    "swiglu_clamp", "silu_clamp", "situ", "gelu_alone",
]  # fmt: skip
NormKind = Literal["rms", "layer", "none"]


@dataclass(frozen=True, slots=True)
class Embed(Producer):
    """out[t] = table[tokens[t]], dequantized to float32; row 0 for media tokens, whose ids are negative.

    With `positions`, the index is the position of token t instead, clamped to the table's last row.
    """

    table: Weight
    positions: bool = False

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return (self.table,)

    @property
    def reads(self) -> tuple[Read, ...]:
        return (Read(self.table, 1, self.table.shape[0]),)


@dataclass(frozen=True, slots=True)
class Norm(Unary):
    """Norm of each of the `groups` equal slices of x (groups = heads for q/k norms): RMS, layer norm, or weights only.

    `weight` and `bias` are (group width,), or (groups, group width) if groups have separate weights. As in the papers,
    eps is added inside the square root.
    """

    weight: Weight
    bias: Weight | None
    eps: float
    groups: int
    kind: NormKind

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return given(self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Linear(Unary):
    """out = (x @ weight.T) * scale + bias."""

    weight: Weight
    bias: Weight | None
    scale: float

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return (self.weight,)

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return given(self.bias)

    @property
    def products(self) -> tuple[tuple[Value, Weight], ...]:
        return ((self.x, self.weight),)

    @property
    def flops(self) -> int:
        return 2 * prod(self.weight.shape)


@dataclass(frozen=True, slots=True)
class HeadLinear(Unary):
    """out[h] = x[h] @ weight[h].T for each head; rows of x and of the result are concatenated heads.

    `weight` is (heads, rows, columns), with an even number of columns.
    """

    weight: Weight

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return (self.weight,)

    @property
    def flops(self) -> int:
        return 2 * prod(self.weight.shape)


@dataclass(frozen=True, slots=True)
class Glu(Producer):
    """out = activation(gate) * up; if the gate is narrower, each of its values gates one of the equal slices of up.

    "swiglu_oai" is gpt-oss's activation: g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7) and u = up within +-7.
    "swiglu_clamp" is silu(min(gate, limit)) * u and "silu_clamp" min(silu(gate), limit) * u with u = up within +-limit.
    "situ" is limit tanh(g / limit) * sigmoid(g) * limit tanh(u / limit).
    "gelu_alone" is gelu(gate), for experts without an up matrix.
    """

    gate: Value
    up: Value
    activation: GluActivation
    limit: float = 0.0

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.gate, self.up


@dataclass(frozen=True, slots=True)
class Activate(Unary):
    """out = activation(x); "signed_root" is sign(x) * sqrt(max(|x|, 1e-6))."""

    activation: Activation | Literal["exp", "signed_root"]


@dataclass(frozen=True, slots=True)
class Xielu(Unary):
    """out = positive * x^2 + beta * x above 0, else negative * (exp(min(x, eps)) - 1 - x) + beta * x.

    This is the activation xIELU (arXiv:2411.13010) with learned parameters.
    """

    positive: float
    negative: float
    beta: float
    eps: float  # below 0: bounds the input of exp


@dataclass(frozen=True, slots=True)
class Clamp(Unary):
    """out = min(max(x, low), high); NaN stays NaN."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Softcap(Unary):
    """out = cap * tanh(x / cap)."""

    cap: float


@dataclass(frozen=True, slots=True)
class Add(Producer):
    """out = a + b."""

    a: Value
    b: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.a, self.b


@dataclass(frozen=True, slots=True)
class Scale(Unary):
    """out = x * factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Slice(Unary):
    """out = columns start..stop of each of the `groups` equal slices of x, concatenated."""

    groups: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Concat(Producer):
    """out = the `groups` equal slices of a, each followed by the corresponding slice of b."""

    a: Value
    b: Value
    groups: int

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.a, self.b


@dataclass(frozen=True, slots=True)
class Mul(Unary):
    """out = x * weight, elementwise."""

    weight: Weight  # (width,)

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return (self.weight,)


@dataclass(frozen=True, slots=True)
class Mix(Unary):
    """Slice i of out = slice i of base + the sum over j of coefficients[i * slices + j] * slice j of x.

    x consists of `slices` equal slices, and out of slices of the same width. The coefficients are per token (a value)
    or the same for all tokens (a weight). Without a base, out is only the sum.
    """

    slices: int
    coefficients: Value | Weight  # (slices of out * slices,)
    base: Value | None

    @property
    def inputs(self) -> tuple[Value, ...]:
        own = (self.coefficients,) if isinstance(self.coefficients, Value) else ()
        return self.x, *own, *((self.base,) if self.base is not None else ())

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return (self.coefficients,) if isinstance(self.coefficients, Weight) else ()


@dataclass(frozen=True, slots=True)
class Blend(Unary):
    """out = the mean of the slices of x and of `last`, all of equal width, weighted by the softmax of their scores.

    The score of a slice is its dot product with `weight`, divided by its root mean square. This is the residual
    attention of Kimi K3, whose slices are the checkpoints of earlier layers.
    """

    last: Value
    weight: Weight  # (width of last,)
    eps: float  # added to the mean square of a slice

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.x, self.last

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return (self.weight,)


@dataclass(frozen=True, slots=True)
class Match(Unary):
    """out = the `groups` slices of x, each scaled to the root mean square of `like`.

    The mean square of a slice is at least eps.
    """

    like: Value
    eps: float
    groups: int

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.x, self.like


@dataclass(frozen=True, slots=True)
class GaussianTopK(Unary):
    """out = max(x - (mean + deviations * standard deviation), 0), with mean and deviation over each token's values.

    For normally distributed x, this keeps the largest values: "Gaussian top-k" (Gemma 3n, arXiv:2506.06644). As in
    llama.cpp, the deviation is the sample standard deviation (divided by width - 1). Transformers divides by the width,
    which for Gemma 3n's width of 8192 moves the threshold by 6e-5 of the deviation.
    """

    deviations: float


@dataclass(frozen=True, slots=True)
class SelectRows(Unary):
    """out[l] = x[logit_rows[l]]: selects the tokens whose logits are requested."""


@dataclass(frozen=True, slots=True)
class Receive(Operation):
    """Receive values computed on another device; starts a stage of a split plan."""

    values: tuple[Value, ...]

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self.values


@dataclass(frozen=True, slots=True)
class Send(Operation):
    """Send values to the next stage, on another device; ends a stage of a split plan."""

    values: tuple[Value, ...]

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.values
