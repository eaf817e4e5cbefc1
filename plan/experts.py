"""The mixture-of-experts operation: selects experts and runs their feed-forwards."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from localllm.plan.operation import Read, Unary
from localllm.plan.operations import GluActivation
from localllm.plan.values import Value
from localllm.plan.weights import Weight, given

Gating = Literal[
    "softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen", "sparse_mixer", "sqrt_softplus"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack of one matrix per expert: expert e maps x to (x @ weight[e].T) * scale[e] + bias[e]."""

    weight: Weight  # (experts, rows, columns)
    scale: Weight | None = None  # (experts,)
    bias: Weight | None = None  # (experts, rows)
    shared: int = 1  # number of neighbouring experts that share one matrix of the file


@dataclass(frozen=True, slots=True)
class Experts(Unary):
    """out = sum over the `used` selected experts e of weight_e * down_e(activation(gate_e x) * up_e x), row by row.

    `router` (rows, experts) holds one logit per expert. `gating` turns them into a selection and weights:

    - "softmax": probabilities over all experts; the highest are selected, and are the weights.
    - "sigmoid": sigmoids of the logits; the highest are selected, and are the weights.
    - "sqrt_softplus": square roots of the logits' softplus; the highest are selected, and are the weights.
    - "softmax_of_chosen": the highest logits are selected; the weights are the softmax over only these.
    - "sigmoid_of_chosen": the highest logits are selected; the weights are their sigmoids.
    - "sparse_mixer": the highest logits are selected one at a time. The weight of each is its softmax over the experts
      not yet selected. A logit l is in that softmax only if it is at most 0.02 max(abs(l), m) below the selected logit
      m (arXiv:2409.12136, with Phi MoE's jitter of 0.01).

    `choice_bias` (experts,) is added for the selection only, not to the weights. Ties go to the lower expert. With
    `normalize` the weights are divided by their sum, but at least by 2^-14. All weights are then multiplied by `scale`.
    With `weighted_input` the weights multiply gate_e x and up_e x instead of the expert's result (Llama 4).

    With `groups` above 1, neighbouring experts form this number of groups, and experts are selected from the best
    `groups_used` groups only. A group's score is the sum of its two best experts; with "softmax" it is the best one
    (DeepSeek V2).

    `choices` (rows, used) are the numbers of the selected experts; the logits then only determine the weights.
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
    choices: Value | None = None  # (T, used)

    @property
    def gated(self) -> bool:
        """Whether gate and up are two stacks; a single stack as both makes a squared ReLU of relu(gate x) * up x."""
        return self.gate != self.up

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (self.gate, self.up, self.down) if self.gated else (self.up, self.down)

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x, self.router) if self.choices is None else (self.x, self.router, self.choices)

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return tuple([stack.weight for stack in self.stacks])

    @property
    def vectors(self) -> tuple[Weight, ...]:
        stacks = self.stacks
        return given(self.choice_bias, *(s.scale for s in stacks), *(s.bias for s in stacks))

    @property
    def products(self) -> tuple[tuple[Value, Weight], ...]:
        return tuple([(self.x, stack.weight) for stack in self.stacks[:-1]])

    @property
    def reads(self) -> tuple[Read, ...]:
        """The selected experts' share of the stacks, and the whole selection bias."""
        of_stacks = (weight for stack in self.stacks for weight in given(stack.weight, stack.scale, stack.bias))
        shares = [Read(weight, self.used, self.router.width) for weight in of_stacks]
        return (*shares, *(Read(bias) for bias in given(self.choice_bias)))

    @property
    def flops(self) -> int:
        return sum(2 * self.used * prod(weight.shape[1:]) for weight in self.matrices)
