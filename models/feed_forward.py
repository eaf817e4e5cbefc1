"""The feed-forward of a layer: dense, or a mixture of experts with or without a shared expert."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from localllm.models.builder import Builder
from localllm.models.config import ExpertConfig
from localllm.plan import Stack, Value, Weight

_SHARED = "_shexp"  # suffix of a shared expert's tensor names


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Maps normed hidden states (T, width) to the feed-forward's output (T, width)."""

    builder: Builder

    def __call__(self, x: Value, layer: int, residual: Value, before: Value) -> Value:
        """Return the feed-forward of x, the normed hidden states of `residual`; `before` is the layer's input."""
        builder, name, experts = self.builder, f"blk.{layer}.", self.builder.config.experts
        if experts is None or name + "ffn_gate_inp.weight" not in builder.tensors:
            return self.dense(layer, x, builder.config.ffn_width[layer], sparsity=builder.config.sparsity[layer])
        if experts.beside:
            return self.both(layer, x, residual, experts)
        routing = builder.row.routing
        assert routing is not None
        read = builder.norm(name + routing.norm, before) if routing.norm else x
        routed = before if routing.router == "unnormed" else read
        router = builder.linear(name + "ffn_gate_inp", routed, experts.count, builder.config.width)  # (T, experts)
        y = self.latent(name, read, lambda low: self.experts(layer, low, router, experts))
        if experts.adjugate_group:
            y = self.with_adjugates(layer, y, read, router, experts)
        suffix = "" if routing.dense else _SHARED
        shared = builder.tensors.height(f"{name}ffn_up{suffix}.weight")
        if not shared:
            return y
        both = builder.recorder.add(y, self.shared(layer, x, shared, suffix))
        return both if routing.sum_scale == 1.0 else builder.recorder.scale(both, routing.sum_scale)

    def latent(self, name: str, x: Value, experts: Callable[[Value], Value]) -> Value:
        """Return the experts' output for x. If the GGUF has latent projections (Nemotron 3 Super, Kimi K3), the experts
        compute in the latent width.
        """
        builder, tensors = self.builder, self.builder.tensors
        kind = next((kind for kind in ("latent", "routed") if f"{name}ffn_{kind}_down.weight" in tensors), "")
        if not kind:
            return experts(x)
        width = tensors.height(f"{name}ffn_{kind}_down.weight")
        low = experts(builder.linear(f"{name}ffn_{kind}_down", x, width, x.width))
        return builder.linear(
            f"{name}ffn_{kind}_up", builder.optional_norm(f"{name}ffn_{kind}_norm", low), x.width, width
        )

    def both(self, layer: int, x: Value, residual: Value, experts: ExpertConfig) -> Value:
        """Return the sum of the outputs of the dense feed-forward and of the experts. Experts and router have separate
        norms of the residual stream.
        """
        builder, name = self.builder, f"blk.{layer}."
        config, recorder, tensors = builder.config, builder.recorder, builder.tensors
        dense = builder.norm(name + "post_ffw_norm_1", self.dense(layer, x, config.ffn_width[layer]))
        own = builder.norm(name + "pre_ffw_norm_2", residual)
        normed = recorder.rms_norm(residual, tensors.vector(name + "ffn_gate_inp.scale", config.width), config.eps)
        weight = tensors.matrix(name + "ffn_gate_inp.weight", experts.count, config.width)
        router = recorder.linear(normed, weight, None, 1.0 / math.sqrt(config.width))  # (T, experts)
        return recorder.add(dense, builder.norm(name + "post_ffw_norm_2", self.experts(layer, own, router, experts)))

    def dense(self, layer: int, x: Value, inner: int, suffix: str = "", sparsity: float | None = None) -> Value:
        """Return the down-projected output of a dense feed-forward with separate, fused or only up matrices."""
        builder, recorder, width = self.builder, self.builder.recorder, self.builder.config.width
        name = f"blk.{layer}."
        up_name = f"{name}ffn_up{suffix}"
        match self.form(layer, suffix, inner):
            case "gated":
                gate = builder.ffn_linear(f"{name}ffn_gate{suffix}", x, inner, width)
                if sparsity is not None:
                    gate = recorder.gaussian_top_k(gate, sparsity)
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
        tensors, name = self.builder.tensors, f"blk.{layer}."
        if suffix == _SHARED and self.builder.row.shared_fused:
            return "fused"
        if self.builder.row.ffn != "found":
            return self.builder.row.ffn
        if f"{name}ffn_gate{suffix}.weight" in tensors:
            return "gated"
        return "plain" if tensors.height(f"{name}ffn_up{suffix}.weight") == inner else "fused"

    def gated(self, gate: Value, up: Value, layer: int) -> Value:
        row, limit = self.builder.row, self.builder.config.limits[layer]
        activation = row.limits if row.limits and limit else row.unit or self.builder.config.activation
        assert activation != "xielu", "gates nothing"
        recorder, ratio = self.builder.recorder, self.builder.config.cap_ratio
        if ratio == 1.0:
            return recorder.glu(gate, up, activation, limit)
        return recorder.scale(recorder.glu(gate, recorder.scale(up, 1.0 / ratio), activation, limit), ratio)

    def activated(self, x: Value, layer: int) -> Value:
        activation, recorder = self.builder.row.ungated or self.builder.config.activation, self.builder.recorder
        if activation == "xielu":
            return recorder.xielu(x, *self.builder.config.xielu[layer])
        return recorder.activate(x, activation)

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
        assert builder.row.routing is not None
        gate, up = self.gate_and_up(name, x.width, experts)
        ratio = builder.config.cap_ratio
        if ratio != 1.0:
            assert up.scale is None, "scaled for the unit alone"
            up = replace(up, scale=tensors.numbers(f"{1 / ratio:.9g}({experts.count})", [1 / ratio] * experts.count))
        bias = tensors.optional(name + "exp_probs_b.bias", experts.count)
        bias = bias or tensors.optional(name + "exp_probs_b", experts.count)  # Hunyuan 3's tensor name
        return recorder.experts(
            x,
            router,
            gate,
            up,
            self.stack(name + "ffn_down_exps", experts, x.width, up.weight.shape[1]),
            experts.used,
            experts.gating if bias is None else experts.biased_gating,
            experts.normalize,
            experts.scale * ratio,
            builder.row.limits if builder.row.limits and limit else experts.activation,
            bias,
            limit,
            builder.row.routing.weighted_input,
            groups=experts.groups,
            groups_used=experts.groups_used,
            choices=self.given(layer, router, experts),
        )

    def given(self, layer: int, router: Value, experts: ExpertConfig) -> Value | None:
        """Return the experts of every token in layers that look them up by token id; None for other layers."""
        recorder, config = self.builder.recorder, self.builder.config
        if config.compression is None or layer >= config.compression.hashed:
            return None
        table = f"blk.{layer}.ffn_gate_tid2eid.weight"
        chosen = recorder.embed(self.builder.tensors.integers(table, config.vocabulary, experts.used, experts.count))
        return recorder.select_rows(chosen) if router.rows == "logits" else chosen

    def with_adjugates(self, layer: int, y: Value, x: Value, router: Value, experts: ExpertConfig) -> Value:
        """Return y plus the sum of the adjugate experts of the selected groups (Grove MoE, arXiv:2508.07785).

        An adjugate expert reads the same input x. It is added once for each selected expert of its group, with that
        expert's routing weight.
        """
        recorder, tensors, name = self.builder.recorder, self.builder.tensors, f"blk.{layer}.ffn_"
        inner, group = tensors.height(f"{name}up_chexps.weight"), experts.adjugate_group
        sizes = {"gate": (inner, x.width), "up": (inner, x.width), "down": (x.width, inner)}
        gate, up, down = (
            Stack(tensors.shared_stack(f"{name}{part}_chexps.weight", experts.count, group, *size), shared=group)
            for part, size in sizes.items()
        )
        own = recorder.experts(
            x, router, gate, up, down, experts.used, experts.gating, experts.normalize, experts.adjugate_scale,
            experts.activation,
        )  # fmt: skip
        return recorder.add(y, own)

    def gate_and_up(self, name: str, width: int, experts: ExpertConfig) -> tuple[Stack, Stack]:
        """Return the stacks of gate and up matrices, from two tensors or from a fused tensor with
        the gate rows first."""
        tensors = self.builder.tensors
        fused = tensors.height(name + "ffn_gate_up_exps.weight")
        if not fused:
            inner = tensors.height(name + "ffn_up_exps.weight")
            up = self.stack(name + "ffn_up_exps", experts, inner, width)
            if self.builder.row.ffn == "plain":  # squared ReLU, or an activation that reads only gate or up
                return up, up
            return self.stack(name + "ffn_gate_exps", experts, inner, width), up
        both = self.stack(name + "ffn_gate_up_exps", experts, fused, width).weight
        scale = self.stack_scale(name + "ffn_up_exps", experts)  # scale of both matrices
        first, second = (both.rows_of_each(fused, at, at + fused // 2) for at in (0, fused // 2))
        return Stack(first, scale), Stack(second, scale)

    def stack(self, name: str, experts: ExpertConfig, rows: int, columns: int) -> Stack:
        weight = self.builder.tensors.stack(name + ".weight", experts.count, rows, columns)
        bias = self.builder.tensors.optional(name + ".bias", experts.count, rows)
        return Stack(weight, self.stack_scale(name, experts), bias)

    def stack_scale(self, name: str, experts: ExpertConfig) -> Weight | None:
        return self.builder.tensors.optional(name + ".scale", experts.count) if experts.matrix_scales else None
