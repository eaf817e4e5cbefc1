"""The layers of Qwen 4: hyper-connections whose gates come from low-rank matrices.

Each block reads the mean of all streams, normed and gated per value, which replaces all other norms. The output of the
block is added to every stream with a weight. The output matrix also reads such a mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.models.connections import HEAD, ConnectionRecorder, Shares
from localllm.models.ngrams import Ngrams
from localllm.plan import Value


@dataclass(frozen=True, slots=True)
class LowRankRecorder(ConnectionRecorder):
    """Records a layer on hidden states (T, streams * width), and the conversion from one stream to all and back."""

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
        """Return the mean of the streams, gated per value."""
        recorder, tensors, own = self.builder.recorder, self.builder.tensors, self.own
        low = recorder.linear(
            normed, tensors.matrix(f"{name}_down.weight", own.rank, normed.width), None, 1.0 / own.streams
        )
        up = tensors.matrix(f"{name}_up.weight", normed.width, own.rank)
        gate = recorder.linear(recorder.activate(low, "silu"), up)
        shares = tensors.numbers(f"mean of {own.streams}", [1.0 / own.streams] * own.streams)
        return recorder.mix(recorder.glu(gate, normed, "sigmoid"), own.streams, shares)

    def normed(self, streams: Value, name: str) -> Value:
        """Norm every stream with its own weights."""
        count = self.own.streams
        weight = self.builder.tensors.streams(f"{name}_norm.weight", count, streams.width // count)
        return self.builder.recorder.rms_norm(streams, weight, self.builder.config.eps, count)
