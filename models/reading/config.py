"""Reads a model's configuration from its GGUF: converts metadata keys to an immutable, validated `Config`.

Every count is bounded, so a malicious file causes an error message instead of a huge loop or allocation. Zero means
"not set" wherever llama.cpp treats it so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast, get_args

from localllm.models.architecture import Architecture
from localllm.models.architectures import ARCHITECTURES
from localllm.models.config import Config, DecoderConfig, Pooling
from localllm.models.errors import ModelError
from localllm.models.reading.attention import (
    check_layouts,
    read_alibi,
    read_attention_scale,
    read_head_dims,
    read_kv_layers,
    read_latent,
    read_windows,
)
from localllm.models.reading.bounds import (
    MAX_BUCKETS,
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_FACTOR,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    REASON,
)
from localllm.models.reading.compression import compressed_rope, read_compression
from localllm.models.reading.connections import read_connections
from localllm.models.reading.feed_forward import (
    read_activation,
    read_caps,
    read_experts,
    read_ffn_width,
    read_limits,
    read_sparsity,
    read_xielu,
)
from localllm.models.reading.indexer import read_indexer
from localllm.models.reading.keys import Keys, found
from localllm.models.reading.mixers import read_mixers, read_recurrent
from localllm.models.reading.ngrams import read_ngrams
from localllm.models.reading.rope import halved, read_rope, read_rotated, read_window_rope
from localllm.models.reading.stacks import read_loops, read_passes, read_stacks
from localllm.plan import NormKind

_MAX_VOCABULARY = 1 << 24
_MAX_STREAMS = 64  # maximum residual streams; known models have 4


def read_config(metadata: Mapping[str, Any], architecture: str, head: int = 0) -> Config:
    """Read the `Config` of a model from the keys with prefix `architecture + "."`; ModelError names the invalid key.

    `head` is the number of multi-token-prediction heads to count as layers after the model's layers.
    """
    row, keys = ARCHITECTURES[architecture], Keys(metadata, architecture + ".")
    blocks = keys.integer("block_count", 1, MAX_LAYERS)
    blocks *= (passes := read_passes(keys, blocks) if row.loops else 1)
    nextn_layers = keys.integer("nextn_predict_layers", head, blocks - 1, default=0) - head
    layers = blocks - nextn_layers
    width = keys.integer("embedding_length", 1, MAX_WIDTH)
    context_length = keys.integer("context_length", 1, MAX_CONTEXT)
    if row.sliding is not None and row.sliding.depth not in (0, layers):
        row = replace(row, sliding=None)
    norm, count = _norm(keys, row), keys.integer("expert_count", 0, MAX_EXPERTS, default=0, reason=REASON)
    fewest = 0 if row.recurrent is not None else 1
    heads = keys.per_layer("attention.head_count", blocks, fewest, MAX_HEADS, reason=REASON)
    kv_heads = keys.per_layer("attention.head_count_kv", blocks, fewest, MAX_HEADS, default=heads, reason=REASON)
    for layer, (many, few) in enumerate(zip(heads, kv_heads, strict=True)):
        if many % few if few else many and row.recurrent is None:
            raise ModelError(
                f"{architecture}.attention.head_count_kv: {many} heads are not a multiple of {few} key-value heads "
                f"(layer {layer})"
            )
    ffn_width = read_ffn_width(keys, row, blocks)[:layers]
    attends, recurs = read_mixers(keys, row, kv_heads, ffn_width)
    windows = read_windows(keys, row, blocks)[:layers]
    check_layouts(keys, heads, kv_heads, windows)
    of_full, of_sliding = read_head_dims(keys, width, heads, row)
    head_dim, value_dim = zip(*[of_sliding if window else of_full for window in windows], strict=True)
    rope = read_rope(keys, row, of_full[0], context_length)
    window_rope = read_window_rope(keys, row, rope, of_sliding[0])
    if row.compressed:
        rope = compressed_rope(keys, rope)
    embedding_scale, residual_scale, logit_scale = _multipliers(keys, row, width, layers)
    return Config(
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads[:layers],
        kv_heads=kv_heads[:layers],
        head_dim=head_dim,
        value_dim=value_dim,
        latent=read_latent(keys, rope.n_rot, *of_full) if row.latent else None,
        window_latent=read_latent(keys, rope.n_rot, *of_sliding, "_swa") if row.latent and row.sliding else None,
        indexer=read_indexer(keys, row, windows, kv_heads[:layers], context_length, attends, head),
        kv_layer=read_kv_layers(keys, row, kv_heads[:layers], windows),
        ffn_width=ffn_width,
        vocabulary=_vocabulary(keys),
        context_length=context_length,
        eps=keys.real(eps_key(row, norm), 0.0 if row.eps else 1e-20, 1.0) or row.eps,
        rope=halved(keys, rope) if row.sliding and row.sliding.half else rope,
        window_rope=window_rope,
        rotated=read_rotated(keys, row, windows),
        windows=windows,
        norm=norm,
        alibi=read_alibi(keys, row, layers),
        buckets=keys.integer("attention.relative_buckets_count", 4, MAX_BUCKETS) if row.distances else 0,
        unit_qk_norm=row.unit_qk_norm and not (row.unit_qk_norm_but and row.unit_qk_norm_but == count),
        limits=read_limits(keys, row, "shexp", blocks),
        xielu=read_xielu(keys, layers) if row.activation == "xielu" else (),
        attention_scale=tuple(
            [read_attention_scale(keys, row, layers, size, width // max(1, *heads)) for size in head_dim]
        ),
        value_scale=(keys.real("attention.value_scale", 0.0, MAX_FACTOR, 0.0) if row.value_scale else 0.0) or 1.0,
        clamp=keys.real("attention.clamp_kqv", 0.0, MAX_FACTOR, default=0.0) if row.clamp else 0.0,
        attention_softcap=_softcap(keys, "attn_logit_softcapping", row.attention_softcap),
        logit_softcap=_softcap(keys, "final_logit_softcapping", row.logit_softcap),
        embedding_scale=embedding_scale,
        residual_scale=residual_scale,
        logit_scale=logit_scale,
        experts=None if "expert_count" in row.ignored else read_experts(keys, row, blocks),
        norms_follow=row.swin and keys.flag("swin_norm", False),
        parallel=keys.flag("use_parallel_residual", True) if row.parallel_key else row.parallel,
        streams=(streams := keys.integer("altup.num_inputs", 2, _MAX_STREAMS, default=4) if row.altup else 0),
        active_stream=keys.integer("altup.active_idx", 0, streams - 1, default=0) if row.altup else 0,
        connections=read_connections(keys, row),
        ngrams=read_ngrams(keys, _vocabulary(keys), recurs) if row.ngrams else None,
        compression=read_compression(keys, heads[:layers], kv_heads[:layers], windows, (*of_sliding, rope.n_rot))
        if row.compressed
        else None,
        checkpoint_interval=keys.integer("attn_res.block_size", 0, MAX_LAYERS) if row.checkpoints else 0,
        cap_ratio=read_caps(keys)[1] / read_caps(keys)[0] if row.limits == "situ" else 1.0,
        sparsity=read_sparsity(keys, row, layers),
        per_layer_width=_per_layer_width(keys, row),
        recurrent=read_recurrent(keys, row, heads),
        stacks=read_stacks(keys, layers) if row.stacks else read_loops(keys, layers, passes),
        decoder=_decoder(keys, layers) if row.decoder else None,
        attends=attends,
        recurs=recurs,
        nextn_layers=nextn_layers,
        causal=(causal := _causal(keys, row)),
        activation=read_activation(keys, row),
        pooling=_pooling(keys, "pooling_type", "last" if causal else "mean"),
        classifier_pooling=_pooling(keys, "classifier.pooling_type", "last" if causal else row.classifier_pooling),
    )


def _causal(keys: Keys, row: Architecture) -> bool:
    if row.decoder:
        return False
    causal = keys.flag("attention.causal", not row.encoder) and not row.diffusion  # diffusion models ignore the key
    if not causal and (row.recurrent is not None or row.kv_layers is not None or row.latent):
        raise ModelError(f"{row.name}.attention.causal: only causal models (true) are supported, found false")
    return causal


def _decoder(keys: Keys, layers: int) -> DecoderConfig:
    """Read the decoder's config; the decoder start token defaults to BOS."""
    count = keys.integer("decoder_block_count", 1, MAX_LAYERS, default=layers)
    own, last = replace(keys, prefix=""), _vocabulary(keys) - 1
    starts = "tokenizer.ggml.bos_token_id"
    default = own.integer(starts, 0, last) if starts in keys.metadata else None
    return DecoderConfig(count, keys.integer("decoder_start_token_id", 0, last, default=default))


