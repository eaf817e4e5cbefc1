"""Embeddings of n-grams (Qwen 4): a layer adds table rows for the last two, three, ... tokens up to each position.

Hashes of token ids select the rows of the table (`plan.EmbedNgrams`). A value projected from them is added to every
residual stream, gated by the agreement of a key (also projected from them) with the stream; a convolution adds the
values of earlier rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from localllm.models.builder import Builder
from localllm.models.config import NgramConfig
from localllm.models.errors import ModelError
from localllm.plan import Value

TABLE = "per_layer_token_embd.weight"


@dataclass(frozen=True, slots=True)
class Ngrams:
    """Records the lookup and the layer's addition to the streams (T, streams * width)."""

    builder: Builder
    own: NgramConfig
    streams: int

    def embedded(self) -> Value:
        """Return the rows of the table, (T, heads * width of one head)."""
        tensors, own = self.builder.tensors, self.own
        count = tensors.height(TABLE)
        if 0 < count < own.rows:
            raise ModelError(f"{TABLE}: expected at least {own.rows} rows for the hashes of n-grams, found {count}")
        table = tensors.matrix(TABLE, count or own.rows, own.width)
        return self.builder.recorder.embed_ngrams(table, own.multipliers, own.sizes, own.firsts, own.end)

    def added(self, streams: Value) -> Value:
        """Return the streams plus the n-gram values."""
        embedded = self.embedded()
        builder, recorder, name = self.builder, self.builder.recorder, f"blk.{self.own.layer}.ple_"
        key = builder.product(name + "key", embedded, streams.width)
        value = builder.product(name + "value", embedded, builder.config.width)
        key, query = self.normed(name + "norm_key", key), self.normed(name + "norm_query", streams)
        gate = recorder.activate(self.summed(recorder.glu(key, query, "identity")), "signed_root")
        gated = recorder.mix(value, 1, recorder.activate(gate, "sigmoid"))
        kernel = builder.tensors.dilated(
            name + "conv1d.weight", streams.width, self.own.kernel, len(self.own.multipliers)
        )
        mixed = recorder.activate(recorder.convolve(self.normed(name + "norm_conv", gated), kernel), "silu")
        return recorder.add(streams, recorder.add(gated, mixed))

    def normed(self, name: str, x: Value) -> Value:
        """Norm every stream with its own weights."""
        weight = self.builder.tensors.streams(f"{name}.weight", self.streams, x.width // self.streams)
        return self.builder.recorder.rms_norm(x, weight, self.builder.config.eps, self.streams)

    def summed(self, x: Value) -> Value:
        """Return the sum of each stream's numbers divided by the square root of their count, (T, streams)."""
        width = x.width // self.streams
        ones = self.builder.tensors.constant_stack("sums", [1.0 / math.sqrt(width)] * width, self.streams)
        return self.builder.recorder.head_linear(x, ones)
