"""Read a model's shape from its file: convert metadata keys to a frozen and checked `Config`.

Every count is bounded here, so a hostile file causes an error message, never a huge loop or allocation. Zero means "not
set" where llama.cpp treats it so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from localllm.models.architectures import ARCHITECTURES, Architecture
from localllm.models.errors import ModelError
from localllm.models.keys import Keys, found
from localllm.plan import Activation, Gating, GluActivation, NormKind

Pooling = Literal["none", "mean", "cls", "last", "rank"]  # in GGUF's order, which counts from 0
RopeScaling = Literal["none", "linear", "yarn", "longrope"]  # longrope: linear, with frequency factors

MAX_LAYERS = 1024
MIN_HEAD_DIM = 2  # of models without attention, whose files name none
RECURRENT_KEY = "attention.recurrent_layers"
_MAX_KERNEL = 64  # rows that a convolution sees; known models have 3 or 4
_MAX_WIDTH = 1 << 20  # values in a row of activations
# Kernels are compiled for these numbers. Known models have at most 256 heads in 5 layouts, heads of 576 values, and 512
# experts, 32 of them used.
_MAX_HEADS, _MAX_HEAD_DIM, _MAX_LAYOUTS = 1024, 1024, 16
_MAX_EXPERTS, _MAX_USED = 4096, 256
_MAX_EXPERT_GROUPS = 128  # known models have 8
_REASON = " (kernels are compiled for this number, and no known model comes near)"
_MAX_VOCABULARY = 1 << 24
_MAX_CONTEXT = 1 << 30
_MAX_FACTOR = 1e6  # of factors that stretch positions or scale values
_MAX_STREAMS = 64  # known models have 4
TOP_TWENTIETH = 1.6448533535003662  # deviations that 5 % of a normal distribution exceed
_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "silu": "silu"}
_GATINGS: tuple[Gating, ...] = ("softmax", "sigmoid", "softmax_of_chosen")  # in GGUF's order, which counts from 1


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


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Widths of latent attention; `models.latent` explains it."""

    rank: int  # of the latent row
    plain: int  # of the part of a head's queries and keys that is not rotated
    rotated: int
    value: int  # of a head's values


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """The sizes of recurrent mixers, which differ in what they use."""

    kernel: int  # rows that a convolution sees
    inner: int  # values of all heads
    state: int  # values of a key
    heads: int  # Mamba-1: rank of the step sizes
    groups: int  # key heads
    norms: bool  # Mamba-1: steps, B and C are normed even where the file has no weights for it


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
    parallel: bool  # attention and feed-forward read the same rows
    streams: int  # of residual rows (AltUp); 0: there is one, without AltUp
    active_stream: int  # that layers compute with
    sparsity: tuple[float | None, ...]  # deviations above the mean that gates must exceed; None: all count
    per_layer_width: int  # of the slice of per-layer embeddings; 0: there are none
    recurrent: RecurrentConfig | None
    attends: tuple[bool, ...]  # whether the layer has attention
    recurs: tuple[bool, ...]  # whether it has a recurrent mixer
    heads_after: int  # layers of the file after these: each is a next-token head (`models.next_token`)
    causal: bool  # rows see no later ones
    activation: Activation | Literal["xielu"]  # of dense feed-forwards
    pooling: Pooling  # how embeddings of tokens become one of a text
    classifier_pooling: Pooling  # and how they do before a classifier scores it


