"""Qwen 4: hyper-connections whose gates come from low-rank matrices, n-gram embeddings, and pools by their mean key.

Each block reads the mean of all streams, normed and gated per value, which replaces all other norms. The output of the
block is added to every stream with a weight. The output matrix also reads such a mean.

One layer adds embeddings of the last two, three, ... tokens up to each position. Hashes of token ids select the rows of
the embedding table (`plan.EmbedNgrams`). A value projected from the embeddings is added to every residual stream, gated
by the agreement of the stream with a key, which is also projected from the embeddings. A convolution adds the values of
earlier positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from localllm.models.architecture import Architecture
from localllm.models.config import Config, ConnectionConfig, IndexerConfig
from localllm.models.connections import HEAD, ConnectionRecorder, Shares, read_streams
from localllm.models.errors import ModelError
from localllm.models.families.qwen import GatedAttention
from localllm.models.indexer import NormedSelector
from localllm.models.properties import Indexer, Properties, Recurrent
from localllm.models.reading import Keys, read_general
from localllm.models.reading.bounds import MAX_WIDTH
from localllm.models.reading.indexer import read_chooser, with_pools
from localllm.models.routing import SCALED_SOFTMAX
from localllm.plan import BLOCK, Rope, Value

TABLE = "per_layer_token_embd.weight"
_MAX_TOKENS = 8  # maximum tokens per n-gram; known models have 3
_MAX_HEADS = 64  # maximum heads per order; known models have 8. Kernels store one value per head
_MAX_KERNEL = 64  # maximum convolution taps; known models have 4
_MAX_ROWS = 1 << 31  # maximum table rows; known models have 320 million


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """N-gram embeddings; `plan.EmbedNgrams` defines the terms."""

    layer: int  # the layer that adds the embeddings
    width: int  # width of one head
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    firsts: tuple[int, ...]
    end: int
    kernel: int  # convolution taps, spaced by the length of the longest n-gram

    @property
    def rows(self) -> int:
        """The minimum number of rows of the table."""
        return max(size + first for size, first in zip(self.sizes, self.firsts, strict=True))


def _read(keys: Keys, row: Properties, head: int) -> Config:
    config = read_general(keys, row, head)
    assert config.recurrent is not None
    streams = read_streams(keys)
    if streams < 2:
        raise ModelError(f"{keys.prefix}hyper_connection.count: expected at least 2 streams, found {streams}")
    rank = keys.integer("hyper_connection.low_rank", 1, MAX_WIDTH)
    return replace(
        config,
        indexer=_read_pools(keys, row, config.attends),
        recurrent=replace(config.recurrent, gate="sigmoid"),
        connections=ConnectionConfig(streams, 0.0, 0.0, 0.0, 0, rank),
        own=_read_ngrams(keys, config.vocabulary, config.recurs),
    )


def _read_pools(keys: Keys, row: Properties, attends: tuple[bool, ...]) -> IndexerConfig | None:
    """Read the indexer of layers with attention and a pool size; None if no layer has one."""
    key = "attention.compress_ratios"
    ratios = keys.per_layer(key, len(attends), 0, BLOCK)
    sizes = {ratio for ratio, sees in zip(ratios, attends, strict=True) if sees and ratio}
    if not sizes:
        return None
    if len(sizes) > 1:
        raise ModelError(f"{keys.prefix}{key}: expected one size of pools for all layers, found {sorted(sizes)}")
    assert row.indexer is not None
    own = tuple([sees and ratio > 0 for ratio, sees in zip(ratios, attends, strict=True)])
    return with_pools(keys, read_chooser(keys, row.indexer, own), key, sizes.pop())


def _read_ngrams(keys: Keys, vocabulary: int, recurs: tuple[bool, ...]) -> NgramConfig | None:
    """Read the n-gram config; None if the GGUF lacks the keys. `recurs` marks the recurrent layers."""
    layers = keys.metadata.get(keys.prefix + "ple.layers")
    if layers is None or (hasattr(layers, "__len__") and not len(layers)):
        return None
    (layer,) = keys.integers("ple.layers", 1, 0, len(recurs) - 1)
    if not recurs[layer]:
        raise ModelError(f"{keys.prefix}ple.layers: expected a layer with linear attention, found layer {layer}")
    tokens = keys.integer("ple.ngram_size", 2, _MAX_TOKENS)
    heads = keys.integer("ple.heads_per_ngram", 1, _MAX_HEADS) * (tokens - 1)
    sizes = keys.integers("ple.head_vocab_sizes", heads, 1, _MAX_ROWS)
    firsts = keys.integers("ple.head_offsets", heads, 0, _MAX_ROWS)
    largest = (1 << 63) // vocabulary - 1  # keeps products with token ids below 2^63
    return NgramConfig(
        layer=layer,
        width=keys.integer("embedding_length_per_layer_input", 1, MAX_WIDTH // heads),
        multipliers=keys.integers("ple.layer_multipliers", tokens, 0, largest),
        sizes=sizes,
        firsts=firsts,
        end=keys.integer("ple.eos_token_id", 0, vocabulary - 1),
        kernel=keys.integer("ple.conv_kernel", 1, _MAX_KERNEL),
    )


@dataclass(frozen=True, slots=True)
class LowRankRecorder(ConnectionRecorder):
    """Records a layer on hidden states (T, streams * width), and the conversion from one stream to all and back."""

    def end(self, streams: Value) -> Value:
        return self.mean(self.normed(streams, f"{HEAD}_norm"), HEAD)

    def layer(self, x: Value, layer: int) -> Value:
        own = self.config.own
        if isinstance(own, NgramConfig) and own.layer == layer:
            x = self.with_ngrams(x, own)
        return ConnectionRecorder.layer(self, x, layer)

    def shares(self, streams: Value, name: str) -> Shares:
        recorder, tensors, count = self.recorder, self.tensors, self.own.streams
        normed = self.normed(streams, f"{name}_norm")
        inject = recorder.linear(
            normed, tensors.matrix(f"{name}_inject.weight", count, streams.width), None, 1.0 / count
        )
        written = recorder.scale(recorder.activate(inject, "sigmoid"), 2.0)
        return Shares(self.mean(normed, name), written, None)

    def mean(self, normed: Value, name: str) -> Value:
        """Return the mean of the streams, gated per value."""
        recorder, tensors, own = self.recorder, self.tensors, self.own
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
        weight = self.tensors.streams(f"{name}.weight", count, streams.width // count)
        return self.recorder.rms_norm(streams, weight, self.config.eps, count)

    def with_ngrams(self, streams: Value, own: NgramConfig) -> Value:
        """Return the streams plus the gated n-gram values."""
        builder, recorder, name = self.builder, self.recorder, f"blk.{own.layer}.ple_"
        count = builder.tensors.height(TABLE)
        if 0 < count < own.rows:
            raise ModelError(f"{TABLE}: expected at least {own.rows} rows for the hashes of n-grams, found {count}")
        table = builder.tensors.matrix(TABLE, count or own.rows, own.width)
        # (T, heads * head width)
        embedded = recorder.embed_ngrams(table, own.multipliers, own.sizes, own.firsts, own.end)
        key = builder.product(name + "key", embedded, streams.width)
        value = builder.product(name + "value", embedded, builder.config.width)
        key, query = self.normed(key, name + "norm_key"), self.normed(streams, name + "norm_query")
        gate = recorder.activate(self.summed(recorder.glu(key, query, "identity")), "signed_root")
        gated = recorder.mix(value, 1, recorder.activate(gate, "sigmoid"))
        kernel = builder.tensors.dilated(name + "conv1d.weight", streams.width, own.kernel, len(own.multipliers))
        seen = recorder.convolve(self.normed(gated, name + "norm_conv"), kernel)
        return recorder.add(streams, recorder.add(gated, recorder.activate(seen, "silu")))

    def summed(self, x: Value) -> Value:
        """Return the sum of each stream's values divided by the square root of their count, (T, streams)."""
        count = self.own.streams
        width = x.width // count
        ones = self.tensors.constant_stack("sums", [1.0 / math.sqrt(width)] * width, count)
        return self.recorder.head_linear(x, ones)


