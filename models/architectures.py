"""The architectures that can run: one row each, with only the properties that a model file does not hold.

Biases, q/k norms, sinks, fused and shared matrices, tied output, head sizes and rope frequency factors are read from
the file. To add an architecture that fits `models.forward`, add a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localllm.models.errors import ModelError
from localllm.plan import Activation, Gating, GluActivation, NormKind, RopeStyle


@dataclass(frozen=True, slots=True)
class ExpertGating:
    """How the experts of a token are weighted; `plan.Experts` defines the gatings."""

    gating: Gating
    normalize: bool  # divide the chosen weights by their sum
    from_file: bool = False  # keys of the file override the two above, and may scale the weights
    scales: bool = False  # apply the `.scale` tensors of the experts' matrices
    activation: GluActivation = "silu"


@dataclass(frozen=True, slots=True)
class Sliding:
    """Sliding-window attention in all layers but every `period`-th."""

    period: int  # default without a key: layers period - 1, 2 period - 1, ... see everything
    window: int = 0  # default without a key; 0: no layer has a window
    stretched: bool = True  # rope scaling applies to layers with a window too
    rope_base: float = 0.0  # of layers with a window; default without a key; 0: as in the others


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table. `norm` rotates neighbouring dimensions (2i, 2i + 1), `neox` the halves (i, i + n_rot/2)."""

    name: str  # general.architecture, and the prefix of the keys
    rope_style: RopeStyle
    activation: Activation = "silu"
    no_rope_every: int = 0  # layers n - 1, 2n - 1, ... are not rotated; 0: all are
    qk_norm: bool = False  # q/k norms are required (elsewhere they are applied if the file holds them)
    ffn_scales: bool = True  # apply `.scale` tensors of feed-forward matrices (llama.cpp does for some)
    ffn: Literal["gated", "fused", "plain"] = "gated"  # fused: ffn_up holds gate and up; plain: no gate
    norm: NormKind = "rms"
    attention_norm: str = "attn_norm"  # norm of attention's input; "": none
    ffn_norm: str = "ffn_norm"  # norm of the feed-forward's input; "": none
    post_norms: bool = False  # norm the outputs of attention and feed-forward before adding them
    root_width_embedding: bool = False  # multiply embeddings by sqrt(width)
    wide_scores: int = 0  # with this many layers, divide scores by sqrt(width / heads), not sqrt(head width)
    attention_softcap: float | None = None  # default without a key; None: ignore the key
    logit_softcap: float | None = None  # as above
    multipliers: bool = False  # keys scale embeddings, scores, residual branches and logits, and may switch rope off
    sliding: Sliding | None = None
    routing: ExpertGating | None = None


_ROWS = (
    Architecture(  # Llama 1-3, Mistral 7B, Nemo and Small, Mixtral, TinyLlama, SmolLM 1-2, Yi, ...
        "llama", "norm", routing=ExpertGating("softmax", True, scales=True)
    ),
    Architecture("mistral3", "norm"),  # Mistral Small 3.1 and later, Ministral 3
    Architecture("gemma", "neox", "gelu", ffn_scales=False, root_width_embedding=True),
    Architecture(
        "gemma2", "neox", "gelu", ffn_scales=False, root_width_embedding=True, post_norms=True, wide_scores=46,
        attention_softcap=50.0, logit_softcap=30.0, sliding=Sliding(2, window=4096),
    ),
    Architecture(
        "gemma3", "neox", "gelu", ffn_scales=False, root_width_embedding=True, post_norms=True, wide_scores=62,
        qk_norm=True, logit_softcap=0.0, sliding=Sliding(6, stretched=False, rope_base=10000.0),
    ),
    Architecture("glm4", "norm", ffn="fused", ffn_scales=False, post_norms=True),
    Architecture(
        "glm4moe", "neox", ffn_scales=False, ffn_norm="post_attention_norm",
        routing=ExpertGating("sigmoid", False, from_file=True),
    ),
    Architecture(
        "gpt-oss", "neox", ffn_norm="post_attention_norm", sliding=Sliding(2, window=128),
        routing=ExpertGating("softmax_of_chosen", False, activation="swiglu_oai"),
    ),
    Architecture("granite", "norm", ffn_scales=False, multipliers=True),
    Architecture(
        "granitemoe", "norm", ffn_scales=False, multipliers=True, routing=ExpertGating("softmax", True)
    ),
    Architecture(  # OLMo 3 too
        "olmo2", "neox", ffn_scales=False, qk_norm=True, attention_norm="", ffn_norm="", post_norms=True,
        sliding=Sliding(4, stretched=False),
    ),
    Architecture("phi3", "neox", ffn="fused", ffn_scales=False),  # Phi 3, 3.5 and 4
    Architecture("qwen2", "neox", ffn_scales=False),
    Architecture("qwen2moe", "neox", ffn_scales=False, routing=ExpertGating("softmax", False)),
    Architecture("qwen3", "neox", qk_norm=True),
    Architecture("qwen3moe", "neox", qk_norm=True, routing=ExpertGating("softmax", True, scales=True)),
    Architecture("smollm3", "norm", no_rope_every=4, ffn_scales=False),
    Architecture("stablelm", "neox", norm="layer", ffn_scales=False),
    Architecture("starcoder2", "neox", "gelu", norm="layer", ffn="plain", ffn_scales=False),
)  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in _ROWS}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Return the row of the file's `general.architecture`; ModelError lists the supported ones."""
    name = metadata.get("general.architecture")
    row = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is None:
        found = "the key is missing" if name is None else f"{str(name)[:60]!r} is not supported"
        raise ModelError(f"general.architecture: {found}; supported: {', '.join(ARCHITECTURES)}")
    return row
