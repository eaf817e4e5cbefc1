"""The configuration of a model as plain values; `models.reading` reads it from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    # M-RoPE: number of pairs that turn by each axis of an image position; () without. For text, it rotates halves of a
    # head.
    sections: tuple[int, ...]


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
    limits: tuple[float, ...]  # activation limits per layer; 0: no limit
    groups: int  # number of expert groups; experts are selected from the best `groups_used` groups
    groups_used: int
    biased_gating: Gating  # gating of layers with a selection bias


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
    eps: float  # epsilon of the key norm
    # per layer, the layer whose selection it uses (itself or an earlier one); -1: dense attention
    chooses: tuple[int, ...]
    block: int = 1
    local: int = 0


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """The dimensions of recurrent mixers; each kind uses some of them."""

    kernel: int  # convolution taps
    inner: int  # total width of all heads
    state: int  # width of a key
    heads: int  # number of heads; Mamba-1: rank of the step sizes
    groups: int  # key heads
    norms: bool  # Mamba-1: norm steps, B and C even if the GGUF has no weights for these norms
    bound: float = 0.0  # Kimi Delta Attention: lower bound of log decays, negative; 0: no bound
    sign: float = 1.0  # factor that makes the stored slopes of log decays positive
    unit_eps: float = 0.0  # epsilon of the L2 norm of queries and keys (KDA); 0: `eps`
    gate: GluActivation = "silu"  # activation of a delta net's output gate


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
class DecoderConfig:
    """The decoder of an encoder-decoder model."""

    layers: int
    start: int  # decoder start token


@dataclass(frozen=True, slots=True)
class MediaInput:
    """The embeddings of media tokens: rows of `streams` slices as wide as the model.

    The first slice replaces the token's embedding, the others are added behind the first layers (deepstack), or before
    those that the GGUF lists. `span` is the largest number of tokens of a picture whose tokens see each other, in the
    layers that `Properties.spans` names; 0: pictures are causal. `reserved` are the bytes of the encoders, which the KV
    cache of a server leaves free.
    """

    streams: int = 1
    span: int = 0
    reserved: int = field(default=0, compare=False)


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
    limits: tuple[float, ...]  # activation limits of dense feed-forwards per layer; 0: no limit
    clamp: float  # bound of queries, keys and values; 0: no bound
    logit_softcap: float  # 0: no cap
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    experts: ExpertConfig | None
    parallel: bool  # attention and feed-forward read the same input
    recurrent: RecurrentConfig | None
    attends: tuple[bool, ...]  # whether the layer has attention
    recurs: tuple[bool, ...]  # whether the layer has a recurrent mixer
    nextn_layers: int  # number of multi-token-prediction heads, the last layers in the GGUF (`models.next_token`)
    causal: bool  # causal attention
    activation: Activation | GluActivation | Literal["xielu"]  # activation of dense feed-forwards
    pooling: Pooling  # how the hidden states of a text are combined into one embedding
    classifier_pooling: Pooling  # pooling before the classifier
    indexer: IndexerConfig | None = None
    connections: ConnectionConfig | None = None
    attention_softcap: float = 0.0  # 0: no cap
    decoder: DecoderConfig | None = None  # decoder of an encoder-decoder model
    unit_qk_norm: bool = False  # norm queries and keys without weights, in layers with RoPE
    deepstack: tuple[int, ...] = ()  # stream of media embeddings added before each layer, -1: none; (): the usual ones
    own: object = None  # what the family has read; `Builder.own` returns it with its type
