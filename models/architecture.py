"""The fields of the architecture table: properties that are not in the GGUF, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.plan import Activation, Gating, GluActivation, NormKind, RopeStyle


@dataclass(frozen=True, slots=True)
class ExpertGating:
    """How the router weights a token's experts; `plan.Experts` defines the gatings."""

    gating: Gating
    normalize: bool  # divide the selected weights by their sum
    # Whether metadata keys override the fields. True: they override `gating` and `normalize`, and may set a scale.
    # "gating": they override `gating` only. "scaled": they override `gating` and may set a scale.
    from_file: bool | Literal["gating", "scaled"] = False
    scales: bool = False  # apply `.scale` tensors of expert matrices
    activation: GluActivation = "silu"
    beside: bool = False  # a dense feed-forward runs in parallel with the experts; both have their own norms
    weighted_input: bool = False  # the routing weights multiply the experts' input instead of their output
    router: Literal["", "unnormed"] = ""  # unnormed: the router reads the layer's input without a norm
    # norm tensor between the layer's input and the experts; "": experts read the feed-forward's input
    norm: str = ""
    dense: bool = False  # the layer adds the outputs of a dense feed-forward and of the experts
    sum_scale: float = 1.0  # factor on the sum of the experts and the dense or shared feed-forward
    biased: Gating | None = None  # default gating of layers with a selection bias; None: `gating`
    # each group of experts shares a small adjugate expert, which is added once per selected expert of the group
    adjugate: bool = False


@dataclass(frozen=True, slots=True)
class Sliding:
    """Sliding-window attention in all layers but every `period`-th."""

    period: int  # default if the GGUF has no pattern: layers period - 1, 2 period - 1, ... use full attention
    first: bool = False  # layers 0, period, 2 period, ... use full attention instead
    window: int = 0  # default window size if the GGUF sets none; 0: no sliding-window layers
    stretched: bool = True  # rope scaling also applies to sliding-window layers
    factors: bool = True  # frequency factors also apply to sliding-window layers
    rope_base: float = 0.0  # default rope base of sliding-window layers; 0: same as the other layers
    only_rope: bool = False  # only sliding-window layers use RoPE; full-attention layers do not (NoPE)
    depth: int = 0  # only models with this number of layers use sliding-window attention; 0: all models
    chunked: bool = False  # chunked attention: a window is a chunk of the context
    both_ways: bool = False  # symmetric windows: half before the query, half after it
    half: bool = False  # full-attention layers rotate half of the head dimensions


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Defaults of the metadata keys that scale embeddings, residual branches and logits."""

    logits: Literal["multiplied", "divided"] = "divided"  # whether logits are multiplied or divided by `logit_scale`
    embedding: float = 1.0
    depth: float = 0.0  # the default residual scale is depth / sqrt(layers); 0: 1
    width: int = 0  # the default logit scale is width / model width; 0: `logit`
    logit: float = 0.0  # default logit scale; 0: 1
    from_file: bool = True  # False: the metadata keys are ignored
    switch: bool = False  # `rope.scaling.finetuned = false` disables rotation


Mixer = Literal["short_conv", "delta_net", "kda", "lightning", "mamba", "mamba2", "plamo2", "rwkv6", "rwkv7"]


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers with a recurrent mixer instead of attention; `models.recurrent` and `models.rwkv` describe the mixers."""

    mixer: Mixer
    # Layers with a recurrent mixer. without_heads: layers without KV heads; interval: all but every n-th; beside: all
    # layers, in parallel with attention.
    layers: Literal["without_heads", "interval", "all", "beside"]
    interval: int = 4  # default n of `interval`
    # The key `kda.gate_lower_bound` bounds log decays from below. GGUFs store the slopes of log decays, or the negated
    # slopes.
    bounded: Literal["", "slopes", "negative"] = ""
    unit_eps: float = 0.0  # epsilon of the L2 norm of queries and keys (KDA); 0: `eps`
    alone: bool = False  # each layer has either a mixer or a feed-forward
    channel_mix: bool = False  # the feed-forward is RWKV's channel mix, which reads the previous token too
    gate: GluActivation = "silu"  # activation of a delta net's output gate


