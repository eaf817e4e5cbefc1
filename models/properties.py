"""The fields of the architecture table: properties that are not in the GGUF, and their defaults.

A property is here if the general code or several families need it; `models.families` holds what one family needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.models.routing import ExpertGating
from localllm.plan import Activation, GluActivation, NormKind, RopeStyle

# biases and scales of attention matrices that some models ignore
QKV_EXTRAS = tuple([f"attn_{which}.{what}" for which in "qkv" for what in ("bias", "scale")])


@dataclass(frozen=True, slots=True)
class Sliding:
    """Sliding-window attention in all layers but every `period`-th."""

    period: int  # default if the GGUF has no pattern: layers period - 1, 2 period - 1, ... use full attention
    first: bool = False  # layers 0, period, 2 period, ... use full attention instead
    window: int = 0  # default window size if the GGUF sets none; 0: no sliding-window layers
    stretched: bool = True  # rope scaling also applies to sliding-window layers
    rope_base: float = 0.0  # default rope base of sliding-window layers; 0: same as the other layers
    only_rope: bool = False  # only sliding-window layers use RoPE; full-attention layers do not (NoPE)


Mixer = Literal["short_conv", "delta_net", "kda", "lightning", "mamba", "mamba2", "plamo2", "rwkv6", "rwkv7"]


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers with a recurrent mixer instead of attention; `models.recurrent` and the families describe the mixers."""

    mixer: Mixer
    # Layers with a recurrent mixer. without_heads: layers without KV heads; interval: all but every n-th; beside: all
    # layers, in parallel with attention.
    layers: Literal["without_heads", "interval", "all", "beside"]
    interval: int = 4  # default n of `interval`
    # The key `kda.gate_lower_bound` bounds log decays from below. GGUFs store the slopes of log decays, or the negated
    # slopes.
    bounded: Literal["", "slopes", "negative"] = ""
    alone: bool = False  # each layer has either a mixer or a feed-forward


@dataclass(frozen=True, slots=True)
class Indexer:
    """Sparse attention: an indexer selects the positions that attention reads (see `models.indexer`)."""

    rope_style: RopeStyle  # rotation of the indexer's queries and keys
    # Layers with an indexer. all: every layer; types: the layers listed in the key `attention.indexer.types`, while the
    # rest reuse the previous selection; full: full-attention layers; own: the family reads them.
    layers: Literal["all", "types", "full", "own"]
    # epsilon of the key norm; rms, layer: the model's epsilon for that kind of norm
    eps: float | Literal["rms", "layer"] = 1e-6


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of one architecture, `Architecture`.

    Rope style `interleaved` rotates adjacent dimensions (2i, 2i + 1), `neox` rotates halves (i, i + n_rot/2).
    """

    name: str  # `general.architecture`, and the prefix of the model's metadata keys
    rope_style: RopeStyle | None  # None: no RoPE
    activation: Activation | GluActivation | Literal["xielu"] = "silu"
    no_rope_every: int = 0  # layers n - 1, 2n - 1, ... do not use RoPE (NoPE); 0: all layers use RoPE
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
    root_width_embedding: bool = False  # multiply embeddings by sqrt(width)
    logit_softcap: float | None = None  # default cap; None: the key is ignored
    # read the keys that scale embeddings, residual branches and logits, which are multiplied or divided by their key
    multipliers: Literal["", "multiplied", "divided"] = ""
    attention_scale: bool = False  # read the scale of attention scores from the key `attention.scale`
    score_scale: float = 0.0  # scale of attention scores; 0: from the key, or 1 / sqrt(head width)
    parallel: bool = False  # attention and feed-forward read the same input, and their outputs are added
    norm_weights: bool = True  # False: norms have no weights
    ignored: tuple[str, ...] = ()  # ignored tensors and keys; layer tensors by the name after `blk.N.`
    sections: bool = False  # read the key `rope.dimension_sections` (M-RoPE)
    # How the pairs of a head turn by time, row and column of an image token: in sections, interleaved, or all by the
    # token's position
    axes: Literal["", "sections", "interleaved"] = ""
    spans: Literal["all", "sliding"] = "all"  # layers in which the tokens of a picture see each other, if they do
    gated: GluActivation | None = None  # activation of the output gate `attn_gate`, per value or per head
    norms_rotated: bool = False  # q/k norms are applied after rotation
    # What attention caches of a position. latent: one latent vector for all heads, multi-head latent attention (MLA);
    # shared: one vector for all heads that is key and value.
    cache: Literal["heads", "latent", "shared"] = "heads"
    # YaRN without the key `yarn_log_multiplier` scales scores as if the key were 1, as in llama.cpp
    yarn_scores: bool = False
    indexer: Indexer | None = None  # sparse attention: selects the positions that attention reads
    clamp: bool = False  # the key `attention.clamp_kqv` bounds queries, keys and values
    alibi: float | None = None  # default ALiBi bias; None: no ALiBi
    limits: GluActivation | None = None  # activation of layers for which the GGUF sets a limit
    # Two properties of one architecture each, which the converter needs to know too: GGUFs store the epsilon of layer
    # norms under the key of RMS norms, or the activation in the key `hidden_activation`.
    rms_eps: bool = False
    activation_key: bool = False
    sliding: Sliding | None = None
    recurrent: Recurrent | None = None
    output_norm: str = "output_norm"  # "": no norm before the output
    heads_norm: bool = True  # multi-token-prediction heads read hidden states after the output norm; False: before it
    # Of several multi-token-prediction heads, each reads the hidden states of the head before it (arXiv:2412.19437);
    # False: all read the model's
    chained_heads: bool = True
    encoder: bool = False  # bidirectional attention; the model returns embeddings instead of logits
    decoder: bool = False  # an encoder and a decoder; the program cannot draft tokens for it
    diffusion: bool = False  # bidirectional attention; the model fills in masked tokens instead of appending
    routing: ExpertGating | None = None

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.cache == "latent"