def read_config(metadata: Mapping[str, Any], architecture: str, head: int = 0) -> Config:
    """Read the `Config` of a model whose keys start with `architecture + "."`; ModelError names the invalid key.

    `head` counts as layers that many of the next-token heads after the model's own.
    """
    row, keys = ARCHITECTURES[architecture], Keys(metadata, architecture + ".")
    blocks = keys.integer("block_count", 1, MAX_LAYERS)
    heads_after = keys.integer("nextn_predict_layers", head, blocks - 1, default=0) - head
    layers = blocks - heads_after
    width = keys.integer("embedding_length", 1, _MAX_WIDTH)
    context_length = keys.integer("context_length", 1, _MAX_CONTEXT)
    if row.sliding is not None and row.sliding.depth not in (0, layers):
        row = replace(row, sliding=None)
    norm, count = _norm(keys, row), keys.integer("expert_count", 0, _MAX_EXPERTS, default=0, reason=_REASON)
    fewest = 0 if row.recurrent is not None else 1
    heads = keys.per_layer("attention.head_count", blocks, fewest, _MAX_HEADS, reason=_REASON)
    kv_heads = keys.per_layer("attention.head_count_kv", blocks, fewest, _MAX_HEADS, default=heads, reason=_REASON)
    for layer, (many, few) in enumerate(zip(heads, kv_heads, strict=True)):
        if many % few if few else many and row.recurrent is None:
            raise ModelError(
                f"{architecture}.attention.head_count_kv: {many} heads are not a multiple of {few} key-value heads "
                f"(layer {layer})"
            )
    ffn_width = _ffn_width(keys, row, blocks)[:layers]
    attends, recurs = _mixers(keys, row, kv_heads, ffn_width)
    windows = _windows(keys, row, blocks)[:layers]
    _check_layouts(keys, heads, kv_heads, windows)
    of_full, of_sliding = _head_dims(keys, width, heads, row)
    head_dim, value_dim = zip(*[of_sliding if window else of_full for window in windows], strict=True)
    rope = _rope(keys, row, of_full[0], context_length)
    embedding_scale, residual_scale, logit_scale = _multipliers(keys, row, width, layers)
    return Config(
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads[:layers],
        kv_heads=kv_heads[:layers],
        head_dim=head_dim,
        value_dim=value_dim,
        latent=_latent(keys, rope.n_rot, *of_full) if row.latent else None,
        kv_layer=_kv_layers(keys, row, kv_heads[:layers], windows),
        ffn_width=ffn_width,
        vocabulary=_vocabulary(keys),
        context_length=context_length,
        eps=keys.real(eps_key(row, norm), 0.0 if row.eps else 1e-20, 1.0) or row.eps,
        rope=_halved(keys, rope) if row.sliding and row.sliding.half else rope,
        window_rope=_window_rope(keys, row, rope, of_sliding[0]),
        rotated=_rotated(keys, row, windows),
        windows=windows,
        norm=norm,
        alibi=_alibi(keys, row, layers),
        unit_qk_norm=row.unit_qk_norm and not (row.unit_qk_norm_but and row.unit_qk_norm_but == count),
        limits=_limits(keys, row, "shexp", blocks),
        xielu=_xielu(keys, layers) if row.activation == "xielu" else (),
        attention_scale=tuple(
            [_attention_scale(keys, row, layers, size, width // max(1, *heads)) for size in head_dim]
        ),
        value_scale=(keys.real("attention.value_scale", 0.0, _MAX_FACTOR, 0.0) if row.value_scale else 0.0) or 1.0,
        clamp=keys.real("attention.clamp_kqv", 0.0, _MAX_FACTOR, default=0.0) if row.clamp else 0.0,
        attention_softcap=_softcap(keys, "attn_logit_softcapping", row.attention_softcap),
        logit_softcap=_softcap(keys, "final_logit_softcapping", row.logit_softcap),
        embedding_scale=embedding_scale,
        residual_scale=residual_scale,
        logit_scale=logit_scale,
        experts=None if "expert_count" in row.ignored else _experts(keys, row, blocks),
        parallel=keys.flag("use_parallel_residual", True) if row.parallel_key else row.parallel,
        streams=(streams := keys.integer("altup.num_inputs", 2, _MAX_STREAMS, default=4) if row.altup else 0),
        active_stream=keys.integer("altup.active_idx", 0, streams - 1, default=0) if row.altup else 0,
        sparsity=_sparsity(keys, row, layers),
        per_layer_width=_per_layer_width(keys, row),
        recurrent=_recurrent(keys, row),
        attends=attends,
        recurs=recurs,
        heads_after=heads_after,
        causal=(causal := _causal(keys, row)),
        activation=_activation(keys, row),
        pooling=_pooling(keys, "pooling_type", "last" if causal else "mean"),
        classifier_pooling=_pooling(keys, "classifier_pooling_type", "last" if causal else row.classifier_pooling),
    )


def eps_key(row: Architecture, norm: NormKind) -> str:
    """The key that holds the epsilon of norms of this kind, below the architecture's prefix."""
    return f"attention.layer_norm{'_rms' if norm == 'rms' or row.rms_eps else ''}_epsilon"


def _causal(keys: Keys, row: Architecture) -> bool:
    causal = keys.flag("attention.causal", not row.encoder)
    if not causal and (row.recurrent is not None or row.kv_layers is not None or row.latent):
        raise ModelError(f"{row.name}.attention.causal: only causal models (true) are supported, found false")
    return causal


def _activation(keys: Keys, row: Architecture) -> Activation | Literal["xielu"]:
    """The activation of dense feed-forwards, by the name that Transformers has for it if the file gives one."""
    key = "hidden_activation"
    name = keys.metadata.get(keys.prefix + key, "") if row.activation_key else ""
    if name and name not in _ACTIVATIONS:
        raise ModelError(f"{keys.prefix}{key}: supported are {', '.join(_ACTIVATIONS)}, {found(name)}")
    return _ACTIVATIONS[name] if name else row.activation


def _pooling(keys: Keys, key: str, default: Pooling) -> Pooling:
    """How embeddings are pooled; the largest number means that nothing says it."""
    number = keys.integer(key, -1, (1 << 32) - 1, default=-1)
    if number not in (-1, (1 << 32) - 1) and number >= len(get_args(Pooling)):
        supported = ", ".join(f"{n} ({name})" for n, name in enumerate(get_args(Pooling)))
        raise ModelError(f"{keys.prefix}{key}: supported are {supported}, found {number}")
    return default if number in (-1, (1 << 32) - 1) else cast(Pooling, get_args(Pooling)[number])


def _check_layouts(keys: Keys, heads: tuple[int, ...], kv_heads: tuple[int, ...], windows: tuple[int, ...]) -> None:
    found = len({(many, few, window > 0) for many, few, window in zip(heads, kv_heads, windows, strict=False)})
    if found > _MAX_LAYOUTS:
        raise ModelError(
            f"{keys.prefix}attention.head_count: expected at most {_MAX_LAYOUTS} different layouts of heads in all "
            f"layers (kernels are compiled for each, and no known model comes near), found {found}"
        )


def _rotated(keys: Keys, row: Architecture, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Which layers are rotated, from the windows of all."""
    own, sliding, every, layers = row.multipliers, row.sliding, row.no_rope_every, len(windows)
    if row.rope_style is None or row.rope_depth not in (0, layers):
        return (False,) * layers
    if own and own.switch and not keys.flag("rope.scaling.finetuned", True):  # how Granite 4 switches rope off
        return (False,) * layers
    if row.rope_pattern:
        return keys.flags("attention.rope_pattern", layers, True)
    if sliding is not None and (sliding.only_rope or sliding.chunked) and not any(windows):
        return (True,) * layers
    if sliding is not None and sliding.only_rope:
        lead = keys.integer("leading_dense_block_count", 0, layers, default=0) if row.lead_rotated else 0
        return tuple([window > 0 or layer < lead for layer, window in enumerate(windows)])
    return tuple([not every or (layer + 1) % every != 0 for layer in range(layers)])


def _norm(keys: Keys, row: Architecture) -> NormKind:
    rms = row.norm_by_eps and keys.real("attention.layer_norm_rms_epsilon", 0.0, 1.0, default=0.0) > 0.0
    return "rms" if rms else row.norm


def _alibi(keys: Keys, row: Architecture, layers: int) -> float:
    if row.alibi is None or row.alibi_depth not in (0, layers):
        return 0.0
    return keys.real("attention.max_alibi_bias", 0.0, _MAX_FACTOR, default=row.alibi) or row.alibi


def _limits(keys: Keys, row: Architecture, which: str, blocks: int) -> tuple[float, ...]:
    """Limits of feed-forward units by layer, "exp" of experts, "shexp" of all others; numbers near 0 mean none."""
    if row.limits is None:
        return (0.0,) * blocks
    limits = keys.reals(f"swiglu_clamp_{which}", blocks, 0.0, _MAX_FACTOR, default=0.0)
    return tuple([limit if limit > 1e-6 else 0.0 for limit in limits])


def _xielu(keys: Keys, layers: int) -> tuple[tuple[float, float, float, float], ...]:
    """The numbers of xIELU by layer; files hold those that were learned, before the functions that bound them."""
    own = replace(keys, prefix="")
    bounds = {"alpha_p": -_MAX_FACTOR, "alpha_n": -_MAX_FACTOR, "beta": 0.0, "eps": -1.0}
    found = [own.reals(f"xielu.{key}", layers, low, _MAX_FACTOR) for key, low in bounds.items()]
    return tuple(
        [(_softplus(p), beta + _softplus(n), beta, min(eps, 0.0)) for p, n, beta, eps in zip(*found, strict=True)]
    )


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _mixers(
    keys: Keys, row: Architecture, kv_heads: tuple[int, ...], ffn_width: tuple[int, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which layers have attention, and which a recurrent mixer."""
    layers, own = len(ffn_width), row.recurrent
    if own is None:
        return (True,) * layers, (False,) * layers
    match own.layers:
        case "all":
            recurs = (True,) * layers
        case "beside":
            return (True,) * layers, (True,) * layers
        case "interval":
            recurs = keys.periodic("full_attention_interval", layers, 4)
            if hasattr(keys.metadata.get(keys.prefix + RECURRENT_KEY), "__len__"):
                recurs = keys.periodic(RECURRENT_KEY, len(kv_heads), 0)[:layers]
        case "without_heads":
            recurs = tuple([not few for few in kv_heads[:layers]])
    if own.alone and own.layers != "all":
        recurs = tuple([recurrent and not inner for recurrent, inner in zip(recurs, ffn_width, strict=True)])
    fed = [own.alone and own.layers != "all" and inner > 0 for inner in ffn_width]
    attends = tuple([not recurrent and not alone for recurrent, alone in zip(recurs, fed, strict=True)])
    return attends, recurs


def _recurrent(keys: Keys, row: Architecture) -> RecurrentConfig | None:
    if row.recurrent is None:
        return None
    if row.recurrent.mixer == "short_conv":
        return RecurrentConfig(keys.integer("shortconv.l_cache", 2, _MAX_KERNEL), 0, 0, 0, 0, False)
    sizes = RecurrentConfig(
        kernel=keys.integer("ssm.conv_kernel", 2, _MAX_KERNEL),
        inner=keys.integer("ssm.inner_size", 1, _MAX_WIDTH),
        state=keys.integer("ssm.state_size", 1, _MAX_HEAD_DIM),
        heads=keys.integer("ssm.time_step_rank", 1, _MAX_WIDTH),
        groups=keys.integer("ssm.group_count", 0, _MAX_HEADS, default=0) or 1,
        norms=keys.flag("ssm.dt_b_c_rms", False),
    )
    if row.recurrent.mixer != "mamba" and (sizes.inner % sizes.heads or sizes.heads % sizes.groups):
        raise ModelError(
            f"{keys.prefix}ssm.time_step_rank: {sizes.heads} heads must divide ssm.inner_size {sizes.inner} and be a "
            f"multiple of ssm.group_count {sizes.groups}"
        )
    return sizes


def _ffn_width(keys: Keys, row: Architecture, blocks: int) -> tuple[int, ...]:
    """Rows of the gate and of the up matrix, by layer."""
    least = 0 if row.recurrent is not None else 1
    experts = keys.integer("expert_feed_forward_length", 0, _MAX_WIDTH, default=0)
    widths = keys.per_layer(
        "feed_forward_length", blocks, least, _MAX_WIDTH, default=(experts,) * blocks if experts else None
    )
    return tuple([width // 2 for width in widths]) if row.halves else widths


def _per_layer_width(keys: Keys, row: Architecture) -> int:
    if not row.per_layer_inputs:
        return 0
    least, default = (1, 256) if row.altup else (0, 0)
    return keys.integer("embedding_length_per_layer_input", least, _MAX_WIDTH // MAX_LAYERS, default=default)


def _sparsity(keys: Keys, row: Architecture, layers: int) -> tuple[float | None, ...]:
    if not row.altup:
        return (None,) * layers
    default = tuple([TOP_TWENTIETH if layer < 10 else -math.inf for layer in range(layers)])  # where nothing says it
    values = keys.reals("activation_sparsity_scale", layers, -math.inf, _MAX_FACTOR, default)
    return tuple([None if value < -_MAX_FACTOR else value for value in values])


def _windows(keys: Keys, row: Architecture, layers: int) -> tuple[int, ...]:
    if row.sliding is None:
        return (0,) * layers
    window = keys.integer("attention.sliding_window", 0, _MAX_CONTEXT, default=row.sliding.window)
    slides = keys.periodic("attention.sliding_window_pattern", layers, row.sliding.period, row.sliding.first)
    return tuple(window if slide else 0 for slide in slides)


def _kv_layers(keys: Keys, row: Architecture, kv_heads: tuple[int, ...], windows: tuple[int, ...]) -> tuple[int, ...]:
    """Whose keys and values a layer reads: the last ones share those of the last layer of their kind before them.

    The kinds are layers with a window, and layers that see everything.
    """
    layers = len(windows)
    if row.kv_layers is None:
        return tuple(range(layers))
    key = "attention.shared_kv_layers"
    own = layers - keys.integer(key, 0, layers - 1, default=max(layers - row.kv_layers, 0) if row.kv_layers else 0)
    last = {windows[layer]: layer for layer in range(own)}
    for layer in range(own, layers):
        read = last.get(windows[layer])
        if read is None or kv_heads[read] != kv_heads[layer]:
            problem = "none of its kind" if read is None else f"{kv_heads[read]} key-value heads"
            raise ModelError(
                f"{keys.prefix}{key}: layer {layer} has {kv_heads[layer]} key-value heads and shares those of an "
                f"earlier layer, found {problem} in the first {own} layers"
            )
    return (*range(own), *(last[window] for window in windows[own:]))


def _window_rope(keys: Keys, row: Architecture, rope: RopeConfig, head_dim: int) -> RopeConfig:
    if row.sliding is None:
        return rope
    rope = replace(rope, n_rot=_n_rot(keys, "rope.dimension_count_swa", head_dim, rope.n_rot))
    base = keys.real("rope.freq_base_swa", 1.001, 1e30, default=row.sliding.rope_base or rope.base)
    if row.sliding.stretched:
        return replace(rope, base=base)
    return replace(rope, base=base, scaling="none", factor=1.0, attention_factor=1.0)


def _attention_scale(keys: Keys, row: Architecture, layers: int, head_dim: int, share: int) -> float:
    if row.score_scale:
        return row.score_scale
    if layers == row.wide_scores:
        return 1.0 / math.sqrt(share)
    scale = keys.real(row.score_scale_key, 0.0, _MAX_FACTOR, default=0.0) if row.attention_scale else 0.0
    return scale or 1.0 / (head_dim if row.scores_by_width else math.sqrt(head_dim))


def _softcap(keys: Keys, key: str, default: float | None) -> float:
    return 0.0 if default is None else keys.real(key, 0.0, _MAX_FACTOR, default=default)


def _multipliers(keys: Keys, row: Architecture, width: int, layers: int) -> tuple[float, float, float]:
    """Scales of the embeddings, the residual branches and the logits."""
    own = row.multipliers
    if own is None:
        return math.sqrt(width) if row.root_width_embedding else 1.0, 1.0, 1.0
    defaults = {
        "embedding_scale": own.embedding,
        "residual_scale": own.depth / math.sqrt(layers),
        "logit_scale": own.width / width or own.logit,
    }
    embedding, residual, logits = (
        (keys.real(key, 0.0, _MAX_FACTOR, default=default) if own.from_file else default) or 1.0
        for key, default in defaults.items()
    )
    return embedding, residual, 1.0 / logits if own.logits == "divided" else logits


def _experts(keys: Keys, row: Architecture, blocks: int) -> ExpertConfig | None:
    routing = row.routing
    count = keys.integer("expert_count", 0, _MAX_EXPERTS, default=0, reason=_REASON)
    if not count:
        return None
    if routing is None:
        raise ModelError(f"{keys.prefix}expert_count: {keys.prefix[:-1]} has no mixture of experts, found {count}")
    gating, normalize, scale = routing.gating, routing.normalize, 0.0
    biased = routing.biased or gating
    if routing.from_file:
        number = keys.integer("expert_gating_func", 0, len(_GATINGS), default=0)
        gating, biased = (_GATINGS[number - 1],) * 2 if number else (gating, biased)
        if routing.from_file != "gating":
            normalize = keys.flag("expert_weights_norm", normalize)
            scale = keys.real("expert_weights_scale", 0.0, _MAX_FACTOR, default=0.0)
    used = keys.integer("expert_used_count", 1, min(count, _MAX_USED), reason=_REASON if count > _MAX_USED else "")
    limits = _limits(keys, row, "exp", blocks)
    return ExpertConfig(
        count, used, gating, normalize, scale or 1.0, routing.activation, routing.scales, routing.beside, limits,
        *_groups(keys, count, used), biased,
    )  # fmt: skip


def _groups(keys: Keys, count: int, used: int) -> tuple[int, int]:
    """Groups of experts, and how many of them experts are chosen from; 1 and 1 without groups."""
    groups = keys.integer("expert_group_count", 0, min(count, _MAX_EXPERT_GROUPS), default=0)
    if groups < 2:
        return 1, 1
    kept = keys.integer("expert_group_used_count", 1, groups)
    if count % groups or kept * (count // groups) < used:
        raise ModelError(
            f"{keys.prefix}expert_group_count: {count} experts are expected in equal groups, {kept} of which hold the "
            f"{used} that are used, found {groups} groups"
        )
    return groups, kept


def _head_dims(
    keys: Keys, width: int, heads: tuple[int, ...], row: Architecture
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Widths of a key and of a value, in layers that see everything and in sliding ones."""
    most = max(heads)
    share = width // most if most and width % most == 0 else None
    if row.latent:  # the keys without `_mla` are of the latent rows, but in files of models that do not absorb
        suffix = "_mla" if keys.integer("attention.key_length_mla", 0, _MAX_HEAD_DIM, default=0) else ""
        own = _key_and_value(keys, suffix, None, share)
        return own, own
    of_full = _key_and_value(keys, "", share if most else MIN_HEAD_DIM, None)
    return of_full, _key_and_value(keys, "_swa", *of_full) if row.sliding else of_full


def _key_and_value(keys: Keys, suffix: str, key: int | None, value: int | None) -> tuple[int, int]:
    """Widths of a key and of a value, and what they are where the file does not say it; values are as wide as keys."""
    key = keys.integer(f"attention.key_length{suffix}", 1, _MAX_HEAD_DIM, default=key, reason=_REASON)
    name = f"attention.value_length{suffix}"
    return key, keys.integer(name, 1, _MAX_HEAD_DIM, default=value or key, reason=_REASON)


def _latent(keys: Keys, rotated: int, key: int, value: int) -> LatentConfig:
    """Widths of latent attention. They are even, as those of known models are: kernels read activations in pairs."""
    rank = keys.integer("attention.kv_lora_rank", 2, _MAX_HEAD_DIM - rotated, reason=_REASON)
    of_key = "attention.key_length" + ("_mla" if keys.metadata.get(keys.prefix + "attention.key_length_mla") else "")
    for name, width in (("attention.kv_lora_rank", rank), (of_key, key)):
        if width % 2:
            raise ModelError(f"{keys.prefix}{name}: expected an even number, found {width}")
    return LatentConfig(rank, key - rotated, rotated, value)


def _vocabulary(keys: Keys) -> int:
    """Return the number of tokens in the tokenizer, as in llama.cpp; a file without one must have `vocab_size`."""
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return keys.integer("vocab_size", 1, _MAX_VOCABULARY)
    if isinstance(tokens, str) or not hasattr(tokens, "__len__") or not 1 <= len(tokens) <= _MAX_VOCABULARY:
        raise ModelError(f"tokenizer.ggml.tokens: expected a list of 1 to {_MAX_VOCABULARY} tokens, {found(tokens)}")
    return len(tokens)


def _rope(keys: Keys, row: Architecture, head_dim: int, context_length: int) -> RopeConfig:
    scaling = keys.metadata.get(keys.prefix + "rope.scaling.type", "linear")
    if not isinstance(scaling, str) or scaling not in get_args(RopeScaling):
        supported = ", ".join(get_args(RopeScaling))
        raise ModelError(f"{keys.prefix}rope.scaling.type: supported are {supported}, {found(scaling)}")
    old_factor = keys.real("rope.scale_linear", 0.0, _MAX_FACTOR, default=0.0)  # name of the key in files of 2023
    factor = keys.real("rope.scaling.factor", 0.0, _MAX_FACTOR, default=old_factor)
    extrapolation = keys.real("rope.scaling.yarn_ext_factor", -_MAX_FACTOR, _MAX_FACTOR, default=-1.0)
    original = keys.integer("rope.scaling.original_context_length", 0, _MAX_CONTEXT, default=0) or context_length
    logarithmic = keys.real("rope.scaling.yarn_log_multiplier", 0.0, _MAX_FACTOR, default=0.0)
    if row.latent:  # these files hold a tenth of it, and its models have as mscale what they have as mscale_all_dim
        logarithmic *= 10.0
    temperature_length = keys.integer("attention.temperature_length", 0, _MAX_CONTEXT, default=0) if row.latent else 0
    return RopeConfig(
        n_rot=_n_rot(keys, "rope.dimension_count", head_dim, head_dim),
        base=keys.real("rope.freq_base", 1.001, 1e30, default=10000.0),
        scaling=cast(RopeScaling, scaling),
        factor=1.0 if factor == 0.0 or scaling == "none" else factor,
        original_context=original,
        attention_factor=keys.real("rope.scaling.attn_factor", 0.0, _MAX_FACTOR, default=1.0),
        extrapolation=extrapolation if extrapolation >= 0.0 else 1.0,  # negative: not set
        beta_fast=keys.real("rope.scaling.yarn_beta_fast", 1e-6, _MAX_FACTOR, default=32.0),
        beta_slow=keys.real("rope.scaling.yarn_beta_slow", 1e-6, _MAX_FACTOR, default=1.0),
        multiplier=logarithmic if row.latent and logarithmic else 1.0,
        log_multiplier=logarithmic,
        temperature=keys.real("attention.temperature_scale", 0.0, _MAX_FACTOR, default=0.0),
        temperature_length=temperature_length or original,
        sections=_sections(keys),
    )


def _halved(keys: Keys, rope: RopeConfig) -> RopeConfig:
    if rope.n_rot % 4:
        raise ModelError(f"{keys.prefix}rope.dimension_count: expected a multiple of 4, found {rope.n_rot}")
    return replace(rope, n_rot=rope.n_rot // 2)


def _n_rot(keys: Keys, key: str, head_dim: int, default: int) -> int:
    n_rot = keys.integer(key, 2, head_dim, default=default)
    if n_rot % 2:
        raise ModelError(f"{keys.prefix}{key}: expected an even number, found {n_rot}")
    return n_rot


def _sections(keys: Keys) -> bool:
    value = keys.metadata.get(keys.prefix + "rope.dimension_sections", ())
    return not isinstance(value, str) and hasattr(value, "__len__") and len(value) >= 2 and bool(value[0] and value[1])
