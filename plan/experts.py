"""The mixture-of-experts operation: expert routing, and the feed-forwards of the selected experts."""

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
    """Stacked expert matrices: expert e maps x to (x @ weight[e].T) * scale[e] + bias[e]."""

    weight: Weight  # (experts, rows, columns)
    scale: Weight | None = None  # (experts,)
    bias: Weight | None = None  # (experts, rows)
    shared: int = 1  # number of consecutive experts that share one matrix in the GGUF


@dataclass(frozen=True, slots=True)
class Experts(Unary):
    """out = sum over the `used` selected experts e of weight_e * down_e(activation(gate_e x) * up_e x), for each token.

    `router` (T, experts) contains one logit per token and expert. `gating` derives the selection and the weights from
    these:

    - "softmax": probabilities over all experts. The highest ones are selected and used as weights.
    - "sigmoid": sigmoids of the logits. The highest ones are selected and used as weights.
    - "sqrt_softplus": square roots of the logits' softplus. The highest ones are selected and used as weights.
    - "softmax_of_chosen": the highest logits are selected; the weights are the softmax over the selected logits.
    - "sigmoid_of_chosen": the highest logits are selected; the weights are the sigmoids of the selected logits.
    - "sparse_mixer": the highest logits are selected one at a time. The weight of an expert is its softmax over the
      experts not yet selected. A logit l is in that softmax only if it is at most 0.02 max(abs(l), m) below the
      selected logit m (arXiv:2409.12136, with Phi MoE's jitter of 0.01).

    `choice_bias` (experts,) is added for the selection only, not to the weights. Ties go to the expert with the lower
    index. With `normalize`, the weights are divided by max(their sum, 2^-14). All weights are then multiplied by
    `scale`. With `weighted_input` the weights multiply gate_e x and up_e x instead of the expert's result (Llama 4).

    With `groups` above 1, consecutive experts form `groups` groups, and experts are selected from the best
    `groups_used` groups only. The score of a group is the sum of its two highest expert scores, or with "softmax" the
    highest score (DeepSeek V2).

    If `choices` (T, used) gives the indices of the selected experts, the logits only determine the weights.
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
        """Whether gate and up are different stacks; equal stacks give a squared ReLU, relu(gate x) * up x."""
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
        """The selected experts' fraction of the stacks, and the whole selection bias."""
        of_stacks = (weight for stack in self.stacks for weight in given(stack.weight, stack.scale, stack.bias))
        shares = [Read(weight, self.used, self.router.width) for weight in of_stacks]
        return (*shares, *(Read(bias) for bias in given(self.choice_bias)))

    @property
    def flops(self) -> int:
        return sum(2 * self.used * prod(weight.shape[1:]) for weight in self.matrices)
