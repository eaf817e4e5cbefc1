"""N-gram embeddings (Qwen 4): a layer adds embeddings of the last two, three, ... tokens up to each position.

Hashes of token ids select the rows of the embedding table (`plan.EmbedNgrams`). A value projected from the embeddings
is added to every residual stream, gated by the agreement of the stream with a key, which is also projected from the
embeddings. A convolution adds the values of earlier positions.
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
    """Records the lookup, and the addition to the residual streams (T, streams * width)."""

    builder: Builder
    own: NgramConfig
    streams: int

    def embedded(self) -> Value:
        """Return the n-gram embeddings, (T, heads * head width)."""
        tensors, own = self.builder.tensors, self.own
        count = tensors.height(TABLE)
        if 0 < count < own.rows:
            raise ModelError(f"{TABLE}: expected at least {own.rows} rows for the hashes of n-grams, found {count}")
        table = tensors.matrix(TABLE, count or own.rows, own.width)
        return self.builder.recorder.embed_ngrams(table, own.multipliers, own.sizes, own.firsts, own.end)

    def added(self, streams: Value) -> Value:
        """Return the streams plus the gated n-gram values."""
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
        """Return the sum of each stream's values divided by the square root of their count, (T, streams)."""
        width = x.width // self.streams
        ones = self.builder.tensors.constant_stack("sums", [1.0 / math.sqrt(width)] * width, self.streams)
        return self.builder.recorder.head_linear(x, ones)
