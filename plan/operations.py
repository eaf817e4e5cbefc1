"""The operations, one class each. `backends.reference_operations` defines what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from localllm.plan.operation import Operation, Producer, Read, Unary
from localllm.plan.values import Rope, Value
from localllm.plan.weights import Weight

Activation = Literal["silu", "gelu", "sigmoid", "relu", "relu2", "softplus"]  # gelu: the tanh form; relu2: relu squared
GluActivation = Literal[
    "silu", "gelu", "sigmoid", "relu", "relu2", "softplus", "identity", "swiglu_oai", "swiglu_clamp", "silu_clamp",
    "gelu_alone",
]  # fmt: skip
Gating = Literal["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen", "sparse_mixer"]
NormKind = Literal["rms", "layer", "none"]


@dataclass(frozen=True, slots=True)
class Embed(Producer):
    """out[t] = table[tokens[t]], dequantized to float32; or of the position of row t, or the table's last."""

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
    """RMS norm, layer norm or neither over each of `groups` equal slices of a row (groups = heads for q/k norms).

    `weight` and `bias` have the width of one group; they are (groups, width of one) if every group has its own. Mean
    and variance are as in the papers, with eps inside the root.
    """

    weight: Weight
    bias: Weight | None
    eps: float
    groups: int
    kind: NormKind

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return _given(self.weight, self.bias)


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
        return _given(self.bias)

    @property
    def products(self) -> tuple[tuple[Value, Weight], ...]:
        return ((self.x, self.weight),)

    @property
    def flops(self) -> int:
        return 2 * prod(self.weight.shape)


@dataclass(frozen=True, slots=True)
class HeadLinear(Unary):
    """out[h] = x[h] @ weight[h].T for each head: a row of x is a slice per head, and so is a row of the result.

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
class Rotate(Unary):
    """out = x with every head of `head_dim` rotated to its row's position; rows whose logits are wanted keep theirs."""

    head_dim: int
    rope: Rope


@dataclass(frozen=True, slots=True)
class Append(Operation):
    """Write k and v of every row to the cache of `layer`, at the row's slot."""

    layer: int
    k: Value
    v: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.k, self.v

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,)


@dataclass(frozen=True, slots=True)
class Attention(Producer):
    """out = softmax(scale * q k^T over the row's sequence, positions 0..its own) v; grouped heads share k and v.

    If not `causal`, a row also sees the later positions of its sequence that are in the batch.

    Head h of q reads key-value head h // (heads / kv_heads); values may have another width than keys. With a `window`,
    a row at position p sees only positions above p - window, itself included; if `chunked`, from the last multiple of
    the window on; if not `causal`, those at most window // 2 away on either side. With a `softcap`, a score s becomes
    softcap * tanh(s / softcap) after scaling.
    `sinks` (heads,) are the logits of an extra position per head whose value is zero: they only add to the softmax's
    sum. With `slopes` (heads,), a score loses its head's slope times the distance of the two positions, last of all
    (ALiBi, arXiv:2108.12409).
    """

    q: Value
    layer: int
    heads: int
    scale: float
    window: int = 0  # 0: all positions
    softcap: float = 0.0  # 0: none
    sinks: Weight | None = None  # (heads,)
    slopes: Weight | None = None  # (heads,)
    chunked: bool = False
    causal: bool = True

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.q,)

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return _given(self.sinks, self.slopes)

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,)

    @property
    def flops_per_position(self) -> int:
        """A multiplication and an addition for score and weighted sum each; with a window the count stops growing."""
        return 0 if self.window else 2 * (self.q.width + self.out.width)