def _norm(keys: Keys, row: Architecture) -> NormKind:
    rms = row.norm_by_eps and keys.real("attention.layer_norm_rms_epsilon", 0.0, 1.0, default=0.0) > 0.0
    return "rms" if rms else row.norm


def eps_key(row: Architecture, norm: NormKind) -> str:
    """Return the key of the norm epsilon for norms of this kind, without the architecture's prefix."""
    return f"attention.layer_norm{'_rms' if norm == 'rms' or row.rms_eps else ''}_epsilon"


def _softcap(keys: Keys, key: str, default: float | None) -> float:
    return 0.0 if default is None else keys.real(key, 0.0, MAX_FACTOR, default=default)


def _multipliers(keys: Keys, row: Architecture, width: int, layers: int) -> tuple[float, float, float]:
    """Return the scale factors of the embeddings, the residual branches and the logits."""
    own = row.multipliers
    if own is None:
        return math.sqrt(width) if row.root_width_embedding else 1.0, 1.0, 1.0
    defaults = {
        "embedding_scale": own.embedding,
        "residual_scale": own.depth / math.sqrt(layers),
        "logit_scale": own.width / width or own.logit,
    }
    embedding, residual, logits = (
        (keys.real(key, 0.0, MAX_FACTOR, default=default) if own.from_file else default) or 1.0
        for key, default in defaults.items()
    )
    return embedding, residual, 1.0 / logits if own.logits == "divided" else logits


