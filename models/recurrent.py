"""Recurrent mixers, which replace attention in a layer or run in parallel with it; their state has a fixed size.

A mixer consists of causal convolutions, and of linear attention or a selective scan (`plan.recurrence`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from localllm.models.builder import Part
from localllm.models.config import RecurrentConfig
from localllm.models.properties import Mixer
from localllm.plan import Value, Weight

L2_EPS = 1e-6  # epsilon under the square root in the L2 norms of a delta net's queries and keys

OUTPUTS: dict[Mixer, str] = {
    "short_conv": "shortconv.out_proj",
    "kda": "attn_output",
    "lightning": "attn_output",
}  # other mixers use ssm_out


@dataclass(frozen=True, slots=True)
class Recurrence(Part):
    """Maps normed hidden states (T, width) to the mixer's output (T, inner), and the output to (T, width)."""

    def mixed(self, x: Value, layer: int) -> Value:
        sizes = self.config.recurrent
        assert sizes is not None
        return self.mix(Parts(self.builder, sizes, layer), x)

    def mix(self, parts: Parts, x: Value) -> Value:
        """Return the output of one layer's mixer."""
        recurrent = self.builder.row.recurrent
        assert recurrent is not None
        return MIXERS[recurrent.mixer](parts, x)

    def output(self, mixed: Value, layer: int) -> Value:
        recurrent = self.builder.row.recurrent
        assert recurrent is not None
        width, prefix = self.config.width, f"blk.{layer}."
        name = OUTPUTS.get(recurrent.mixer, "ssm_out")
        if name == "attn_output":
            return self.builder.product(prefix + name, mixed, width)
        return self.builder.linear(prefix + name, mixed, width, mixed.width)


