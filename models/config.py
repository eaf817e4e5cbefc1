"""The configuration of a model as plain values; `models.reading` reads it from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.plan import Activation, Gating, GluActivation, NormKind

Pooling = Literal["none", "mean", "cls", "last", "rank"]  # in the order of GGUF's pooling types, which start at 0
RopeScaling = Literal["none", "linear", "yarn", "longrope"]  # longrope: linear, with frequency factors


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (RoPE, arXiv:2104.09864; YaRN, arXiv:2309.00071); `models.rope` computes the angles."""

    n_rot: int  # rotated dimensions per head, even
    base: float
    scaling: RopeScaling
    factor: float  # context length divided by the trained context length
    original_context: int  # trained context length
    attention_factor: float  # factor on cosine and sine
    extrapolation: float  # yarn: 1 mixes interpolated and original angles, 0 interpolates all
    beta_fast: float  # yarn: pairs with more rotations over the original context keep their angle
    beta_slow: float  # yarn: pairs with fewer rotations are fully interpolated
    multiplier: float  # yarn: mscale in the Hugging Face config
    log_multiplier: float  # yarn: mscale_all_dim in the Hugging Face config
    score_multiplier: float  # yarn: multiplier of the temperature whose square scales the scores of latent attention
    temperature: float  # Ministral 3: queries are scaled by 1 + temperature * log(1 + position // temperature_length)
    temperature_length: int
    sections: bool  # M-RoPE: angles also encode image positions; for text, it rotates halves of a head


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """How experts are selected for a token; `plan.Experts` defines the terms."""

    count: int
    used: int
    gating: Gating
    normalize: bool
    scale: float
    activation: GluActivation
    matrix_scales: bool  # apply `.scale` tensors
    beside: bool  # experts run in parallel with a dense feed-forward
    limits: tuple[float, ...]  # activation limits per layer; 0: no limit
    groups: int  # number of expert groups; experts are selected from the best `groups_used` groups
    groups_used: int
    biased_gating: Gating  # gating of layers with a selection bias
    adjugate_group: int = 0  # number of consecutive experts that share an adjugate expert; 0: no adjugates
    adjugate_scale: float = 0.0  # factor on the sum of adjugate experts


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The dimensions of latent attention; `models.latent` explains it."""

    rank: int  # width of the latent vector
    plain: int  # unrotated width of a query or key head
    rotated: int
    value: int  # width of a value head


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """How positions are selected for sparse attention; `plan.IndexerTopK` defines the terms."""

    heads: int
    head_dim: int
    count: int
    block: int
    local: int
    eps: float  # epsilon of the key norm
    # per layer, the layer whose selection it uses (itself or an earlier one); -1: dense attention
    chooses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """The dimensions of recurrent mixers; each kind uses some of them."""

    kernel: int  # convolution taps
    inner: int  # total width of all heads
    state: int  # width of a key
    heads: int  # number of heads; Mamba-1: rank of the step sizes
    groups: int  # key heads
    norms: bool  # Mamba-1: norm steps, B and C even if the GGUF has no weights for these norms
    rescale: int = 0  # RWKV-6: hidden states are halved after every `rescale` layers; 0: never
    bound: float = 0.0  # Kimi Delta Attention: lower bound of log decays, negative; 0: no bound
    sign: float = 1.0  # factor that makes the stored slopes of log decays positive


@dataclass(frozen=True, slots=True)
class CompressionConfig:
    """Compressed attention; `models.compressed` explains it."""

    ratios: tuple[int, ...]  # positions per pool, per layer; 0: no pools
    groups: int  # groups of heads, each with its own low-rank output matrix
    rank: int  # rank of the output matrices
    hashed: int  # number of leading layers that look up a token's experts by its token id


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Hyper-connections; `plan.HyperConnection` defines the terms."""

    streams: int
    eps: float
    magnitude: float
    written_eps: float
    iterations: int  # 0: the streams are not mixed
    rank: int = 0  # rank of the matrices that gate the streams; 0: streams are weighted instead


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """N-gram embeddings; `plan.EmbedNgrams` defines the terms, and `models.ngrams` explains them."""

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


