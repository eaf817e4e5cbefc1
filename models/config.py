"""The shape of a model as plain values; `models.reading` reads it from the keys of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.plan import Activation, Gating, GluActivation, NormKind

Pooling = Literal["none", "mean", "cls", "last", "rank"]  # in GGUF's order, which counts from 0
RopeScaling = Literal["none", "linear", "yarn", "longrope"]  # longrope: linear, with frequency factors


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotation of positions (RoPE, arXiv:2104.09864; YaRN, arXiv:2309.00071); `models.rope` computes the angles."""

    n_rot: int  # rotated dimensions per head, even
    base: float
    scaling: RopeScaling
    factor: float  # context length divided by the trained one
    original_context: int  # the trained context length
    attention_factor: float  # multiplies cosine and sine
    extrapolation: float  # yarn: 1 mixes interpolated and plain angles, 0 interpolates all
    beta_fast: float  # yarn: rotations over the original context above which an angle stays as it is
    beta_slow: float  # yarn: rotations below which an angle is interpolated fully
    multiplier: float  # yarn: mscale of the model's configuration
    log_multiplier: float  # yarn: mscale_all_dim of it
    score_multiplier: float  # yarn: the multiplier whose temperature, squared, scales the scores of latent attention
    temperature: float  # Ministral 3: growth of the queries per e-fold of so many positions:
    temperature_length: int
    sections: bool  # angles also encode positions in a picture; for text, rotate the halves of a head


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """How experts are chosen for a token; `plan.Experts` defines the terms."""

    count: int
    used: int
    gating: Gating
    normalize: bool
    scale: float
    activation: GluActivation
    matrix_scales: bool  # apply `.scale` tensors
    beside: bool  # beside a dense feed-forward
    limits: tuple[float, ...]  # of the unit, by layer; 0: none
    groups: int  # of experts; only those of the best `groups_used` are chosen
    groups_used: int
    biased_gating: Gating  # of layers whose choice has a bias
    adjugate_group: int = 0  # neighbouring experts that share an adjugate expert; 0: there are none
    adjugate_scale: float = 0.0  # of the sum of adjugate experts


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Widths of latent attention; `models.latent` explains it."""

    rank: int  # of the latent row
    plain: int  # of the part of a head's queries and keys that is not rotated
    rotated: int
    value: int  # of a head's values


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """How positions are chosen for attention; `plan.SelectPositions` defines the terms."""

    heads: int
    head_dim: int
    count: int
    block: int
    local: int
    eps: float  # of the norm of keys
    chooses: tuple[int, ...]  # by layer: the layer whose choice it reads, itself or an earlier one; -1: it reads all


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """The sizes of recurrent mixers, which differ in what they use."""

    kernel: int  # rows that a convolution sees
    inner: int  # values of all heads
    state: int  # values of a key
    heads: int  # Mamba-1: rank of the step sizes
    groups: int  # key heads
    norms: bool  # Mamba-1: steps, B and C are normed even where the file has no weights for it
    rescale: int = 0  # RWKV-6: rows are halved after every so many layers; 0: never
    bound: float = 0.0  # Kimi Delta Attention: the least logarithm of a decay, which is negative; 0: none
    sign: float = 1.0  # that makes the file's slopes of such logarithms positive


@dataclass(frozen=True, slots=True)
class CompressionConfig:
    """Compressed rows; `models.compressed` explains them."""

    ratios: tuple[int, ...]  # positions of a pool, by layer; 0: none
    groups: int  # of heads, each with an output matrix of low rank
    rank: int  # of these
    hashed: int  # number of first layers whose experts follow from the token alone


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Hyper-connections; `plan.Connect` defines the terms."""

    streams: int
    eps: float
    magnitude: float
    written_eps: float
    iterations: int  # 0: the streams are not mixed
    rank: int = 0  # of the matrices that make gates of streams; 0: streams have weights


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """Embeddings of n-grams; `plan.EmbedNgrams` defines the terms, and `models.ngrams` explains them."""

    layer: int  # that adds them
    width: int  # of a head
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    firsts: tuple[int, ...]
    end: int
    kernel: int  # rows that the convolution weighs, as many tokens apart as the longest n-gram has

    @property
    def rows(self) -> int:
        """Minimum number of rows of the table."""
        return max(size + first for size, first in zip(self.sizes, self.firsts, strict=True))