@dataclass(frozen=True, slots=True)
class Parts(Part):
    """Records the parts of one layer's mixer; names are tensor names after `blk.N.`."""

    sizes: RecurrentConfig
    layer: int

    @property
    def prefix(self) -> str:
        return f"blk.{self.layer}."

    def has(self, name: str) -> bool:
        return f"{self.prefix}{name}.weight" in self.tensors

    def linear(self, name: str, x: Value, rows: int) -> Value:
        return self.builder.linear(self.prefix + name, x, rows, x.width)

    def weights(self, name: str, columns: int, sizes: tuple[int, ...], groups: int = 1) -> list[Weight]:
        """Split a matrix into parts with `sizes` rows each; the pattern of parts repeats `groups` times."""
        weight = self.tensors.matrix(f"{self.prefix}{name}.weight", groups * sum(sizes), columns)
        if groups == 1:
            return [weight.part(*ends) for ends in _ranges(sizes)]
        return [weight.rows_of_each(sum(sizes), *ends) for ends in _ranges(sizes)]

    def rows(self, name: str, x: Value, sizes: tuple[int, ...], groups: int = 1) -> list[Value]:
        """Return the products of x with the parts of a matrix."""
        recorder, scale = self.recorder, self.builder.scale(self.prefix + name)
        return [recorder.linear(x, part, None, scale) for part in self.weights(name, x.width, sizes, groups)]

    def convolved(self, name: str, parts: list[Value]) -> list[Value]:
        """Convolve every part with its channels of one kernel; the channels follow the order of the parts."""
        builder, width = self.builder, sum(part.width for part in parts)
        weight, found = builder.tensors.folded(f"{self.prefix}{name}.weight", width, self.sizes.kernel), []
        for part, ends in zip(parts, _ranges([part.width for part in parts]), strict=True):
            bias = builder.tensors.optional_part(f"{self.prefix}{name}.bias", *ends, width)
            found.append(builder.recorder.convolve(part, weight.part(*ends), bias))
        return found

    def active(self, values: list[Value]) -> list[Value]:
        return [self.recorder.activate(value, "silu") for value in values]

    def steps(self, x: Value, weight: Weight, scale: float = 1.0) -> Value:
        """Return the step sizes, one per head: softplus((x @ weight.T) * scale + bias)."""
        bias = self.tensors.vector(f"{self.prefix}ssm_dt.bias", weight.shape[0])
        return self.recorder.activate(self.recorder.linear(x, weight, bias, scale), "softplus")

    def vector(self, name: str, width: int) -> Weight:
        """Return one value per head; some GGUFs store the vector as a column."""
        return self.tensors.column(self.prefix + name, width)

    def norm(self, name: str, x: Value, groups: int) -> Value:
        name, width = f"{self.prefix}{name}.weight", x.width // groups
        weight = self.tensors.either(name, (width,), (groups, width))
        return self.recorder.rms_norm(x, weight, self.config.eps, groups)

    def unit(self, x: Value, groups: int, scale: float, eps: float = L2_EPS) -> Value:
        """Return each of `groups` slices divided by its L2 norm, times `scale`."""
        width = x.width // groups
        factor = scale * width**-0.5
        weight = self.tensors.numbers(f"{factor:.9g}({width})", [factor] * width)
        return self.recorder.rms_norm(x, weight, eps / width, groups)

    def bare(self, names: str, x: Value, rows: int, bias: Weight | None = None) -> Value:
        """Return the product of x with a matrix, or with its two low-rank factors if the GGUF
        contains these instead."""
        first, *second = names.split()
        if not second or not self.has(second[0]):
            return self.builder.product(self.prefix + first, x, rows, bias)
        rank = self.tensors.height(f"{self.prefix}{first}.weight")
        return self.builder.product(self.prefix + second[0], self.bare(first, x, rank), rows, bias)


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive parts with these sizes."""
    return list(pairwise(accumulate(sizes, initial=0)))


def short_conv(parts: Parts, x: Value) -> Value:
    """The short convolution of LFM2, gated before and after."""
    recorder, width = parts.recorder, parts.config.width
    before, after, inner = parts.rows("shortconv.in_proj", x, (width,) * 3)
    (mixed,) = parts.convolved("shortconv.conv", [recorder.glu(before, inner, "identity")])
    return recorder.glu(after, mixed, "identity")


def delta_net(parts: Parts, x: Value) -> Value:
    """The gated delta rule of Qwen3-Next and 3.5, on convolved queries, keys and values."""
    recorder, sizes = parts.recorder, parts.sizes
    heads, groups, dim = sizes.heads, sizes.groups, sizes.inner // sizes.heads
    each, keys = heads // groups, groups * sizes.state
    if parts.has("attn_qkv"):
        q, k, v = parts.rows("attn_qkv", x, (keys, keys, sizes.inner))
        z = parts.linear("attn_gate", x, sizes.inner)
    else:  # older GGUFs of Qwen3-Next interleave the rows by key head
        q, k, v, z = parts.rows("ssm_in", x, (sizes.state, sizes.state, each * dim, each * dim), groups)
    paired = parts.has("ssm_ba")
    if paired:
        beta, alpha = parts.weights("ssm_ba", x.width, (each, each), groups)
    else:
        (beta,), (alpha,) = (parts.weights(name, x.width, (heads,)) for name in ("ssm_beta", "ssm_alpha"))
    scales = [parts.builder.scale(parts.prefix + name) for name in ("ssm_beta", "ssm_alpha")]
    q, k, v = parts.active(parts.convolved("ssm_conv1d", [q, k, v]))
    q, k = parts.unit(q, groups, sizes.state**-0.5), parts.unit(k, groups, 1.0)
    strength = recorder.activate(recorder.linear(x, beta, None, scales[0]), "sigmoid")
    steps, rate = parts.steps(x, alpha, scales[1]), parts.vector("ssm_a", heads)
    seen = recorder.linear_attention(q, k, v, steps, strength, rate, groups, delta=True, tiled=not paired)
    return recorder.glu(z, parts.norm("ssm_norm", seen, heads), sizes.gate)


def kda(parts: Parts, x: Value) -> Value:
    """Kimi Delta Attention (arXiv:2510.26692): the delta rule with a decay per channel."""
    builder, recorder, sizes = parts.builder, parts.recorder, parts.sizes
    heads, inner, eps = sizes.heads, sizes.inner, sizes.unit_eps or builder.config.eps
    q, k, v = [
        parts.active(parts.convolved(f"ssm_conv1d_{name}", [parts.bare(f"attn_{name}", x, inner)]))[0] for name in "qkv"
    ]
    q, k = parts.unit(q, heads, sizes.state**-0.5, eps), parts.unit(k, heads, 1.0, eps)
    bias = builder.tensors.vector(f"{parts.prefix}ssm_dt.bias", inner)
    steps, rate = _channel_steps(parts, parts.bare("ssm_f_a ssm_f_b", x, inner, bias))
    strength = recorder.activate(parts.bare("ssm_beta", x, heads), "sigmoid")
    seen = recorder.linear_attention(q, k, v, steps, strength, rate, heads, delta=True)
    gate = parts.bare("ssm_g" if parts.has("ssm_g") else "ssm_g_a ssm_g_b", x, inner)
    return recorder.glu(gate, parts.norm("ssm_norm", seen, heads), "sigmoid")


def _channel_steps(parts: Parts, x: Value) -> tuple[Value, Weight]:
    """Return the step of each channel and the decay rate of each head; with bounded log decays, the
    bound is the rate."""
    recorder, sizes, tensors = parts.recorder, parts.sizes, parts.tensors
    if sizes.bound:
        slopes = tensors.repeated(parts.prefix + "ssm_a", sizes.heads, sizes.state, sizes.sign)
        steps = recorder.activate(recorder.scale_columns(x, slopes, sizes.heads), "sigmoid")
        return steps, tensors.numbers(f"{sizes.bound:.9g}({sizes.heads})", [sizes.bound] * sizes.heads)
    return recorder.activate(x, "softplus"), parts.vector("ssm_a", sizes.heads)


def mamba2(parts: Parts, x: Value) -> Value:
    recorder, sizes = parts.recorder, parts.sizes
    shared = sizes.groups * sizes.state
    weights = parts.weights("ssm_in", x.width, (sizes.inner, sizes.inner, shared, shared, sizes.heads))
    scale = parts.builder.scale(f"{parts.prefix}ssm_in")
    z, inner, b, c = (recorder.linear(x, weight, None, scale) for weight in weights[:4])
    inner, b, c = parts.active(parts.convolved("ssm_conv1d", [inner, b, c]))
    seen = scanned(parts, inner, b, c, parts.steps(x, weights[4], scale), sizes.groups)
    gated = recorder.glu(z, seen, "silu")
    return parts.norm("ssm_norm", gated, sizes.groups) if parts.has("ssm_norm") else gated


def scanned(parts: Parts, inner: Value, b: Value, c: Value, steps: Value, groups: int) -> Value:
    heads, recorder = steps.width, parts.recorder
    rate, skip = parts.vector("ssm_a", heads), parts.vector("ssm_d", heads)
    return recorder.linear_attention(c, b, inner, steps, steps, rate, groups, skip=skip)


def mamba(parts: Parts, x: Value) -> Value:
    """The mixer of Mamba-1; Jamba and Falcon Mamba also norm steps, B and C."""
    builder, recorder, sizes = parts.builder, parts.recorder, parts.sizes
    inner, z = parts.rows("ssm_in", x, (sizes.inner, sizes.inner))
    (inner,) = parts.active(parts.convolved("ssm_conv1d", [inner]))
    dt, b, c = parts.rows("ssm_x", inner, (sizes.heads, sizes.state, sizes.state))
    if sizes.norms or parts.has("ssm_dt_norm"):
        dt, b, c = (_normed(parts, f"ssm_{n}_norm", v) for n, v in (("dt", dt), ("b", b), ("c", c)))
    weight = builder.tensors.matrix(f"{parts.prefix}ssm_dt.weight", sizes.inner, sizes.heads)
    steps = parts.steps(dt, weight)
    a = builder.tensors.matrix(f"{parts.prefix}ssm_a", sizes.inner, sizes.state)
    seen = recorder.selective_scan(inner, steps, b, c, a, parts.vector("ssm_d", sizes.inner))
    return recorder.glu(z, seen, "silu")


def _normed(parts: Parts, name: str, x: Value) -> Value:
    """Norm x; the weights are optional."""
    return parts.builder.norm(parts.prefix + name, x) if parts.has(name) else parts.builder.unit(x)


MIXERS: dict[Mixer, Callable[[Parts, Value], Value]] = {
    "short_conv": short_conv,
    "delta_net": delta_net,
    "kda": kda,
    "mamba": mamba,
    "mamba2": mamba2,
}
