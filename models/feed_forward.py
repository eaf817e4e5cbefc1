"""The feed-forward of a layer: dense, or a mixture of experts with or without a shared expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, cast, get_args

from localllm.models.builder import Part
from localllm.models.config import ExpertConfig
from localllm.plan import Activation, Stack, Value, Weight

_SHARED = "_shexp"  # suffix of a shared expert's tensor names


@dataclass(frozen=True, slots=True)
class FeedForward(Part):
    """Maps normed hidden states (T, width) to the feed-forward's output (T, width)."""

    parallel: ClassVar[str] = _SHARED  # suffix of the dense feed-forward that runs in parallel with the experts
    sum_scale: ClassVar[float] = 1.0  # factor on the sum of the experts and this feed-forward
    weighted_input: ClassVar[bool] = False  # the routing weights multiply the experts' input instead of their output

    def __call__(self, x: Value, layer: int, residual: Value, before: Value) -> Value:
        """Return the feed-forward of x, the normed hidden states of `residual`; `before` is the layer's input."""
        config, experts = self.config, self.config.experts
        if experts is None or f"blk.{layer}.ffn_gate_inp.weight" not in self.tensors:
            return self.dense(layer, x, config.ffn_width[layer])
        return self.mixture(x, layer, residual, before, experts)

    def mixture(self, x: Value, layer: int, residual: Value, before: Value, experts: ExpertConfig) -> Value:
        """Return the sum of the selected experts, plus the shared expert if the GGUF has one."""
        builder, name = self.builder, f"blk.{layer}."
        read = self.expert_input(name, x, before)
        routed = self.router_input(read, before)
        router = builder.linear(name + "ffn_gate_inp", routed, experts.count, builder.config.width)  # (T, experts)
        y = self.latent(name, read, lambda low: self.experts(layer, low, router, experts))
        y = self.added(layer, y, read, router, experts)
        shared = builder.tensors.height(f"{name}ffn_up{self.parallel}.weight")
        if not shared:
            return y
        both = builder.recorder.add(y, self.shared(layer, x, shared, self.parallel))
        return both if self.sum_scale == 1.0 else builder.recorder.scale(both, self.sum_scale)

    def expert_input(self, name: str, x: Value, before: Value) -> Value:
        """Return what the experts read."""
        return x

    def router_input(self, x: Value, before: Value) -> Value:
        """Return what the router reads; x is the input of the experts."""
        return x

    def added(self, layer: int, y: Value, x: Value, router: Value, experts: ExpertConfig) -> Value:
        """Return y, the output of the experts with input x, plus the output of further experts."""
        return y

    def latent(self, name: str, x: Value, experts: Callable[[Value], Value]) -> Value:
        """Return the experts' output for x. If the GGUF has latent projections (Nemotron 3 Super, Kimi K3), the experts
        compute in the latent width.
        """
        kind = next((kind for kind in ("latent", "routed") if f"{name}ffn_{kind}_down.weight" in self.tensors), "")
        if not kind:
            return experts(x)
        width = self.tensors.height(f"{name}ffn_{kind}_down.weight")
        low = experts(self.builder.linear(f"{name}ffn_{kind}_down", x, width, x.width))
        return self.builder.linear(
            f"{name}ffn_{kind}_up", self.builder.optional_norm(f"{name}ffn_{kind}_norm", low), x.width, width
        )

    def dense(self, layer: int, x: Value, inner: int, suffix: str = "") -> Value:
        """Return the down-projected output of a dense feed-forward with separate, fused or only up matrices."""
        builder, recorder, width = self.builder, self.recorder, self.config.width
        name = f"blk.{layer}."
        up_name = f"{name}ffn_up{suffix}"
        match self.form(layer, suffix, inner):
            case "gated":
                gate = self.gate(layer, f"{name}ffn_gate{suffix}", x, inner)
                hidden = self.gated(gate, builder.ffn_linear(up_name, x, inner, width), layer)
            case "fused":
                gate = builder.rows(up_name, x, 0, inner, 2 * inner)
                up = builder.rows(up_name, x, inner, 2 * inner, 2 * inner)
                hidden = self.gated(gate, up, layer)
            case "plain":
                hidden = self.activated(builder.ffn_linear(up_name, x, inner, width), layer)
                if name + "ffn.act.scales" in builder.tensors:  # AWQ scales of MPT
                    hidden = recorder.scale_columns(hidden, builder.tensors.inverse(name + "ffn.act.scales", inner))
        hidden = builder.optional_norm(f"{name}ffn_sub_norm{suffix}", hidden)
        return builder.ffn_linear(f"{name}ffn_down{suffix}", hidden, width, inner)

    def form(self, layer: int, suffix: str, inner: int) -> Literal["gated", "fused", "plain"]:
        """Return which matrices a dense feed-forward has."""
        tensors, name = self.tensors, f"blk.{layer}."
        if self.builder.row.ffn != "found":
            return self.builder.row.ffn
        if f"{name}ffn_gate{suffix}.weight" in tensors:
            return "gated"
        return "plain" if tensors.height(f"{name}ffn_up{suffix}.weight") == inner else "fused"

    def gate(self, layer: int, name: str, x: Value, inner: int) -> Value:
        """Return the gate before its activation."""
        return self.builder.ffn_linear(name, x, inner, x.width)

    def gated(self, gate: Value, up: Value, layer: int) -> Value:
        row, limit = self.builder.row, self.config.limits[layer]
        activation = row.limits if row.limits and limit else self.config.activation
        assert activation != "xielu", "gates nothing"
        return self.recorder.glu(gate, up, activation, limit)

    def activated(self, x: Value, layer: int) -> Value:
        """Return the activation of feed-forwards without a gate."""
        activation = self.config.activation
        assert activation in get_args(Activation), "needs a gate"
        return self.recorder.activate(x, cast(Activation, activation))

    def shared(self, layer: int, x: Value, inner: int, suffix: str) -> Value:
        """Return the shared expert's output for every token, gated if the GGUF has a gate."""
        builder, name = self.builder, f"blk.{layer}."
        y = self.dense(layer, x, inner // 2 if self.form(layer, suffix, inner) == "fused" else inner, suffix)
        if name + "ffn_gate_inp_shexp.weight" not in builder.tensors:
            return y
        own = builder.tensors.row(name + "ffn_gate_inp_shexp.weight", builder.config.width)
        return builder.recorder.glu(builder.recorder.linear(x, own), y, "sigmoid")

    def experts(self, layer: int, x: Value, router: Value, experts: ExpertConfig) -> Value:
        """Return the output of the experts that the router selects."""
        builder, name, limit = self.builder, f"blk.{layer}.", experts.limits[layer]
        recorder, tensors = builder.recorder, builder.tensors
        gate, up = self.gate_and_up(name, x.width, experts)
        bias = tensors.optional(name + "exp_probs_b.bias", experts.count)
        bias = bias or tensors.optional(name + "exp_probs_b", experts.count)  # Hunyuan 3's tensor name
        down = self.stack(name + "ffn_down_exps", experts, x.width, up.weight.shape[1])
        gating = experts.gating if bias is None else experts.biased_gating
        activation = builder.row.limits if builder.row.limits and limit else experts.activation
        return recorder.experts(
            x, router, gate, up, down, experts.used, gating, experts.normalize, experts.scale, activation, bias, limit,
            self.weighted_input, experts.groups, experts.groups_used, self.choices(layer, router, experts),
        )  # fmt: skip

    def choices(self, layer: int, router: Value, experts: ExpertConfig) -> Value | None:
        """Return the experts of every token; None if the router selects them."""
        return None

    def gate_and_up(self, name: str, width: int, experts: ExpertConfig) -> tuple[Stack, Stack]:
        """Return the stacks of gate and up matrices, from two tensors or from a fused tensor with
        the gate rows first."""
        fused = self.tensors.height(name + "ffn_gate_up_exps.weight")
        if not fused:
            inner = self.tensors.height(name + "ffn_up_exps.weight")
            up = self.stack(name + "ffn_up_exps", experts, inner, width)
            if self.builder.row.ffn == "plain":  # squared ReLU, or an activation that reads only gate or up
                return up, up
            return self.stack(name + "ffn_gate_exps", experts, inner, width), up
        both = self.stack(name + "ffn_gate_up_exps", experts, fused, width).weight
        scale = self.stack_scale(name + "ffn_up_exps", experts)  # scale of both matrices
        first, second = (both.rows_of_each(fused, at, at + fused // 2) for at in (0, fused // 2))
        return Stack(first, scale), Stack(second, scale)

    def stack(self, name: str, experts: ExpertConfig, rows: int, columns: int) -> Stack:
        weight = self.tensors.stack(name + ".weight", experts.count, rows, columns)
        bias = self.tensors.optional(name + ".bias", experts.count, rows)
        return Stack(weight, self.stack_scale(name, experts), bias)

    def stack_scale(self, name: str, experts: ExpertConfig) -> Weight | None:
        return self.tensors.optional(name + ".scale", experts.count) if experts.matrix_scales else None
