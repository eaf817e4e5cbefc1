"""What the forward needs of a recorder, as a protocol: `backends.plan.Recorder` is one, `models.summary` has another.

A backend reaches `models` only through this object; values, rotations, stacks and the plan stay opaque here.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar

from models.architectures import Activation, ExpertActivation, Gating
from models.tensors import Weight

V = TypeVar("V")  # a recorded value
R = TypeVar("R")  # a rotation
S = TypeVar("S")  # the matrices of all experts
P_co = TypeVar("P_co", covariant=True)  # what recording ends in: the plan


class Recorder(Protocol[V, R, S, P_co]):
    """Every method that returns a value appends the one operation that makes it."""

    def embed(self, table: Weight) -> V: ...
    def rms_norm(self, x: V, weight: Weight, eps: float, groups: int = 1) -> V: ...
    def layer_norm(self, x: V, weight: Weight, bias: Weight | None, eps: float, groups: int = 1) -> V: ...
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
    def attention(
        self, q: V, layer: int, heads: int, scale: float, window: int = 0, softcap: float = 0.0,
        sinks: Weight | None = None,
    ) -> V: ...  # fmt: skip
    def glu(self, gate: V, up: V, activation: Activation | Literal["sigmoid"]) -> V: ...
    def stack(self, weight: Weight, scale: Weight | None = None, bias: Weight | None = None) -> S: ...
    def experts(
        self, x: V, router: V, gate: S, up: S, down: S, used: int, gating: Gating, normalize: bool, scale: float,
        activation: ExpertActivation, choice_bias: Weight | None = None,
    ) -> V: ...  # fmt: skip
    def activate(self, x: V, activation: Activation) -> V: ...
    def softcap(self, x: V, cap: float) -> V: ...
    def add(self, a: V, b: V) -> V: ...
    def scale(self, x: V, factor: float) -> V: ...
    def select_rows(self, x: V) -> V: ...
    def finish(self, logits: V) -> P_co: ...
