"""Columns of the table of architectures: properties that a model file does not hold, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.plan import Activation, Gating, GluActivation, NormKind, RopeStyle


@dataclass(frozen=True, slots=True)
class ExpertGating:
    """How a token's experts are weighted; `plan.Experts` defines the gatings."""

    gating: Gating
    normalize: bool  # divide the selected weights by their sum
    # True: keys of the file override `gating` and `normalize`, and may set a scale. "gating": they override `gating`
    # only.
    # "scaled": they override `gating` and may set a scale.
    from_file: bool | Literal["gating", "scaled"] = False
    scales: bool = False  # apply the `.scale` tensors of the expert matrices
    activation: GluActivation = "silu"
    beside: bool = False  # a dense feed-forward runs in parallel with the experts, each with its own norms
    weighted_input: bool = False  # the weights multiply the input of the experts instead of their output
    router: Literal["", "unnormed"] = ""  # unnormed: the router reads the layer's input without a norm
    # norm tensor that turns the layer's input into the experts' input; "": experts read the feed-forward's input
    norm: str = ""
    dense: bool = False  # the layer adds the outputs of a dense feed-forward and of the experts
    sum_scale: float = 1.0  # factor of the sum of the experts and the dense or shared feed-forward
    biased: Gating | None = None  # gating of layers with a selection bias if the file does not name one; None: `gating`
    # each group of experts shares a small adjugate expert, which runs once for every selected expert of the group
    adjugate: bool = False


@dataclass(frozen=True, slots=True)
class Sliding:
    """Sliding-window attention in all layers but every `period`-th."""

    period: int  # default if the file has no pattern: layers period - 1, 2 period - 1, ... use full attention
    first: bool = False  # layers 0, period, 2 period, ... use full attention instead
    window: int = 0  # default if the file does not set it; 0: no sliding layers
    stretched: bool = True  # rope scaling also applies to sliding layers
    factors: bool = True  # frequency factors also apply to sliding layers
    rope_base: float = 0.0  # default rope base of sliding layers; 0: same as the others
    only_rope: bool = False  # full-attention layers are not rotated
    depth: int = 0  # only models with this number of layers use windows; 0: all models
    chunked: bool = False  # a window is a chunk of the context instead
    both_ways: bool = False  # windows are centred on the row: half before it, half after it
    half: bool = False  # full-attention layers rotate half of the dimensions


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Defaults of the keys that scale embeddings, residual branches and logits."""

    logits: Literal["multiplied", "divided"] = "divided"  # what `logit_scale` does to the logits
    embedding: float = 1.0
    depth: float = 0.0  # default residual scale is depth / sqrt(layers); 0: 1
    width: int = 0  # default logit scale is width / model width; 0: `logit`
    logit: float = 0.0  # default logit scale; 0: 1
    from_file: bool = True  # False: the keys are ignored
    switch: bool = False  # `rope.scaling.finetuned = false` disables rotation


Mixer = Literal["short_conv", "delta_net", "kda", "lightning", "mamba", "mamba2", "plamo2", "rwkv6", "rwkv7"]


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers with a recurrent mixer instead of attention; `models.recurrent` and `models.rwkv` describe the mixers."""

    mixer: Mixer
    # layers with the mixer. without_heads: those with no KV heads; interval: all but every n-th; beside: all, in
    # parallel
    # with attention
    layers: Literal["without_heads", "interval", "all", "beside"]
    interval: int = 4  # default n of `interval`
    # The key `kda.gate_lower_bound` is a lower bound on log decays. The file holds their slopes, or the slopes negated.
    bounded: Literal["", "slopes", "negative"] = ""
    unit_eps: float = 0.0  # epsilon in the L2 norm of queries and keys (KDA); 0: `eps`
    alone: bool = False  # a layer has either a mixer or a feed-forward
    channel_mix: bool = False  # the feed-forward is RWKV's channel mix, which also reads the previous row
    gate: GluActivation = "silu"  # gate activation on the output of a delta net


