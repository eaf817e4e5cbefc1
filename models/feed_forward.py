"""The feed-forward of a layer: dense, or a mixture of experts with or without an expert for all."""

from __future__ import annotations

import math
from dataclasses import dataclass

from localllm.models.builder import Builder
from localllm.models.config import ExpertConfig
from localllm.plan import Stack, Value, Weight


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Maps normed rows (T, width) to rows (T, width)."""

    builder: Builder

    def __call__(self, x: Value, layer: int, residual: Value) -> Value:
        """The feed-forward of x, the normed rows of `residual`."""
        builder, name, experts = self.builder, f"blk.{layer}.", self.builder.config.experts
        if experts is None or name + "ffn_gate_inp.weight" not in builder.tensors:
            return self.dense(name, x, builder.config.ffn_width[layer], sparsity=builder.config.sparsity[layer])
        if experts.beside:
            return self.both(layer, x, residual, experts)
        router = builder.linear(name + "ffn_gate_inp", x, experts.count, builder.config.width)  # (T, experts)
        return self.experts(name, x, router, experts)

    def both(self, layer: int, x: Value, residual: Value, experts: ExpertConfig) -> Value:
        """The dense feed-forward, plus experts that norm the residual stream on their own, as their router does."""
        builder, name = self.builder, f"blk.{layer}."
        config, recorder, tensors = builder.config, builder.recorder, builder.tensors
        dense = builder.norm(name + "post_ffw_norm_1", self.dense(name, x, config.ffn_width[layer]))
        own = builder.norm(name + "pre_ffw_norm_2", residual)
        normed = recorder.rms_norm(residual, tensors.vector(name + "ffn_gate_inp.scale", config.width), config.eps)
        weight = tensors.matrix(name + "ffn_gate_inp.weight", experts.count, config.width)
        router = recorder.linear(normed, weight, None, 1.0 / math.sqrt(config.width))  # (T, experts)
        return recorder.add(dense, builder.norm(name + "post_ffw_norm_2", self.experts(name, own, router, experts)))

    def dense(self, name: str, x: Value, inner: int, suffix: str = "", sparsity: float | None = None) -> Value:
        """The down matrix times the hidden rows (T, inner); gate and up are two matrices, one, or up alone."""
        builder, recorder, width = self.builder, self.builder.recorder, self.builder.config.width
        activation, up_name = builder.row.activation, f"{name}ffn_up{suffix}"
        match builder.row.ffn:
            case "gated":
                gate = builder.ffn_linear(f"{name}ffn_gate{suffix}", x, inner, width)
                up = builder.ffn_linear(up_name, x, inner, width)
                hidden = recorder.glu(gate if sparsity is None else recorder.excess(gate, sparsity), up, activation)
            case "fused":
                gate = builder.rows(up_name, x, 0, inner, 2 * inner)
                up = builder.rows(up_name, x, inner, 2 * inner, 2 * inner)
                hidden = recorder.glu(gate, up, activation)
            case "plain":
                hidden = recorder.activate(builder.ffn_linear(up_name, x, inner, width), activation)
        hidden = builder.optional_norm(f"{name}ffn_sub_norm{suffix}", hidden)
        return builder.ffn_linear(f"{name}ffn_down{suffix}", hidden, width, inner)

    def experts(self, name: str, x: Value, router: Value, experts: ExpertConfig) -> Value:
        """The experts that the router chooses, plus the shared expert if the file has one."""
        builder = self.builder
        config, recorder, tensors = builder.config, builder.recorder, builder.tensors
        gate, up = self.gate_and_up(name, experts)
        y = recorder.experts(
            x,
            router,
            gate,
            up,
            self.stack(name + "ffn_down_exps", experts, config.width, up.weight.shape[1]),
            experts.used,
            experts.gating,
            experts.normalize,
            experts.scale,
            experts.activation,
            tensors.optional(name + "exp_probs_b.bias", experts.count),
        )
        shared = tensors.height(name + "ffn_up_shexp.weight")
        if not shared:
            return y
        z = self.dense(name, x, shared, "_shexp")
        if name + "ffn_gate_inp_shexp.weight" in tensors:
            own = tensors.row(name + "ffn_gate_inp_shexp.weight", config.width)
            z = recorder.glu(recorder.linear(x, own), z, "sigmoid")
        return recorder.add(y, z)

    def gate_and_up(self, name: str, experts: ExpertConfig) -> tuple[Stack, Stack]:
        """The stacks of gate and up matrices: two tensors, or one that holds the rows of both, the gate's first."""
        tensors, width = self.builder.tensors, self.builder.config.width
        fused = tensors.height(name + "ffn_gate_up_exps.weight")
        if not fused:
            inner = tensors.height(name + "ffn_up_exps.weight")
            up = self.stack(name + "ffn_up_exps", experts, inner, width)
            return self.stack(name + "ffn_gate_exps", experts, inner, width), up
        both = self.stack(name + "ffn_gate_up_exps", experts, fused, width).weight
        scale = self.stack_scale(name + "ffn_up_exps", experts)  # of both
        first, second = (both.rows_of_each(fused, at, at + fused // 2) for at in (0, fused // 2))
        return Stack(first, scale), Stack(second, scale)

    def stack(self, name: str, experts: ExpertConfig, rows: int, columns: int) -> Stack:
        weight = self.builder.tensors.stack(name + ".weight", experts.count, rows, columns)
        bias = self.builder.tensors.optional(name + ".bias", experts.count, rows)
        return Stack(weight, self.stack_scale(name, experts), bias)

    def stack_scale(self, name: str, experts: ExpertConfig) -> Weight | None:
        return self.builder.tensors.optional(name + ".scale", experts.count) if experts.matrix_scales else None