@dataclass(frozen=True, slots=True)
class StackConfig:
    """Two stacks of layers that run in turn: so many passes of the low one, then one of the high one, and again.

    A pass has keys and values of its own, so layers are counted over all passes. A file holds the low stack, whose
    blocks count from 0, then the high one.
    """

    layers: int  # of each stack
    low: int  # passes before each pass of the high stack

    def high(self, layer: int) -> bool:
        """Whether the layer is of a pass of the high stack."""
        return layer // self.layers % (self.low + 1) == self.low

    def block(self, layer: int) -> int:
        """The number of the block that holds the layer's tensors."""
        return layer % self.layers + (self.layers if self.high(layer) else 0)


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """All layers run several times, each time with keys and values of their own: layers are counted over all passes."""

    layers: int  # of the file
    normed: bool  # the output's norm stands between two passes, too

    def block(self, layer: int) -> int:
        """The number of the block that holds the layer's tensors."""
        return layer % self.layers


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The decoder of a model whose layers otherwise are an encoder's."""

    layers: int
    start: int  # the token that stands between a text and its answer


@dataclass(frozen=True, slots=True)
class Config:
    """The shape of a transformer; tuples hold one entry per layer."""

    architecture: str
    layers: int
    width: int  # of the residual stream
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]  # width of a query or key head
    value_dim: tuple[int, ...]
    latent: LatentConfig | None
    window_latent: LatentConfig | None  # of the layers with a window
    indexer: IndexerConfig | None
    kv_layer: tuple[int, ...]  # whose keys and values a layer reads: its own, or those of an earlier layer
    ffn_width: tuple[int, ...]
    vocabulary: int
    context_length: int
    eps: float
    rope: RopeConfig
    window_rope: RopeConfig  # of the layers with a window
    rotated: tuple[bool, ...]
    windows: tuple[int, ...]  # number of positions that a row sees; 0: all
    attention_scale: tuple[float, ...]
    norm: NormKind
    alibi: float  # steepness of the fall of scores with the distance; 0: none
    buckets: int  # of distances, each with a number that scores gain; 0: none
    unit_qk_norm: bool  # queries and keys of rotated layers are normed without weights
    limits: tuple[float, ...]  # of dense feed-forwards, by layer; 0: none
    xielu: tuple[tuple[float, float, float, float], ...]  # positive, negative, beta, eps by layer, if it has them
    attention_softcap: float  # 0: none
    value_scale: float
    clamp: float  # bound of queries, keys and values; 0: none
    logit_softcap: float  # 0: none
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    experts: ExpertConfig | None
    norms_follow: bool  # attention and feed-forward, and none come before
    parallel: bool  # attention and feed-forward read the same rows
    streams: int  # of residual rows (AltUp); 0: there is one, without AltUp
    active_stream: int  # that layers compute with
    connections: ConnectionConfig | None
    ngrams: NgramConfig | None
    compression: CompressionConfig | None
    checkpoint_interval: int  # every so many layers rows are kept for later ones to read; 0: never
    cap_ratio: float  # cap of what is gated by that of the gate, in the unit "situ"; elsewhere 1
    sparsity: tuple[float | None, ...]  # deviations above the mean that gates must exceed; None: all count
    per_layer_width: int  # of the slice of per-layer embeddings; 0: there are none
    recurrent: RecurrentConfig | None
    stacks: StackConfig | LoopConfig | None  # layers that run several times
    decoder: DecoderConfig | None  # that follows the layers
    attends: tuple[bool, ...]  # whether the layer has attention
    recurs: tuple[bool, ...]  # whether it has a recurrent mixer
    heads_after: int  # layers of the file after these: each is a next-token head (`models.next_token`)
    causal: bool  # rows see no later ones
    activation: Activation | Literal["xielu"]  # of dense feed-forwards
    pooling: Pooling  # how embeddings of tokens become one of a text
    classifier_pooling: Pooling  # and how they do before a classifier scores it