@dataclass(frozen=True, slots=True)
class Indexer:
    """Sparse attention: an indexer selects the positions that attention reads (see `models.indexer`)."""

    rope_style: RopeStyle  # rotation of the indexer's queries and keys
    # Layers with an indexer. all: every layer; types: the layers listed in the key `attention.indexer.types`, while the
    # rest reuse the previous selection; full: full-attention layers; routed: layers with experts, which select blocks;
    # ratios: layers with a pool size in the key `attention.compress_ratios`, which select pools by their mean key.
    layers: Literal["all", "types", "full", "routed", "ratios"]
    # epsilon of the key norm; rms, layer: the model's epsilon for that kind of norm
    eps: float | Literal["rms", "layer"] = 1e-6
    trailing: bool = False  # rotate the last dimensions of a head instead of the first
    pooled: bool = False  # select pools of `attention.indexer.kpool` positions, each represented by one key
    compressed: bool = False  # select compressed positions; the GGUF has no key norm
    optional: bool = False  # GGUFs without `attention.indexer.top_k` have no indexer


@dataclass(frozen=True, slots=True)
class Architecture:
    """The properties of one architecture.

    Rope style `interleaved` rotates adjacent dimensions (2i, 2i + 1), `neox` rotates halves (i, i + n_rot/2).
    """

    name: str  # `general.architecture`, and the prefix of the model's metadata keys
    rope_style: RopeStyle | None  # None: no RoPE
    activation: Activation | Literal["xielu"] = "silu"
    no_rope_every: int = 0  # layers n - 1, 2n - 1, ... do not use RoPE (NoPE); 0: all layers use RoPE
    rope_pattern: bool = False  # the key `attention.rope_pattern` defines which layers use RoPE
    qk_norm: bool = False  # q/k norms are required (otherwise they are applied if the GGUF has them)
    ffn_scales: bool = False  # apply `.scale` tensors of feed-forward matrices (as llama.cpp for some models)
    # fused: ffn_up contains gate and up; plain: no gate; found: determined by the tensors in the GGUF
    ffn: Literal["gated", "fused", "plain", "found"] = "gated"
    norm: NormKind = "rms"
    attention_norm: str = "attn_norm"  # norm tensor before attention; "": no norm
    ffn_norm: str = "ffn_norm"  # norm tensor before the feed-forward
    # norm the outputs of attention and feed-forward before the residual add, with the two norms below
    post_norms: bool = False
    attention_post_norm: str = "post_attention_norm"
    ffn_post_norm: str = "post_ffw_norm"
    # the residual add uses the normed input times the residual scale, instead of the input
    normed_residual: bool = False
    sum_norms: bool = False  # post-norm: norm after the residual add instead of before the block, with the norms above
    root_width_embedding: bool = False  # multiply embeddings by sqrt(width)
    # models with this number of layers divide scores by sqrt(width / heads) instead of sqrt(head width)
    wide_scores: int = 0
    attention_softcap: float | None = None  # default cap; None: the key is ignored
    logit_softcap: float | None = None  # default cap; None: the key is ignored
    multipliers: Multipliers | None = None
    attention_scale: bool = False  # read the scale of attention scores from the key `score_scale_key`
    score_scale: float = 0.0  # scale of attention scores; 0: from the fields above, or 1 / sqrt(head width)
    parallel: bool = False  # attention and feed-forward read the same input, and their outputs are added
    norm_weights: bool = True  # False: norms have no weights
    ignored: tuple[str, ...] = ()  # ignored tensors and keys; layer tensors by the name after `blk.N.`
    eps: float = 0.0  # norm epsilon if the GGUF stores 0; 0: the GGUF must set it
    sections: bool = False  # read the key `rope.dimension_sections` (M-RoPE)
    parallel_key: bool = False  # the key `use_parallel_residual` sets `parallel`
    gated: GluActivation | None = None  # activation of the output gate `attn_gate`, per value or per head
    embedding_norm: bool = False  # norm the token embeddings, without weights
    post_norm_eps: float = 0.0  # epsilon of the post-norms; 0: same as the other norms
    head_norm_eps: float = 0.0  # q/k norms are layer norms with this epsilon; 0: like the other norms
    swin: bool = False  # the key `swin_norm` moves the norms after attention and feed-forward
    silent: tuple[int, int] = (0, 0)  # image token ids [first, end), whose logits are masked to -inf
    norms_rotated: bool = False  # q/k norms are applied after rotation
    value_norm: bool = False  # norm the values of each head, without weights
    value_scale: bool = False  # the key `attention.value_scale` multiplies the values
    keys_as_values: bool = False  # a layer without `attn_v` uses the keys before their norm as values
    checkpoints: bool = False  # the key `attn_res.block_size` is the interval of saved layer inputs
    stacks: bool = False  # two stacks of layers alternate, each running several times
    loops: bool = False  # the key `num_loops` is the number of times that all layers run
    # Hyper-connections between several residual streams. independent: streams are not mixed; mixed: streams are mixed
    # with each other; low_rank: streams are gated per value by low-rank matrices, and the layers have no other norms.
    connections: Literal["", "independent", "mixed", "low_rank"] = ""
    ngrams: bool = False  # one layer adds embeddings of the n-grams ending at each token
    altup: bool = False  # AltUp: layers compute several residual streams
    per_layer_inputs: bool = False  # a second embedding table has a slice for every layer
    kv_layers: int | None = None  # default number of layers with their own KV cache; 0: all
    latent: bool = False  # multi-head latent attention (MLA): all heads share one cached latent vector per position
    # YaRN without the key `yarn_log_multiplier` scales scores as if the key were 1, as in llama.cpp
    yarn_scores: bool = False
    compressed: bool = False  # attention reads compressed positions for the distant past
    indexer: Indexer | None = None  # sparse attention: selects the positions that attention reads
    clamp: bool = False  # the key `attention.clamp_kqv` bounds queries, keys and values
    alibi: float | None = None  # default ALiBi bias; None: no ALiBi
    alibi_depth: int = 0  # only models with this number of layers use ALiBi; 0: all
    rope_depth: int = 0  # only models with this number of layers use RoPE; 0: all
    score_scale_key: str = "attention.scale"  # metadata key of the score scale, read if `attention_scale` is set
    scores_by_width: bool = False  # divide scores by the head width instead of its square root
    unit_qk_norm: bool = False  # norm queries and keys without weights, in layers with RoPE
    unit_qk_norm_but: int = 0  # models with this number of experts do not use `unit_qk_norm`
    # (growth, length) of the query temperature in layers without RoPE
    unrotated_temperature: tuple[float, int] | None = None
    embedding_skip: bool = False  # add the token embedding after every layer, times the layer's scale
    unit: GluActivation | None = None  # activation of dense gated feed-forwards; None: `activation`
    limits: GluActivation | None = None  # activation of layers for which the GGUF sets a limit
    limits_of_all: bool = False  # the experts' limits also apply to other feed-forwards without limits
    lead_rotated: bool = False  # leading dense layers use RoPE
    norm_by_eps: bool = False  # use RMS norms if the GGUF has an epsilon for RMS norms
    rms_eps: bool = False  # GGUFs store the epsilon of layer norms under the key of RMS norms
    halves: bool = False  # `feed_forward_length` counts gate and up together
    sliding: Sliding | None = None
    recurrent: Recurrent | None = None
    query_gate: bool = False  # attn_q also contains the output gate of each head, after its query
    output_norm: str = "output_norm"  # "": no norm before the output
    # the output matrix may cover only the last token ids of the vocabulary; the others are never generated
    narrow_output: bool = False
    heads_norm: bool = True  # multi-token-prediction heads read hidden states after the output norm; False: before it
    encoder: bool = False  # bidirectional attention; the model returns embeddings instead of logits
    diffusion: bool = False  # bidirectional attention; the model fills in masked tokens instead of appending
    bare_start: bool = False  # the first layer's attention has no input norm if the GGUF lacks the tensor
    classifier_pooling: Literal["cls", "mean"] = "cls"  # default pooling of encoder classifiers
    distances: bool = False  # T5's relative position bias: `attn_rel_b` contains a score bias per bucket of distances
    stack: Literal["", "enc"] = ""  # prefix of T5's layer tensors: `enc.blk.N`
    # output norm of the decoder of an encoder-decoder model; "": encoder-only or decoder-only
    decoder: str = ""
    ungated: Activation | None = None  # activation of feed-forwards without a gate; None: `activation`
    shared_fused: bool = False  # the shared expert's up matrix contains gate and up
    activation_key: bool = False  # read the activation from the key `hidden_activation`
    routing: ExpertGating | None = None
