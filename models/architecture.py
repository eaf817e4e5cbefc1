"""A row of the table of architectures: the properties that a model file does not hold, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.plan import Activation, Gating, GluActivation, NormKind, RopeStyle


@dataclass(frozen=True, slots=True)
class ExpertGating:
    """How the experts of a token are weighted; `plan.Experts` defines the gatings."""

    gating: Gating
    normalize: bool  # divide the chosen weights by their sum
    # True: keys of the file override the two above and may scale; gating: the first alone; scaled: all but the second
    from_file: bool | Literal["gating", "scaled"] = False
    scales: bool = False  # apply the `.scale` tensors of the experts' matrices
    activation: GluActivation = "silu"
    beside: bool = False  # a dense feed-forward stands beside the experts, each with norms of its own
    weighted_input: bool = False  # the weights multiply what the experts read, not what they give
    router: Literal["", "unnormed"] = ""  # unnormed: the router reads what the layer reads
    norm: str = ""  # the tensor that norms for the experts what the layer reads; "": they read what the router reads
    dense: bool = False  # the layer has a dense feed-forward beside the experts
    sum_scale: float = 1.0  # of the sum of the experts and of what stands beside them
    biased: Gating | None = None  # where the choice has a bias and the file tells no gating; None: as elsewhere
    adjugate: bool = False  # groups of experts have a small expert besides, which runs as often as experts of its group


@dataclass(frozen=True, slots=True)
class Sliding:
    """Sliding-window attention in all layers but every `period`-th."""

    period: int  # where the file does not say it: layers period - 1, 2 period - 1, ... see everything
    first: bool = False  # layers 0, period, 2 period, ... see everything instead
    window: int = 0  # where the file does not say it; 0: no layer slides
    stretched: bool = True  # rope scaling holds in sliding layers too
    factors: bool = True  # and so do the factors of frequencies
    rope_base: float = 0.0  # of sliding layers where the file does not say it; 0: as in the others
    only_rope: bool = False  # layers that see everything are not rotated
    depth: int = 0  # only models of so many layers slide; 0: all
    chunked: bool = False  # a window is a chunk of the context instead
    both_ways: bool = False  # half of a window lies before a row, half behind it
    half: bool = False  # layers that see everything rotate half of the dimensions


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Keys of the file scale embeddings, scores, residual branches and logits; these are the defaults."""

    logits: Literal["multiplied", "divided"] = "divided"  # by `logit_scale`
    embedding: float = 1.0
    depth: float = 0.0  # residual branches are scaled by depth / sqrt(layers); 0: by 1
    width: int = 0  # the logit scale is width / the model's width; 0: `logit`
    logit: float = 0.0  # 0: 1
    from_file: bool = True  # false: the keys do not count
    switch: bool = False  # `rope.scaling.finetuned = false` means that nothing is rotated


