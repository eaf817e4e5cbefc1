"""The layers of Qwen 4: hyper-connections whose gates come from matrices of low rank.

Each part of a layer reads the mean of all streams, normed and gated number by number, so there are no other norms.
Every stream gets the part's result times a weight. The rows that the output reads are such a mean too.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.models.connections import HEAD, ConnectionRecorder, Shares
from localllm.models.ngrams import Ngrams
from localllm.plan import Value


@dataclass(frozen=True, slots=True)
class LowRankRecorder(ConnectionRecorder):
    """Records one layer: rows (T, streams * width) to as many, and the way from one stream to all and back."""

    def end(self, streams: Value) -> Value:
        return self.mean(self.normed(streams, HEAD), HEAD)

    def layer(self, x: Value, layer: int) -> Value:
        if self.ngrams is not None and self.ngrams.own.layer == layer:
            x = self.ngrams.added(x)
        return ConnectionRecorder.layer(self, x, layer)

    @property
    def ngrams(self) -> Ngrams | None:
        own = self.builder.config.ngrams
        return None if own is None else Ngrams(self.builder, own, self.own.streams)

    def shares(self, streams: Value, name: str) -> Shares:
        recorder, tensors, count = self.builder.recorder, self.builder.tensors, self.own.streams
        normed = self.normed(streams, name)
        inject = recorder.linear(
            normed, tensors.matrix(f"{name}_inject.weight", count, streams.width), None, 1.0 / count
        )
        written = recorder.scale(recorder.activate(inject, "sigmoid"), 2.0)
        return Shares(self.mean(normed, name), written, None)

    def mean(self, normed: Value, name: str) -> Value:
        """The mean of the streams, gated number by number."""
        recorder, tensors, own = self.builder.recorder, self.builder.tensors, self.own
        low = recorder.linear(
            normed, tensors.matrix(f"{name}_down.weight", own.rank, normed.width), None, 1.0 / own.streams
        )
        up = tensors.matrix(f"{name}_up.weight", normed.width, own.rank)
        gate = recorder.linear(recorder.activate(low, "silu"), up)
        shares = tensors.numbers(f"mean of {own.streams}", [1.0 / own.streams] * own.streams)
        return recorder.mix(recorder.glu(gate, normed, "sigmoid"), own.streams, shares)

    def normed(self, streams: Value, name: str) -> Value:
        """The norm of every stream, with weights of its own."""
        count = self.own.streams
        weight = self.builder.tensors.streams(f"{name}_norm.weight", count, streams.width // count)
        return self.builder.recorder.rms_norm(streams, weight, self.builder.config.eps, count)
