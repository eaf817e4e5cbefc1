"""Layers with hyper-connections (arXiv:2409.19606): several residual streams instead of one.

Each block reads a weighted sum of the streams, and its output is added to every stream with a weight. The streams may
also be mixed by a matrix whose rows and columns sum to about 1 (mHC, arXiv:2512.24880). All these weights are computed
from the streams (`plan.HyperConnection`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from localllm.models.config import ConnectionConfig
from localllm.models.layers import LayerRecorder
from localllm.models.reading.bounds import MAX_FACTOR
from localllm.models.reading.keys import Keys
from localllm.plan import Value
from localllm.plan.connections import hyper_connection_width

HEAD = "output_hc"
_MAX_STREAMS = 8  # maximum streams that kernels are compiled for; known models have 4
_MAX_ITERATIONS = 1000  # known models have 20


def read_streams(keys: Keys) -> int:
    """Return the number of residual streams."""
    return keys.integer("hyper_connection.count", 1, _MAX_STREAMS)


def read_connections(keys: Keys, mixed: bool) -> ConnectionConfig:
    """Read the keys of streams that are `mixed` with each other, or of independent ones."""
    streams, eps = read_streams(keys), keys.real("hyper_connection.epsilon", 0.0, 1.0)
    if not mixed:
        return ConnectionConfig(streams, eps, keys.real("hyper_connection.magnitude", 0.0, MAX_FACTOR), eps, 0)
    iterations = keys.integer("hyper_connection.sinkhorn_iterations", 0, _MAX_ITERATIONS)
    return ConnectionConfig(streams, eps, 2.0, 0.0, max(1, iterations))  # the first iteration always runs


class Shares(NamedTuple):
    """The input of a block, and the coefficients that add its output to the streams."""

    read: Value  # (T, width)
    written: Value  # (T, streams)
    mixed: Value | None  # (T, streams * streams); None: the streams are not mixed


@dataclass(frozen=True, slots=True)
class ConnectionRecorder(LayerRecorder):
    """Records a layer on hidden states (T, streams * width), and the conversion from one stream to all and back."""

    def begin(self, x: Value) -> Value:
        """Return the streams, all equal to x."""
        count = self.own.streams
        return self.recorder.mix(x, 1, self.tensors.numbers(f"ones({count})", [1.0] * count))

    def end(self, streams: Value) -> Value:
        """Return a weighted sum of the streams, or their mean if the GGUF has no weights for the sum."""
        recorder, tensors, count = self.recorder, self.tensors, self.own.streams
        if f"{HEAD}_fn.weight" in tensors:
            return recorder.mix(streams, count, self.coefficients(streams, HEAD, 1))
        return recorder.mix(streams, count, tensors.numbers(f"mean of {count}", [1.0 / count] * count))

    def hidden(self, streams: Value) -> Value | None:
        """Return all streams."""
        return streams

    def layer(self, x: Value, layer: int) -> Value:
        builder, recorder, name = self.builder, self.recorder, f"blk.{layer}."
        shares = self.shares(x, name + "hc_attn")
        (mixer,) = self.mixers(layer)
        mixed = mixer.mixed(self.input_norm(name + builder.row.attention_norm, shares.read), layer)
        if self.selects(layer):
            mixed, x = recorder.select_rows(mixed), recorder.select_rows(x)
            shares = self.wanted(shares)
        x = self.written(x, mixer.output(mixed, layer), shares)
        shares = self.shares(x, name + "hc_ffn")
        read = self.input_norm(name + builder.row.ffn_norm, shares.read)
        return self.written(x, self.feed_forward(read, layer, shares.read, shares.read), shares)

    @property
    def own(self) -> ConnectionConfig:
        own = self.config.connections
        assert own is not None, "not a model with hyper-connections"
        return own

    def shares(self, streams: Value, name: str) -> Shares:
        recorder, count = self.recorder, self.own.streams
        both = self.coefficients(streams, name, 3 if self.own.iterations else 2)
        read, written = (recorder.slice(both, part * count, (part + 1) * count) for part in range(2))
        mixed = recorder.slice(both, 2 * count, both.width) if self.own.iterations else None
        return Shares(recorder.mix(streams, count, read), written, mixed)

    def wanted(self, shares: Shares) -> Shares:
        """Return the coefficients for the tokens whose logits are requested; `read` is no longer needed."""
        select = self.recorder.select_rows
        mixed = None if shares.mixed is None else select(shares.mixed)
        return shares._replace(written=select(shares.written), mixed=mixed)

    def written(self, streams: Value, y: Value, shares: Shares) -> Value:
        """Return the streams after a block with output y."""
        base = streams if shares.mixed is None else self.recorder.mix(streams, self.own.streams, shares.mixed)
        return self.recorder.mix(y, 1, shares.written, base)

    def coefficients(self, streams: Value, name: str, parts: int) -> Value:
        recorder, tensors, own = self.recorder, self.tensors, self.own
        width = hyper_connection_width(own.streams, parts)
        made = recorder.linear(self.builder.unit(streams), tensors.matrix(f"{name}_fn.weight", width, streams.width))
        scale, bias = tensors.vector(f"{name}_scale.weight", parts), tensors.vector(f"{name}_base.weight", width)
        return recorder.hyper_connection(
            made, own.streams, scale, bias, own.eps, own.magnitude, own.written_eps, own.iterations
        )  # fmt: skip