Mixer = Literal["short_conv", "delta_net", "kda", "lightning", "mamba", "mamba2", "plamo2", "rwkv6", "rwkv7"]


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers with a recurrent mixer, which `models.recurrent` and `models.rwkv` describe, instead of attention."""

    mixer: Mixer
    layers: Literal["without_heads", "interval", "all", "beside"]  # interval: all but every n-th; beside: and attention
    interval: int = 4  # n, where the file does not say it
    # the key `kda.gate_lower_bound` bounds logarithms of decays; the file holds their slopes, or these times -1
    bounded: Literal["", "slopes", "negative"] = ""
    unit_eps: float = 0.0  # of the lengths of queries and keys (KDA); 0: that of the norms
    alone: bool = False  # a layer is a mixer or a feed-forward
    channel_mix: bool = False  # the feed-forward is RWKV's, which also reads the row before
    gate: GluActivation = "silu"  # of what a delta net sees


@dataclass(frozen=True, slots=True)
class Indexer:
    """An indexer chooses the positions that attention reads; `models.indexer` explains it."""

    rope_style: RopeStyle  # of its queries and keys
    # all: every layer has one; types: those that the key `attention.indexer.types` names, others read the last one's
    # choice; full: layers without a window; routed: layers with experts, and chosen are blocks; ratios: layers for
    # which the key `attention.compress_ratios` tells the size of pools, whose keys are means
    layers: Literal["all", "types", "full", "routed", "ratios"]
    eps: float | Literal["rms", "layer"] = 1e-6  # of the norm of its keys; rms, layer: that of norms of this kind
    trailing: bool = False  # the last dimensions of its heads are rotated, not the first
    pooled: bool = False  # positions are chosen in pools of `attention.indexer.kpool`, each with one key
    compressed: bool = False  # what is chosen are compressed rows; the file has no norm of keys
    optional: bool = False  # a file without `attention.indexer.top_k` has none


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table. `norm` rotates neighbouring dimensions (2i, 2i + 1), `neox` the halves (i, i + n_rot/2)."""

    name: str  # general.architecture, and the prefix of the keys
    rope_style: RopeStyle | None  # None: nothing is rotated
    activation: Activation | Literal["xielu"] = "silu"
    no_rope_every: int = 0  # layers n - 1, 2n - 1, ... are not rotated; 0: all are
    rope_pattern: bool = False  # the key `attention.rope_pattern` says which layers are rotated
    qk_norm: bool = False  # q/k norms are required (elsewhere they are applied if the file holds them)
    ffn_scales: bool = True  # apply `.scale` tensors of feed-forward matrices (llama.cpp does for some)
    # fused: ffn_up holds gate and up; plain: no gate; found: what the file holds of these
    ffn: Literal["gated", "fused", "plain", "found"] = "gated"
    norm: NormKind = "rms"
    attention_norm: str = "attn_norm"  # the tensor that norms the input of attention; "": nothing does
    ffn_norm: str = "ffn_norm"  # and of the feed-forward
    post_norms: bool = False  # what attention and feed-forward give is normed before it is added, by these tensors
    attention_post_norm: str = "post_attention_norm"
    ffn_post_norm: str = "post_ffw_norm"
    normed_residual: bool = False  # added to are the rows that were read, normed, times the residual scale
    sum_norms: bool = False  # the rows are normed after the addition instead, by these tensors
    root_width_embedding: bool = False  # embeddings are times sqrt(width)
    wide_scores: int = 0  # a model of so many layers divides scores by sqrt(width / heads), not sqrt(head width)
    attention_softcap: float | None = None  # where the file does not say it; None: the key does not count
    logit_softcap: float | None = None  # as above
    multipliers: Multipliers | None = None
    attention_scale: bool = False  # the key `attention.scale` counts
    score_scale: float = 0.0  # of all scores; 0: as above, or one over the root of the head width
    parallel: bool = False  # attention and feed-forward read the same rows, and both are added to them
    norm_weights: bool = True  # false: norms have none
    ignored: tuple[str, ...] = ()  # tensors and keys that do not count; of a layer's tensors the name after `blk.N.`
    eps: float = 0.0  # of the norms where the file says 0; 0: the file must say it
    sections: bool = False  # the key `rope.dimension_sections` counts
    parallel_key: bool = False  # the key `use_parallel_residual` says whether the layer is parallel
    gated: GluActivation | None = None  # the matrix `attn_gate` gates what the heads see, or each head
    embedding_norm: bool = False  # embeddings are normed, without weights
    post_norm_eps: float = 0.0  # of the norms of what is added; 0: as of the others
    head_norm_eps: float = 0.0  # q/k norms are layer norms with this epsilon; 0: they are as other norms
    swin: bool = False  # the key `swin_norm` says that norms follow attention and feed-forward, and none come before
    silent: tuple[int, int] = (0, 0)  # tokens from the first up to before the second are of images and never follow
    norms_rotated: bool = False  # q/k norms come after the rotation
    value_norm: bool = False  # the values of each head are normed, without weights
    value_scale: bool = False  # the key `attention.value_scale` multiplies the values
    keys_as_values: bool = False  # a layer without `attn_v` takes the keys, before their norm, as values
    checkpoints: bool = False  # the key `attn_res.block_size` says how often rows are kept for later layers to read
    stacks: bool = False  # two stacks of layers run in turn, each several times
    loops: bool = False  # the key `num_loops` says how often all layers run
    # independent: hyper-connections of several residual streams; mixed: they also mix the streams; low_rank: streams
    # are gated number by number, and there are no norms but those of streams
    connections: Literal["", "independent", "mixed", "low_rank"] = ""
    ngrams: bool = False  # a layer adds embeddings of the n-grams that end at a token
    altup: bool = False  # layers work on several streams of rows
    per_layer_inputs: bool = False  # a second table of embeddings has a slice for every layer
    kv_layers: int | None = None  # layers with keys and values of their own where the file does not say it; 0: all
    latent: bool = False  # heads read a latent row per position
    yarn_scores: bool = False  # YaRN without the key `yarn_log_multiplier` scales scores as if it were 1 (llama.cpp)
    compressed: bool = False  # attention reads compressed rows of far positions
    indexer: Indexer | None = None  # which chooses the positions that heads read
    clamp: bool = False  # the key `attention.clamp_kqv` bounds queries, keys and values
    alibi: float | None = None  # where the file does not say it; None: scores do not fall with the distance
    alibi_depth: int = 0  # only in models of so many layers; 0: all
    rope_depth: int = 0  # only models of so many layers are rotated; 0: all
    score_scale_key: str = "attention.scale"  # which key `attention_scale` means
    scores_by_width: bool = False  # scores are divided by the width of a head, not by its root
    unit_qk_norm: bool = False  # queries and keys of rotated layers are normed without weights
    unit_qk_norm_but: int = 0  # but not in models of so many experts
    unrotated_temperature: tuple[float, int] | None = None  # growth of queries that are not rotated, and its length
    embedding_skip: bool = False  # the embedding is added behind every layer, times a number of the layer
    unit: GluActivation | None = None  # of gated feed-forwards that are dense; None: the activation
    limits: GluActivation | None = None  # the unit of a layer for which the file gives a limit
    limits_of_all: bool = False  # the limits of experts are those of other feed-forwards where the file gives none
    lead_rotated: bool = False  # the leading dense layers are rotated
    norm_by_eps: bool = False  # norms are RMS where the file gives the epsilon of RMS norms
    rms_eps: bool = False  # files give the epsilon of layer norms as that of RMS norms
    halves: bool = False  # `feed_forward_length` counts gate and up together
    sliding: Sliding | None = None
    recurrent: Recurrent | None = None
    query_gate: bool = False  # attn_q also holds, after the query of each head, the gate of what the head sees
    output_norm: str = "output_norm"  # "": nothing norms the rows of the last layer
    narrow_output: bool = False  # the output matrix may have rows for the last tokens alone; no other one follows
    heads_norm: bool = True  # next-token heads read rows after the norm of the output, not before it
    encoder: bool = False  # rows see later ones, and what the model gives are embeddings, not logits
    diffusion: bool = False  # rows see later ones, whatever the file says; a text is filled in, not continued
    bare_start: bool = False  # nothing norms the input of the first layer's attention if the file holds no such norm
    classifier_pooling: Literal["cls", "mean"] = "cls"  # of encoders where the file does not say it
    distances: bool = False  # scores gain numbers by the distance, which `attn_rel_b` holds for buckets of distances
    stack: Literal["", "enc"] = ""  # T5's names of a layer's tensors: `enc.blk.N`
    decoder: str = ""  # the norm of the output of a decoder, which continues what layers of this row have read
    ungated: Activation | None = None  # of feed-forwards without a gate, where others have `activation`
    shared_fused: bool = False  # the up matrix of the expert for all holds gate and up
    activation_key: bool = False  # the key `hidden_activation` counts
    routing: ExpertGating | None = None
