"""DeepSeek 2, and DeepSeek 4, whose attention caches recent positions one by one, and distant ones by pool.

All heads share one vector per position, which serves as key and value. A layer attends to the positions of a sliding
window and to the compressed entries of its pools (`plan.Pool`): to all entries, or, with small pools, to the entries
that an indexer selects. The vectors are rotated although they also serve as values, so the head outputs are rotated
back. The output matrix is low-rank, with one factor per group of heads. The first layers look up a token's experts by
its token id.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localllm.models.architecture import Architecture, Attention, FeedForward
from localllm.models.config import Config, ExpertConfig
from localllm.models.connections import ConnectionRecorder, read_connections
from localllm.models.errors import ModelError
from localllm.models.properties import Indexer, Properties, Sliding
from localllm.models.reading import Keys, read_general
from localllm.models.reading.bounds import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH
from localllm.models.reading.feed_forward import with_limits_of_experts
from localllm.models.routing import FILE_SOFTMAX, ExpertGating
from localllm.plan import Rope, Value

OVERLAPPING = 4  # the ratio whose pools overlap and are selected by an indexer
RATIOS = (0, OVERLAPPING, 128)


@dataclass(frozen=True, slots=True)
class CompressionConfig:
    """The properties of DeepSeek 4."""

    ratios: tuple[int, ...]  # positions per pool, per layer; 0: no pools
    groups: int  # groups of heads, each with its own low-rank output matrix
    rank: int  # rank of the output matrices
    hashed: int  # number of leading layers that look up a token's experts by its token id


def _read_2(keys: Keys, row: Properties, head: int) -> Config:
    """Read DeepSeek 2; GGUFs of GLM 4.7 Flash, whose gating is "sigmoid", may lack the gating key."""
    config = read_general(keys, row, head)
    if config.experts is None or keys.integer("expert_gating_func", 0, 4, default=0):
        return config
    return replace(config, experts=replace(config.experts, biased_gating="sigmoid"))


def _read_4(keys: Keys, row: Properties, head: int) -> Config:
    config = read_general(with_limits_of_experts(keys), row, head)
    base = keys.real("attention.compress_rope_freq_base", 1.001, 1e30)
    rope = replace(config.rope, base=base, attention_factor=1.0, multiplier=0.0, log_multiplier=0.0)
    indexer = config.indexer and replace(config.indexer, block=OVERLAPPING)
    connections, own = read_connections(keys, mixed=True), _read_compression(keys, config)
    return replace(config, rope=rope, indexer=indexer, connections=connections, own=own)


def _read_compression(keys: Keys, config: Config) -> CompressionConfig:
    key, layers = "attention.compress_ratios", config.layers
    ratios = keys.per_layer(key, layers, 0, MAX_CONTEXT, longer=True)
    for layer, ratio in enumerate(ratios):
        if ratio not in RATIOS:
            raise ModelError(f"{keys.prefix}{key}: supported are 0, 4 and 128, found {ratio} (layer {layer})")
    groups = keys.integer("attention.output_group_count", 1, MAX_HEADS)
    for layer, (of_layer, shared) in enumerate(zip(config.heads, config.kv_heads, strict=True)):
        if of_layer % groups:
            key = "attention.output_group_count"
            raise ModelError(f"{keys.prefix}{key}: expected a divisor of {of_layer}, found {groups} (layer {layer})")
        if shared != 1:
            raise ModelError(f"{keys.prefix}attention.head_count_kv: expected 1, found {shared} (layer {layer})")
    if not all(config.windows):
        raise ModelError(f"{keys.prefix}attention.sliding_window: expected a window for every layer, found 0")
    head_dim, value_dim, rotated = config.head_dim[0], config.value_dim[0], config.rope.n_rot
    if value_dim != head_dim:
        key = "attention.value_length"
        raise ModelError(f"{keys.prefix}{key}: expected {head_dim}, the width of a key, found {value_dim}")
    if rotated > head_dim:
        raise ModelError(f"{keys.prefix}rope.dimension_count: expected at most {head_dim}, found {rotated}")
    keys.integer("attention.indexer.key_length", rotated, MAX_HEAD_DIM)
    return CompressionConfig(
        ratios, groups, keys.integer("attention.output_lora_rank", 2, MAX_WIDTH),
        keys.integer("hash_layer_count", 0, layers, default=0),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompressedAttention(Attention):
    """Maps normed hidden states (T, width) to head outputs (T, heads * head_dim), and head outputs to (T, width)."""

    def mixed(self, x: Value, layer: int) -> Value:
        builder, name = self.builder, f"blk.{layer}.attn_"
        config, recorder, tensors, ratio = builder.config, builder.recorder, builder.tensors, self.own.ratios[layer]
        heads, size = config.heads[layer], config.head_dim[layer]
        rope = self.rope(layer)
        rank = tensors.height(name + "q_a.weight")
        narrow = builder.norm(name + "q_a_norm", builder.linear(name + "q_a", x, rank, x.width))
        q = builder.linear(name + "q_b", narrow, heads * size, rank)
        q = self.builder.rotate_last(builder.unit(q, heads), size, rope)
        row = builder.norm(name + "kv_a_norm", builder.linear(name + "kv", x, size, x.width))
        row = self.builder.rotate_last(row, size, rope)
        near = recorder.append(row, row, 1, prefix=True)
        far = selection = None
        if ratio:
            pooled = self.pooled(name + "compressor", x, size, ratio, rope)
            far = recorder.append(pooled, pooled, 1, ratio, prefix=True)
        if ratio == OVERLAPPING:
            selection = self.selection(f"blk.{layer}.indexer", x, narrow, rope)
        sinks = tensors.vector(name + "sinks.weight", heads)
        seen = recorder.attention(
            q, near, heads, config.attention_scale[layer], config.windows[layer], sinks=sinks, selection=selection,
            pools=far,
        )  # fmt: skip
        back = replace(rope, inverse_frequency=tuple([-f for f in rope.inverse_frequency]))
        return self.builder.rotate_last(seen, size, back)

    def output(self, mixed: Value, layer: int) -> Value:
        builder, name, groups, rank = self.builder, f"blk.{layer}.attn_output_", self.own.groups, self.own.rank
        shape = (groups, rank, mixed.width // groups)
        weight = builder.tensors.either(name + "a.weight", shape, (groups * rank, shape[2]))
        low = builder.recorder.head_linear(mixed, replace(weight, shape=shape))
        return builder.linear(name + "b", low, builder.config.width, groups * rank)

    @property
    def own(self) -> CompressionConfig:
        return self.builder.own(CompressionConfig)

    def rope(self, layer: int) -> Rope:
        rope = (self.full if self.own.ratios[layer] else self.sliding).key
        assert rope is not None
        return rope

    def pooled(self, name: str, x: Value, size: int, ratio: int, rope: Rope) -> Value:
        """Return compressed entries (T, size), valid where a pool ends, rotated to the pool's first position."""
        builder, parts = self.builder, 2 if ratio == OVERLAPPING else 1
        values, scores = (builder.linear(f"{name}_{part}", x, parts * size, x.width) for part in ("kv", "gate"))
        bias = builder.tensors.matrix(f"{name}_ape.weight", ratio, parts * size)
        pooled = builder.norm(f"{name}_norm", builder.recorder.pool(values, scores, bias, parts))
        return self.builder.rotate_last(pooled, size, replace(rope, shift=1 - ratio))

    def selection(self, name: str, x: Value, narrow: Value, rope: Rope) -> Value | None:
        """Return the pools that each token reads, or None for all."""
        builder, own = self.builder, self.config.indexer
        assert own is not None
        assert self.selector is not None
        if own.count * own.block >= self.selector.context:
            return None
        recorder = builder.recorder
        q = builder.linear(f"{name}.attn_q_b", narrow, own.heads * own.head_dim, narrow.width)
        k = self.pooled(f"{name}_compressor", x, own.head_dim, own.block, rope)
        weights = self.selector.weights(f"{name}.", x)
        q = self.builder.rotate_last(q, own.head_dim, rope)
        return recorder.indexer_top_k(
            q, weights, recorder.append_index(k, own.block), own.heads, own.count, own.block, pooled=True
        )


class HashedFeedForward(FeedForward):
    """Looks up the experts of every token by its id in the first layers."""

    def choices(self, layer: int, router: Value, experts: ExpertConfig) -> Value | None:
        if layer >= self.builder.own(CompressionConfig).hashed:
            return None
        table = f"blk.{layer}.ffn_gate_tid2eid.weight"
        chosen = self.recorder.embed(self.tensors.integers(table, self.config.vocabulary, experts.used, experts.count))
        return self.recorder.select_rows(chosen) if router.rows == "logits" else chosen


ROWS = (
    # DeepSeek V2, V3 and R1, Kimi K2, GLM 4.7 Flash
    Architecture("deepseek2", "interleaved", read=_read_2, cache="latent", yarn_scores=True, routing=FILE_SOFTMAX),
    Architecture(
        "deepseek4", "interleaved", read=_read_4, layers=ConnectionRecorder, attention=CompressedAttention,
        feed_forward=HashedFeedForward, ignored=("exp_probs_b_vl.bias",), cache="shared", limits="swiglu_clamp",
        sliding=Sliding(0, stretched=False), indexer=Indexer("interleaved", "all"),
        routing=ExpertGating("sqrt_softplus", False, from_file=True),
    ),
)  # fmt: skip