def _per_layer_width(keys: Keys, row: Architecture) -> int:
    if not row.per_layer_inputs:
        return 0
    least, default = (1, 256) if row.altup else (0, 0)
    return keys.integer("embedding_length_per_layer_input", least, MAX_WIDTH // MAX_LAYERS, default=default)


def _vocabulary(keys: Keys) -> int:
    """Return the tokenizer's vocabulary size, as in llama.cpp; a GGUF without a tokenizer must set `vocab_size`."""
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return keys.integer("vocab_size", 1, _MAX_VOCABULARY)
    if isinstance(tokens, str) or not hasattr(tokens, "__len__") or not 1 <= len(tokens) <= _MAX_VOCABULARY:
        raise ModelError(f"tokenizer.ggml.tokens: expected a list of 1 to {_MAX_VOCABULARY} tokens, {found(tokens)}")
    return len(tokens)


def _pooling(keys: Keys, key: str, default: Pooling) -> Pooling:
    """Return the pooling; -1 and the largest uint32 mean "not set"."""
    number = keys.integer(key, -1, (1 << 32) - 1, default=-1)
    if number not in (-1, (1 << 32) - 1) and number >= len(get_args(Pooling)):
        supported = ", ".join(f"{n} ({name})" for n, name in enumerate(get_args(Pooling)))
        raise ModelError(f"{keys.prefix}{key}: supported are {supported}, found {number}")
    return default if number in (-1, (1 << 32) - 1) else cast(Pooling, get_args(Pooling)[number])
