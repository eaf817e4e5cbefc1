"""Projectors: what turns the cells of an encoder's output into embeddings of the text model."""

from __future__ import annotations

from collections.abc import Callable

from localllm.models import derived
from localllm.models.encoders.network import Network, Norms, flat
from localllm.plan import Activation, Value, Weight

Head = Callable[[Network, Value], Value]


def linear(name: str) -> Head:
    return lambda network, x: network.linear(x, name)


def mlp(
    first: str, second: str, activation: Activation | None = "gelu", norm: str = "", eps: float = 0.0,
    norms: Norms = "layer",
) -> Head:  # fmt: skip
    """Return two products with an activation between, after a norm; with None, the activation of the layers."""

    def head(network: Network, x: Value) -> Value:
        x = network.norm(x, norm, norms, eps) if norm else x
        return network.mlp(x, first, second, activation)

    return head


def gemma3(network: Network, x: Value) -> Value:
    """Average the cells. The file has the projection as (text width, width), transposed."""
    slices = x.width // max(1, network.tensors.width("mm.soft_emb_norm.weight"))
    x = network.norm(network.mean(x, max(1, slices)), "mm.soft_emb_norm", "rms")
    name = "mm.input_projection.weight"
    stack = network.tensors.transposed(name, 1, x.width, x.width, max(1, network.tensors.width(name)))
    matrix = Weight.of(derived.folded(stack, (stack.shape[1], x.width)))
    return network.recorder.linear(x, matrix)


def gemma4(network: Network, x: Value) -> Value:
    """Average the cells times the root of the width, standardize, and project their RMS norm."""
    width = network.tensors.width("v.blk.0.ln1.weight") or x.width
    x = network.mean(x, x.width // width, width**0.5)
    if "v.std_bias" in network.tensors:
        bias, scale = (derived.values(network.tensors.vector(f"v.std_{of}", width)) for of in ("bias", "scale"))
        weight = network.tensors.numbers("v.std_scale", scale[0].tolist())
        shift = network.tensors.numbers("v.std_shift", (-bias[0] * scale[0]).tolist())
        x = network.recorder.scale_columns(x, weight, bias=shift)
    return network.linear(network.unit(x), "mm.input_projection")


def unit(network: Network, x: Value) -> Value:
    return network.linear(network.unit(x), "mm.input_projection")


def pixtral(network: Network, x: Value) -> Value:
    if "mm.patch_merger.weight" in network.tensors:
        x = network.linear(x, "mm.patch_merger")
    return network.mlp(x, "mm.1", "mm.2", "gelu_erf")


def glm4v(network: Network, x: Value) -> Value:
    rows = network.tensors.width("mm.model.fc.weight") or 1
    merger = flat(network.tensors, "mm.patch_merger.weight", (rows, x.width))
    x = network.recorder.linear(x, merger, network.tensors.optional("mm.patch_merger.bias", rows))
    x = network.activate(network.norm(network.linear(x, "mm.model.fc"), "mm.post_norm", "layer", 1e-5), "gelu_erf")
    return network.gated(x, "mm.gate", "mm.up", "mm.down")


def cogvlm(network: Network, x: Value) -> Value:
    x = network.norm(network.linear(x, "mm.model.fc"), "mm.post_fc_norm", "layer", 1e-5)
    return network.gated(network.activate(x, "gelu"), "mm.gate", "mm.up", "mm.down")


def chain(*names: str, activation: Activation = "gelu") -> Head:
    """Return products with an activation after each but the last."""

    def head(network: Network, x: Value) -> Value:
        for name in names[:-1]:
            x = network.activate(network.linear(x, name), activation)
        return network.linear(x, names[-1])

    return head


def nemotron(network: Network, x: Value) -> Value:
    x = network.norm(x, "mm.model.mlp.0", "rms", 1e-6)
    return network.mlp(x, "mm.model.mlp.1", "mm.model.mlp.3", "relu2")


def llava(network: Network, x: Value) -> Value:
    if "mm.3.weight" not in network.tensors:
        return network.mlp(x, "mm.0", "mm.2", "gelu_erf")
    x = network.activate(network.norm(network.linear(x, "mm.0"), "mm.1", "layer"), "gelu")  # Yi-VL
    return network.norm(network.linear(x, "mm.3"), "mm.4", "layer")


def glm_edge(network: Network, x: Value) -> Value:
    rows = network.tensors.width("adapter.linear.linear.weight") or 1
    bias = flat(network.tensors, "adapter.conv.bias", (rows,))
    x = network.recorder.linear(x, flat(network.tensors, "adapter.conv.weight", (rows, x.width)), bias)
    own = "adapter.linear."
    x = network.activate(network.norm(network.linear(x, own + "linear"), own + "norm1", "layer"), "gelu")
    return network.gated(x, own + "gate", own + "dense_h_to_4h", own + "dense_4h_to_h")


# -- sound -------------------------------------------------------------------------------------------------------------


def ultravox(network: Network, x: Value) -> Value:
    x = network.linear(network.norm(x, "mm.a.norm_pre", "rms", 1e-6), "mm.a.mlp.1")
    half = x.width // 2
    gate, up = network.recorder.slice(x, half, 2 * half), network.recorder.slice(x, 0, half)
    x = network.norm(network.recorder.glu(gate, up, "silu"), "mm.a.norm_mid", "rms", 1e-6)
    return network.linear(x, "mm.a.mlp.2")


def paired(then: Head) -> Head:
    """Average pairs of frames, and normalize the result."""
    return lambda network, x: then(network, network.norm(network.mean(x, 2), "a.post_ln"))


def meralion(network: Network, x: Value) -> Value:
    x = network.activate(network.linear(network.norm(x, "mm.a.norm_pre"), "mm.a.mlp.0"), "silu")
    return network.gated(x, "mm.a.mlp.1", "mm.a.mlp.2", "mm.a.mlp.3")