class MeanSelector(NormedSelector):
    """Selects pools of positions by their mean key, rotated to the pool's first position."""

    pooled = True

    def recorded(self, name: str, x: Value, narrow: Value, rope: Rope | None) -> Value:
        own, recorder, tensors = self.own, self.recorder, self.tensors
        q = self.placed(name + "q", self.projected(name + "q", x, own.heads), rope)
        k = self.projected(name + "k", x, 1)
        same = tensors.constant_rows("no scores", [0.0] * own.head_dim, own.block)
        # a pool's key is cached at its last position
        first = None if rope is None else replace(rope, shift=1 - own.block)
        k = self.placed(name + "k", recorder.pool(k, recorder.scale(k, 0.0), same), first)
        share = tensors.constant_rows("weight of a head", [1.0 / math.sqrt(own.head_dim)] * own.heads, 1)
        weights = recorder.embed(share, positions=True)  # positions past the table's end read its last row
        return recorder.indexer_top_k(
            q, weights, recorder.append_index(k, self.every), own.heads, own.count, own.block, pooled=True
        )


ROWS = (
    Architecture(  # Qwen 4 Experimental
        "qwen4exp", "neox", read=_read, layers=LowRankRecorder, attention=GatedAttention, selector=MeanSelector,
        heads_verified=False, ffn_scales=True, ignored=tuple([f"attn_{which}.bias" for which in "qkv"]), qk_norm=True,
        attention_norm="", ffn_norm="", output_norm="", indexer=Indexer("neox", "own"),
        recurrent=Recurrent("delta_net", "interval"), routing=SCALED_SOFTMAX,
    ),
)  # fmt: skip
