"""One layer of the forward: attention and a feed-forward (dense or experts), each added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.models.architectures import Architecture
from localllm.models.config import Config, ExpertConfig
from localllm.models.tensors import Tensors
from localllm.plan import Recorder, Rope, Stack, Value


@dataclass(frozen=True, slots=True)
class Ropes:
    """The rotations of queries and of keys."""

    query: Rope
    key: Rope


@dataclass(frozen=True, slots=True)
class LayerRecorder:
    """Records one layer: T rows to T rows. The last one continues with only the rows whose logits are wanted."""

    config: Config
    architecture: Architecture
    tensors: Tensors
    recorder: Recorder
    full: Ropes
    sliding: Ropes  # of the layers with a window

    def attention(self, x: Value, layer: int) -> Value:
        config, recorder, name = self.config, self.recorder, f"blk.{layer}."
        heads, kv_heads, window = config.heads[layer], config.kv_heads[layer], config.windows[layer]
        width = heads * config.head_dim
        q, k, v = self.projections(name, self.input_norm(name, self.architecture.attention_norm, x), layer)
        q = self.head_norm(name + "attn_q_norm", q, heads)
        k = self.head_norm(name + "attn_k_norm", k, kv_heads)
        if config.rotated[layer]:
            ropes = self.sliding if window else self.full
            q = recorder.rotate(q, config.head_dim, ropes.query)
            k = recorder.rotate(k, config.head_dim, ropes.key)
        recorder.append(layer, k, v, kv_heads)
        sinks = self.tensors.optional(name + "attn_sinks.weight", heads)
        mixed = recorder.attention(
            q, layer, heads, config.attention_scale, window, config.attention_softcap, sinks
        )  # (T, heads * head_dim)
        if layer == config.layers - 1:  # no later operation reads other rows; they skip the last feed-forward
            mixed, x = recorder.select_rows(mixed), recorder.select_rows(x)
        y = self.linear(name + "attn_output", mixed, config.width, width)
        return self.residual(x, y, name + "post_attention_norm")

    def projections(self, name: str, x: Value, layer: int) -> tuple[Value, Value, Value]:
        """Record queries, keys and values: from three matrices, or from one that holds the rows of all three."""
        config = self.config
        q = config.heads[layer] * config.head_dim
        kv = config.kv_heads[layer] * config.head_dim
        if name + "attn_qkv.weight" not in self.tensors:
            return (
                self.linear(name + "attn_q", x, q, config.width),
                self.linear(name + "attn_k", x, kv, config.width),
                self.linear(name + "attn_v", x, kv, config.width),
            )
        name, of, scale = name + "attn_qkv", q + 2 * kv, self.scale(name + "attn_qkv")
        return (
            self.rows(name, x, 0, q, of, scale),
            self.rows(name, x, q, q + kv, of, scale),
            self.rows(name, x, q + kv, of, of, scale),
        )

    def feed_forward(self, x: Value, layer: int) -> Value:
        name = f"blk.{layer}."
        normed = self.input_norm(name, self.architecture.ffn_norm, x)
        experts = self.config.experts
        if experts is not None and name + "ffn_gate_inp.weight" in self.tensors:
            y = self.experts(name, normed, experts)
        else:
            y = self.dense(name, normed, self.config.ffn_width[layer])
        return self.residual(x, y, name + "post_ffw_norm")

    def dense(self, name: str, x: Value, inner: int, suffix: str = "") -> Value:
        """Record down times the hidden rows (T, inner) of gate and up, which are two matrices, one, or only up."""
        width, activation, up_name = self.config.width, self.architecture.activation, f"{name}ffn_up{suffix}"
        match self.architecture.ffn:
            case "gated":
                gate = self.ffn_linear(f"{name}ffn_gate{suffix}", x, inner, width)
                hidden = self.recorder.glu(gate, self.ffn_linear(up_name, x, inner, width), activation)
            case "fused":
                gate = self.rows(up_name, x, 0, inner, 2 * inner)
                up = self.rows(up_name, x, inner, 2 * inner, 2 * inner)
                hidden = self.recorder.glu(gate, up, activation)
            case "plain":
                hidden = self.recorder.activate(self.ffn_linear(up_name, x, inner, width), activation)
        return self.ffn_linear(f"{name}ffn_down{suffix}", hidden, width, inner)

    def experts(self, name: str, x: Value, experts: ExpertConfig) -> Value:
        """Record the chosen experts, plus the shared expert if the file has one."""
        config, recorder = self.config, self.recorder
        inner = self.tensors.height(name + "ffn_up_exps.weight")
        up = self.stack(name + "ffn_up_exps", experts, inner, config.width)
        router = self.linear(name + "ffn_gate_inp", x, experts.count, config.width)  # (T, experts)
        y = recorder.experts(
            x,
            router,
            self.stack(name + "ffn_gate_exps", experts, inner, config.width),
            up,
            self.stack(name + "ffn_down_exps", experts, config.width, inner),
            experts.used,
            experts.gating,
            experts.normalize,
            experts.scale,
            experts.activation,
            self.tensors.optional(name + "exp_probs_b.bias", experts.count),
        )
        shared = self.tensors.height(name + "ffn_up_shexp.weight")
        if not shared:
            return y
        z = self.dense(name, x, shared, "_shexp")
        if name + "ffn_gate_inp_shexp.weight" in self.tensors:
            gate = self.tensors.row(name + "ffn_gate_inp_shexp.weight", config.width)
            z = recorder.glu(recorder.linear(x, gate), z, "sigmoid")
        return recorder.add(y, z)

    def stack(self, name: str, experts: ExpertConfig, rows: int, columns: int) -> Stack:
        weight = self.tensors.stack(name + ".weight", experts.count, rows, columns)
        scale = self.tensors.optional(name + ".scale", experts.count) if experts.matrix_scales else None
        return Stack(weight, scale, self.tensors.optional(name + ".bias", experts.count, rows))

    def residual(self, x: Value, y: Value, norm: str) -> Value:
        """Record x + y; the architecture may norm or scale y first."""
        if self.architecture.post_norms:
            y = self.norm(norm, y)
        if self.config.residual_scale != 1.0:
            y = self.recorder.scale(y, self.config.residual_scale)
        return self.recorder.add(x, y)

    def input_norm(self, layer: str, name: str, x: Value) -> Value:
        return self.norm(layer + name, x) if name else x

    def norm(self, name: str, x: Value) -> Value:
        weight = self.tensors.vector(name + ".weight", self.config.width)
        if self.architecture.norm == "rms":
            return self.recorder.rms_norm(x, weight, self.config.eps)
        bias = self.tensors.optional(name + ".bias", self.config.width)
        return self.recorder.layer_norm(x, weight, bias, self.config.eps)

    def head_norm(self, name: str, x: Value, heads: int) -> Value:
        """Norm each head, with shared or separate weights, or all heads as one row, by the shape of the weights."""
        name, head_dim, eps = name + ".weight", self.config.head_dim, self.config.eps
        if not self.architecture.qk_norm and name not in self.tensors:
            return x
        weight = self.tensors.either(name, (head_dim,), (heads * head_dim,), (heads, head_dim))
        groups = 1 if tuple(weight.shape) == (heads * head_dim,) else heads
        if self.architecture.norm == "rms":
            return self.recorder.rms_norm(x, weight, eps, groups)
        return self.recorder.layer_norm(x, weight, None, eps, groups)

    def linear(self, name: str, x: Value, rows: int, columns: int) -> Value:
        """Record (x @ weight.T) * scale + bias: the scale belongs to the matrix, as in NVFP4 files."""
        weight = self.tensors.matrix(name + ".weight", rows, columns)
        return self.recorder.linear(x, weight, self.tensors.optional(name + ".bias", rows), self.scale(name))

    def rows(self, name: str, x: Value, start: int, stop: int, of: int, scale: float = 1.0) -> Value:
        """Record `linear` for rows start..stop of a matrix (of, width)."""
        weight = self.tensors.rows(name + ".weight", start, stop, of, self.config.width)
        bias = self.tensors.optional_part(name + ".bias", start, stop, of)
        return self.recorder.linear(x, weight, bias, scale)

    def ffn_linear(self, name: str, x: Value, rows: int, columns: int) -> Value:
        """Record (x @ weight.T + bias) * scale: llama.cpp's feed-forward scales after the bias."""
        weight = self.tensors.matrix(name + ".weight", rows, columns)
        bias = self.tensors.optional(name + ".bias", rows)
        scale = self.scale(name) if self.architecture.ffn_scales else 1.0
        if bias is None or scale == 1.0:
            return self.recorder.linear(x, weight, bias, scale)
        return self.recorder.scale(self.recorder.linear(x, weight, bias), scale)

    def scale(self, name: str) -> float:
        scale = self.tensors.optional_numbers(name + ".scale", 1)
        return 1.0 if scale is None else float(scale[0])