@dataclass(frozen=True, slots=True)
class Glu(Producer):
    """out = activation(gate) * up; each number of a narrower gate gates one of as many equal slices of the row.

    "swiglu_oai" is the unit of gpt-oss: g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7) and u = up within +-7.
    "swiglu_clamp" is silu(min(gate, limit)) * u and "silu_clamp" min(silu(gate), limit) * u with u = up within +-limit.
    "gelu_alone" is gelu(gate): of experts that have no up matrix.
    """

    gate: Value
    up: Value
    activation: GluActivation
    limit: float = 0.0

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.gate, self.up


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack of one matrix per expert: expert e maps x to (x @ weight[e].T) * scale[e] + bias[e]."""

    weight: Weight  # (experts, rows, columns)
    scale: Weight | None = None  # (experts,)
    bias: Weight | None = None  # (experts, rows)


@dataclass(frozen=True, slots=True)
class Experts(Unary):
    """out = sum over the `used` chosen experts e of weight_e * down_e(activation(gate_e x) * up_e x), row by row.

    `router` (rows, experts) holds one logit per expert. `gating` turns them into a choice and weights:
    - "softmax": probabilities over all experts; the highest are chosen, and are the weights.
    - "sigmoid": every logit by itself; the highest are chosen, and are the weights.
    - "softmax_of_chosen": the highest logits are chosen; the weights are the softmax over only these.
    - "sigmoid_of_chosen": the highest logits are chosen; the weights are their sigmoids.
    - "sparse_mixer": the highest logits are chosen, one after the other. The weight of each is its softmax over the
      experts that are left at this point. Of these, a logit l counts only if it is at most 0.02 max(abs(l), m) below
      the chosen logit m (arXiv:2409.12136, with the jitter of 0.01 that Phi MoE has).
    `choice_bias` (experts,) is added for the choice only, not to the weights. Of equal experts the lower is chosen.
    With `normalize` the weights are divided by their sum, or by 2^-14 if that is more. All are then times `scale`.
    With `weighted_input` the weights multiply gate_e x and up_e x instead of the expert's result (Llama 4).
    With `groups` above 1, neighbouring experts form so many groups, and only experts of the best `groups_used` are
    chosen. A group is as good as the two best experts in it together; with "softmax" as the best one (DeepSeek V2).
    """

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
    limit: float = 0.0  # as in `Glu`
    weighted_input: bool = False
    groups: int = 1
    groups_used: int = 1

    @property
    def gated(self) -> bool:
        """Whether gate and up are two stacks; one stack as both makes a squared ReLU of relu(gate x) * up x."""
        return self.gate != self.up

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (self.gate, self.up, self.down) if self.gated else (self.up, self.down)

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.x, self.router

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return tuple([stack.weight for stack in self.stacks])

    @property
    def vectors(self) -> tuple[Weight, ...]:
        stacks = self.stacks
        return _given(self.choice_bias, *(s.scale for s in stacks), *(s.bias for s in stacks))

    @property
    def products(self) -> tuple[tuple[Value, Weight], ...]:
        return tuple([(self.x, stack.weight) for stack in self.stacks[:-1]])

    @property
    def reads(self) -> tuple[Read, ...]:
        """The chosen experts' share of the stacks, and all of the bias for the choice."""
        of_stacks = (weight for stack in self.stacks for weight in _given(stack.weight, stack.scale, stack.bias))
        shares = [Read(weight, self.used, self.router.width) for weight in of_stacks]
        return (*shares, *(Read(bias) for bias in _given(self.choice_bias)))

    @property
    def flops(self) -> int:
        return sum(2 * self.used * prod(weight.shape[1:]) for weight in self.matrices)


@dataclass(frozen=True, slots=True)
class Activate(Unary):
    """out = activation(x)."""

    activation: Activation


@dataclass(frozen=True, slots=True)
class Xielu(Unary):
    """out = positive * x^2 + beta * x above 0, else negative * (exp(min(x, eps)) - 1 - x) + beta * x.

    The activation xIELU (arXiv:2411.13010), with numbers that a model has learned.
    """

    positive: float
    negative: float
    beta: float
    eps: float  # below 0: where the rounding of exp begins


@dataclass(frozen=True, slots=True)
class Clamp(Unary):
    """out = min(max(x, -bound), bound); a NaN stays one."""

    bound: float


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
class Columns(Unary):
    """out = columns start..stop of each of `groups` equal slices of a row, one slice after the other."""

    groups: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Join(Producer):
    """out = each of `groups` equal slices of a row of a, followed by the same slice of b."""

    a: Value
    b: Value
    groups: int

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.a, self.b


@dataclass(frozen=True, slots=True)
class Weigh(Unary):
    """out = x * weight, number by number."""

    weight: Weight  # (width,)

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return (self.weight,)


@dataclass(frozen=True, slots=True)
class Mix(Unary):
    """Slice i of out = slice i of base + the sum over j of coefficients[i * slices + j] * slice j of x.

    A row of x is `slices` equal slices, and out has slices of the same width. The coefficients are those of the row, or
    the same numbers for all rows. Without a base there is only the sum.
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
class Match(Unary):
    """out = each of `groups` slices of x, scaled to the root mean square of the row of `like`.

    The mean square of a slice counts as eps at least.
    """

    like: Value
    eps: float
    groups: int

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.x, self.like


@dataclass(frozen=True, slots=True)
class Excess(Unary):
    """out = max(x - (mean + deviations * standard deviation), 0), mean and deviation over the numbers of the row.

    It leaves the largest numbers of a normal distribution: "Gaussian top-k" (Gemma 3n, arXiv:2506.06644). The deviation
    is that of a sample: of squares over width - 1, as in llama.cpp. Transformers divides by the width, which at the
    8192 numbers of Gemma 3n moves the threshold by 6e-5 of the deviation.
    """

    deviations: float


@dataclass(frozen=True, slots=True)
class SelectRows(Unary):
    """out[l] = x[logit_rows[l]]: from batch rows to the rows whose logits are wanted."""


@dataclass(frozen=True, slots=True)
class Receive(Operation):
    """Receive values that another place made; starts a stage of a split plan."""

    values: tuple[Value, ...]

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self.values


@dataclass(frozen=True, slots=True)
class Send(Operation):
    """Send values to the next stage, at another place; ends a stage of a split plan."""

    values: tuple[Value, ...]

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.values


def _given(*weights: Weight | None) -> tuple[Weight, ...]:
    """Return the weights that are not None."""
    return tuple([weight for weight in weights if weight is not None])