@dataclass(frozen=True, slots=True)
class Indexer:
    """An indexer selects the positions that attention reads; `models.indexer` explains it."""

    rope_style: RopeStyle  # rotation of its queries and keys
    # Layers with an indexer. all: every layer; types: the layers that the key `attention.indexer.types` names, the
    # others
    # reuse the previous selection; full: layers without a window; routed: layers with experts, selecting blocks;
    # ratios:
    # layers that have a pool size in the key `attention.compress_ratios`, whose pool keys are means
    layers: Literal["all", "types", "full", "routed", "ratios"]
    # epsilon of the key norm; rms, layer: the epsilon of the model's norms of that kind
    eps: float | Literal["rms", "layer"] = 1e-6
    trailing: bool = False  # rotate the last dimensions of a head instead of the first
    pooled: bool = False  # select pools of `attention.indexer.kpool` positions, each with one key
    compressed: bool = False  # select compressed rows; the file has no key norm
    optional: bool = False  # files without `attention.indexer.top_k` have no indexer


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    Rope style `interleaved` rotates neighbouring dimensions (2i, 2i + 1), `neox` rotates halves (i, i + n_rot/2).
    """

    name: str  # `general.architecture`, and the prefix of its keys
    rope_style: RopeStyle | None  # None: no rotation
    activation: Activation | Literal["xielu"] = "silu"
    no_rope_every: int = 0  # layers n - 1, 2n - 1, ... are not rotated; 0: all are
    rope_pattern: bool = False  # the key `attention.rope_pattern` says which layers are rotated
    qk_norm: bool = False  # q/k norms are required (otherwise they are applied if the file has them)
    ffn_scales: bool = True  # apply `.scale` tensors of feed-forward matrices (llama.cpp does for some architectures)
    # fused: ffn_up holds gate and up; plain: no gate; found: determined from the tensors in the file
    ffn: Literal["gated", "fused", "plain", "found"] = "gated"
    norm: NormKind = "rms"
    attention_norm: str = "attn_norm"  # norm tensor before attention; "": no norm
    ffn_norm: str = "ffn_norm"  # norm tensor before the feed-forward
    # norm the outputs of attention and feed-forward before the residual add, with the two tensors below
    post_norms: bool = False
    attention_post_norm: str = "post_attention_norm"
    ffn_post_norm: str = "post_ffw_norm"
    # the residual add uses the normed input, times the residual scale, instead of the input
    normed_residual: bool = False
    sum_norms: bool = False  # norm after the residual add instead of before the block, with the tensors above
    root_width_embedding: bool = False  # multiply embeddings by sqrt(width)
    # models with this number of layers divide scores by sqrt(width / heads) instead of sqrt(head width)
    wide_scores: int = 0
    attention_softcap: float | None = None  # default; None: the key is ignored
    logit_softcap: float | None = None  # default; None: the key is ignored
    multipliers: Multipliers | None = None
    attention_scale: bool = False  # the key `score_scale_key` is read
    score_scale: float = 0.0  # factor of all scores; 0: from the fields above, or 1 / sqrt(head width)
    parallel: bool = False  # attention and feed-forward read the same rows and are added together
    norm_weights: bool = True  # False: norms have no weights
    ignored: tuple[str, ...] = ()  # ignored tensors and keys; for tensors of a layer, the name after `blk.N.`
    eps: float = 0.0  # norm epsilon if the file says 0; 0: the file must set it
    sections: bool = False  # the key `rope.dimension_sections` is read
    parallel_key: bool = False  # the key `use_parallel_residual` sets `parallel`
    gated: GluActivation | None = None  # `attn_gate` gates the attention output, per value or per head
    embedding_norm: bool = False  # norm the embeddings, without weights
    post_norm_eps: float = 0.0  # epsilon of the post-norms; 0: same as the other norms
    head_norm_eps: float = 0.0  # q/k norms are layer norms with this epsilon; 0: like the other norms
    swin: bool = False  # the key `swin_norm` moves the norms after attention and feed-forward
    silent: tuple[int, int] = (0, 0)  # image token ids [first, end), whose logits are masked to -inf
    norms_rotated: bool = False  # q/k norms are applied after rotation
    value_norm: bool = False  # norm the values of each head, without weights
    value_scale: bool = False  # the key `attention.value_scale` multiplies the values
    keys_as_values: bool = False  # a layer without `attn_v` uses the keys before their norm as values
    checkpoints: bool = False  # the key `attn_res.block_size` says how often rows are saved for later layers
    stacks: bool = False  # two stacks of layers alternate, each running several times
    loops: bool = False  # the key `num_loops` says how often all layers run
    # Hyper-connections of several residual streams. independent: streams are not mixed; mixed: streams are mixed with
    # each
    # other; low_rank: streams are gated per value and have the only norms
    connections: Literal["", "independent", "mixed", "low_rank"] = ""
    ngrams: bool = False  # one layer adds embeddings of the n-grams that end at each token
    altup: bool = False  # AltUp: layers work on several streams of rows
    per_layer_inputs: bool = False  # a second embedding table has a slice for every layer
    kv_layers: int | None = None  # default number of layers with their own keys and values; 0: all
    latent: bool = False  # latent attention (MLA): heads read one latent row per position
    # YaRN without the key `yarn_log_multiplier` scales scores as if the key were 1 (llama.cpp)
    yarn_scores: bool = False
    compressed: bool = False  # attention reads compressed rows for distant positions
    indexer: Indexer | None = None  # selects the positions that attention reads
    clamp: bool = False  # the key `attention.clamp_kqv` bounds queries, keys and values
    alibi: float | None = None  # default ALiBi bias; None: no ALiBi
    alibi_depth: int = 0  # only models with this number of layers use ALiBi; 0: all
    rope_depth: int = 0  # only models with this number of layers are rotated; 0: all
    score_scale_key: str = "attention.scale"  # the key that `attention_scale` refers to
    scores_by_width: bool = False  # divide scores by the head width instead of its square root
    unit_qk_norm: bool = False  # norm the queries and keys of rotated layers, without weights
    unit_qk_norm_but: int = 0  # except in models with this number of experts
    # (growth, length) of the temperature of queries in unrotated layers
    unrotated_temperature: tuple[float, int] | None = None
    embedding_skip: bool = False  # add the embedding after every layer, times a scale of the layer
    unit: GluActivation | None = None  # activation of dense gated feed-forwards; None: `activation`
    limits: GluActivation | None = None  # activation of layers for which the file gives a limit
    limits_of_all: bool = False  # use the limits of the experts for other feed-forwards if the file sets no others
    lead_rotated: bool = False  # leading dense layers are rotated
    norm_by_eps: bool = False  # norms are RMS if the file has the epsilon of RMS norms
    rms_eps: bool = False  # files store the epsilon of layer norms under the key of RMS norms
    halves: bool = False  # `feed_forward_length` counts gate and up together
    sliding: Sliding | None = None
    recurrent: Recurrent | None = None
    query_gate: bool = False  # after each query head, attn_q also holds the gate of the head's output
    output_norm: str = "output_norm"  # "": no norm before the output
    # the output matrix may have rows for the last tokens only; the other tokens are never generated
    narrow_output: bool = False
    heads_norm: bool = True  # next-token heads read rows after the output norm; False: before it
    encoder: bool = False  # rows attend to later rows, and the model returns embeddings instead of logits
    diffusion: bool = False  # rows always attend to later rows; text is filled in, not continued
    bare_start: bool = False  # the first layer's attention has no input norm if the file has no such tensor
    classifier_pooling: Literal["cls", "mean"] = "cls"  # default of encoders
    distances: bool = False  # T5's relative position bias: `attn_rel_b` holds a score bias for each bucket of distances
    stack: Literal["", "enc"] = ""  # T5 prefix of layer tensors: `enc.blk.N`
    # output norm of a decoder that generates from the rows of these layers; "": encoder or decoder only
    decoder: str = ""
    ungated: Activation | None = None  # activation of feed-forwards without a gate; None: `activation`
    shared_fused: bool = False  # the up matrix of the shared expert holds gate and up
    activation_key: bool = False  # the key `hidden_activation` is read
    routing: ExpertGating | None = None
