"""Blocks of conformer encoders: half feed-forwards, gated depthwise convolutions over time, and their runs.

A layer has two stages, because a convolution reads earlier and later frames, which NumPy gathers between the stages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from localllm.models import derived
from localllm.models.encoders.convolutions import depthwise
from localllm.models.encoders.layers import Shape
from localllm.models.encoders.network import Network, table
from localllm.plan import F32, Value
from localllm.plan.runs import Encoding, Layout, Run

Attend = Callable[[Network, Value, Value, str], Value]  # (network, normed rows, waves, layer's name) -> attention


def half_feed_forward(network: Network, x: Value, name: str, suffix: str = "", post_norm: bool = False) -> Value:
    """Return x plus half of a feed-forward block, whose result may have a norm."""
    y = network.norm(x, f"{name}ffn_norm{suffix}")
    y = network.mlp(y, f"{name}ffn_up{suffix}", f"{name}ffn_down{suffix}", "silu")
    if post_norm:
        y = network.norm(y, f"{name}ffn_post_norm{suffix}")
    return network.recorder.add(x, network.recorder.scale(y, 0.5))


def gated(network: Network, x: Value, name: str, channels: int) -> Value:
    """Return the input of a layer's convolution: a product whose second half gates the first."""
    y = network.linear(x, name + "conv_pw1", 2 * channels)
    gate, up = network.recorder.slice(y, channels, 2 * channels), network.recorder.slice(y, 0, channels)
    return network.recorder.glu(gate, up, "sigmoid")


def attended(
    network: Network, shape: Shape, q: Value, terms: Value, k: Value, v: Value, waves: Value, layer: int
) -> tuple[Value, int]:
    """Return attention with terms of distances (relative.py), and the cache layer of its keys and values.

    `layer` is the cache layer of the previous layer of the encoder, whose rows these replace; -1 for the first one.
    """
    recorder, heads = network.recorder, shape.heads
    q = recorder.concat(q, terms, heads)
    k = recorder.concat(k, recorder.mix(waves, 1, network.tensors.ones(heads)), heads)
    if layer < 0:
        layer = recorder.append(k, v, heads)
    else:
        recorder.append_again(k, v, layer)
    return recorder.attention(q, layer, heads, shape.head_dim**-0.5, causal=False), layer


def first_stage(network: Network, x: Value, waves: Value, name: str, attend: Attend) -> None:
    """Record a layer up to the input of the convolution; the results are the rows and this input."""
    recorder, channels = network.recorder, network.tensors.height(f"{name}conv_dw.weight") or 1
    x = half_feed_forward(network, x, name)
    x = recorder.add(x, attend(network, network.norm(x, name + "ln1"), waves, name))
    network.end(x, gated(network, network.norm(x, name + "norm_conv"), name, channels))


def second_stage(network: Network, name: str, width: int) -> Value:
    """Record the rest of a layer, without the end of the stage, and return its result."""
    tensors, recorder = network.tensors, network.recorder
    channels, taps = tensors.height(f"{name}conv_dw.weight") or 1, tensors.width(f"{name}conv_dw.weight") or 1
    x, y = recorder.receive_all({"rows": width, "windows": taps * channels})
    y = _normed(network, depthwise(network, y, name + "conv_dw", channels), name)
    x = recorder.add(x, network.linear(network.activate(y, "silu"), name + "conv_pw2", width))
    return network.norm(half_feed_forward(network, x, name, "_1"), name + "ln2")


def _normed(network: Network, y: Value, name: str) -> Value:
    """Return the batch norm of a convolution; its mean and variance may be part of weight and bias."""
    tensors = network.tensors
    weight, bias = (tensors.vector(f"{name}conv_norm.{of}", y.width) for of in ("weight", "bias"))
    if f"{name}conv_norm_var" in tensors or f"{name}conv_norm_mean" in tensors:
        mean, variance = (
            table(tensors, f"{name}conv_norm_{of}", 1, y.width)[0].astype(np.float64) for of in ("mean", "var")
        )
        scale = derived.values(weight)[0] / np.sqrt(np.maximum(variance, 1e-12))
        shift = derived.values(bias)[0] - mean * scale
        weight = tensors.numbers(f"{name}conv_norm scale", scale.tolist())
        bias = tensors.numbers(f"{name}conv_norm shift", shift.tolist())
    return network.recorder.scale_columns(y, weight, bias=bias)


def layer_runs(part: str, layer: int, x: F32, waves: F32, layouts: tuple[Layout, Layout], taps: int) -> Encoding:
    """Yield the runs of a layer. The first layout is for the attention, the second for the rest."""
    x, y = yield Run(part, (x, waves), layouts[:1], stage=2 * layer)
    wide = np.pad(y, ((taps // 2, taps - 1 - taps // 2), (0, 0)))
    gathered = wide[np.arange(len(y))[:, None] + np.arange(taps)].reshape(len(y), -1)
    (x,) = yield Run(part, (x, gathered), layouts[1:], stage=2 * layer + 1)
    return x