@dataclass(frozen=True, slots=True)
class StackConfig:
    """Two alternating stacks of layers: `low` passes of the low stack, then one pass of the high stack, repeatedly.

    Each pass has its own KV cache, so layers are counted over all passes. The GGUF contains the blocks of the low
    stack, numbered from 0, then the blocks of the high stack.
    """

    layers: int  # layers per stack
    low: int  # passes of the low stack before each pass of the high stack

    def high(self, layer: int) -> bool:
        """Return whether the layer belongs to a pass of the high stack."""
        return layer // self.layers % (self.low + 1) == self.low

    def block(self, layer: int) -> int:
        """Return the block number of the layer's tensors."""
        return layer % self.layers + (self.layers if self.high(layer) else 0)


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """All layers run several times, each time with their own KV cache; layers are counted over all passes."""

    layers: int  # number of layers in the GGUF
    normed: bool  # the output norm is also applied between passes

    def block(self, layer: int) -> int:
        """Return the block number of the layer's tensors."""
        return layer % self.layers


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The decoder of an encoder-decoder model."""

    layers: int
    start: int  # decoder start token


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of a transformer; tuples have one entry per layer."""

    architecture: str
    layers: int
    width: int  # width of the residual stream
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]  # width of a query or key head
    value_dim: tuple[int, ...]
    latent: LatentConfig | None
    window_latent: LatentConfig | None  # widths in sliding-window layers
    indexer: IndexerConfig | None
    kv_layer: tuple[int, ...]  # per layer, the layer whose KV cache it reads: itself or an earlier one
    ffn_width: tuple[int, ...]
    vocabulary: int
    context_length: int
    eps: float
    rope: RopeConfig
    window_rope: RopeConfig  # rotation in sliding-window layers
    rotated: tuple[bool, ...]
    windows: tuple[int, ...]  # window size per layer; 0: full attention
    attention_scale: tuple[float, ...]
    norm: NormKind
    alibi: float  # maximum ALiBi bias; 0: no ALiBi
    buckets: int  # buckets of the relative position bias; 0: no bias
    unit_qk_norm: bool  # norm queries and keys without weights, in layers with RoPE
    limits: tuple[float, ...]  # activation limits of dense feed-forwards per layer; 0: no limit
    # (positive, negative, beta, eps) per layer; empty for other activations
    xielu: tuple[tuple[float, float, float, float], ...]
    attention_softcap: float  # 0: no cap
    value_scale: float
    clamp: float  # bound of queries, keys and values; 0: no bound
    logit_softcap: float  # 0: no cap
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    experts: ExpertConfig | None
    norms_follow: bool  # post-norm: norms follow attention and feed-forward instead of preceding them
    parallel: bool  # attention and feed-forward read the same input
    streams: int  # AltUp streams; 0: no AltUp
    active_stream: int  # index of the AltUp stream that layers compute
    connections: ConnectionConfig | None
    ngrams: NgramConfig | None
    compression: CompressionConfig | None
    checkpoint_interval: int  # interval of layers at which the layer input is saved for later layers; 0: never
    cap_ratio: float  # activation "situ": cap of up divided by cap of gate; otherwise 1
    # standard deviations above the mean that active gates must exceed; None: all gates are active
    sparsity: tuple[float | None, ...]
    per_layer_width: int  # width of a layer's slice of the per-layer embeddings; 0: no such embeddings
    recurrent: RecurrentConfig | None
    stacks: StackConfig | LoopConfig | None  # layers that run several times
    decoder: DecoderConfig | None  # decoder of an encoder-decoder model
    attends: tuple[bool, ...]  # whether the layer has attention
    recurs: tuple[bool, ...]  # whether the layer has a recurrent mixer
    nextn_layers: int  # number of multi-token-prediction heads, the last layers in the GGUF (`models.next_token`)
    causal: bool  # causal attention
    activation: Activation | Literal["xielu"]  # activation of dense feed-forwards
    pooling: Pooling  # how the hidden states of a text are combined into one embedding
    classifier_pooling: Pooling  # pooling before the classifier
