"""Reads a model's configuration from its GGUF: converts metadata keys to an immutable, validated `Config`.

Every count is bounded, so a malicious file causes an error message instead of a huge loop or allocation. Zero means
"not set" wherever llama.cpp treats it so.
"""

from __future__ import annotations

import math
from typing import Literal, cast, get_args

from localllm.models.config import Config, Pooling
from localllm.models.errors import ModelError
from localllm.models.properties import Properties
from localllm.models.reading.attention import (
    check_layouts,
    read_alibi,
    read_attention_scale,
    read_head_dims,
    read_heads,
    read_latent,
    read_windows,
)
from localllm.models.reading.bounds import MAX_CONTEXT, MAX_FACTOR, MAX_LAYERS, MAX_WIDTH
from localllm.models.reading.feed_forward import read_activation, read_experts, read_ffn_width, read_limits
from localllm.models.reading.indexer import read_indexer
from localllm.models.reading.keys import Keys, found
from localllm.models.reading.mixers import read_mixers, read_recurrent
from localllm.models.reading.rope import read_rope, read_rotated, read_window_rope
from localllm.plan import NormKind

_MAX_VOCABULARY = 1 << 24


def read_general(keys: Keys, row: Properties, head: int = 0) -> Config:
    """Read the keys that the general code uses. The arguments are as in `Architecture.read`."""
    blocks, nextn_layers = read_blocks(keys, head)
    layers = blocks - nextn_layers
    width = keys.integer("embedding_length", 1, MAX_WIDTH)
    context_length = keys.integer("context_length", 1, MAX_CONTEXT)
    heads, kv_heads = read_heads(keys, row, blocks)
    ffn_width = read_ffn_width(keys, row, blocks)[:layers]
    attends, recurs = read_mixers(keys, row, kv_heads, ffn_width)
    windows = read_windows(keys, row, blocks)[:layers]
    check_layouts(keys, heads, kv_heads, windows)
    of_full, of_sliding = read_head_dims(keys, width, heads, row)
    head_dim, value_dim = zip(*[of_sliding if window else of_full for window in windows], strict=True)
    rope = read_rope(keys, row, of_full[0], context_length)
    window_rope = read_window_rope(keys, row, rope, of_sliding[0])
    embedding_scale, residual_scale, logit_scale = read_multipliers(keys, row.multipliers)
    causal = _causal(keys, row)
    deepstack = _deepstack(keys, blocks)
    return Config(
        architecture=row.name,
        layers=layers,
        width=width,
        heads=heads[:layers],
        kv_heads=kv_heads[:layers],
        head_dim=head_dim,
        value_dim=value_dim,
        latent=read_latent(keys, rope.n_rot, *of_full) if row.latent else None,
        window_latent=read_latent(keys, rope.n_rot, *of_sliding, "_swa") if row.latent and row.sliding else None,
        indexer=read_indexer(keys, row, windows, context_length, attends, head),
        kv_layer=tuple(range(layers)),
        ffn_width=ffn_width,
        vocabulary=read_vocabulary(keys),
        context_length=context_length,
        eps=keys.real(eps_key(row, row.norm), 1e-20, 1.0),
        rope=rope,
        window_rope=window_rope,
        rotated=read_rotated(row, windows),
        windows=windows,
        norm=row.norm,
        alibi=read_alibi(keys, row.alibi),
        limits=read_limits(keys, row, "shexp", blocks),
        attention_scale=tuple([read_attention_scale(keys, row, size) for size in head_dim]),
        clamp=keys.real("attention.clamp_kqv", 0.0, MAX_FACTOR, default=0.0) if row.clamp else 0.0,
        logit_softcap=read_softcap(keys, "final_logit_softcapping", row.logit_softcap),
        embedding_scale=math.sqrt(width) if row.root_width_embedding else embedding_scale,
        residual_scale=residual_scale,
        logit_scale=logit_scale,
        experts=read_experts(keys, row, blocks),
        parallel=row.parallel,
        recurrent=read_recurrent(keys, row, heads),
        attends=attends,
        recurs=recurs,
        nextn_layers=nextn_layers,
        causal=causal,
        activation=read_activation(keys, row),
        pooling=read_pooling(keys, "pooling_type", "last" if causal else "mean"),
        classifier_pooling=read_pooling(keys, "classifier.pooling_type", "last" if causal else "cls"),
        deepstack=deepstack[:layers],
    )


def _deepstack(keys: Keys, blocks: int) -> tuple[int, ...]:
    """Return the stream of media embeddings that is added before each layer (Granite 4 Vision), or ()."""
    listed = keys.per_layer("deepstack_mapping", blocks, -1, blocks, (-1,) * blocks, longer=True)
    streams = {stream for stream in listed if stream > 0}
    if not streams:
        return ()
    if max(streams) > len(streams):
        problem = f"stream {max(streams)} is listed, and there are {1 + len(streams)} streams"
        raise ModelError(f"{keys.prefix}deepstack_mapping: {problem}")
    return tuple([stream if layer and stream > 0 else -1 for layer, stream in enumerate(listed)])


def read_blocks(keys: Keys, head: int = 0) -> tuple[int, int]:
    """Return the number of layers in the GGUF, and how many of them, the last, are heads that are not counted."""
    blocks = keys.integer("block_count", 1, MAX_LAYERS)
    return blocks, keys.integer("nextn_predict_layers", head, blocks - 1, default=0) - head


def _causal(keys: Keys, row: Properties) -> bool:
    causal = keys.flag("attention.causal", not row.encoder) and not row.diffusion  # diffusion models ignore the key
    if row.recurrent is not None or row.latent:
        check_causal(row.name, causal)
    return causal


def check_causal(architecture: str, causal: bool) -> None:
    if not causal:
        raise ModelError(f"{architecture}.attention.causal: only causal models (true) are supported, found false")


def eps_key(row: Properties, norm: NormKind) -> str:
    """Return the key of the norm epsilon for norms of this kind, without the architecture's prefix."""
    return f"attention.layer_norm{'_rms' if norm == 'rms' or row.rms_eps else ''}_epsilon"


def read_softcap(keys: Keys, key: str, default: float | None) -> float:
    return 0.0 if default is None else keys.real(key, 0.0, MAX_FACTOR, default=default)


def read_multipliers(
    keys: Keys, logits: Literal["", "multiplied", "divided"], embedding: float = 0.0, residual: float = 0.0,
    logit: float = 0.0,
) -> tuple[float, float, float]:  # fmt: skip
    """Return the scale factors of the embeddings, the residual branches and the logits, with defaults for the keys."""
    if not logits:
        return 1.0, 1.0, 1.0
    defaults = {"embedding_scale": embedding, "residual_scale": residual, "logit_scale": logit}
    embedding, residual, logit = (
        keys.real(key, 0.0, MAX_FACTOR, default=default) or 1.0 for key, default in defaults.items()
    )
    return embedding, residual, 1.0 / logit if logits == "divided" else logit


def read_vocabulary(keys: Keys) -> int:
    """Return the tokenizer's vocabulary size, as in llama.cpp; a GGUF without a tokenizer must set `vocab_size`."""
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return keys.integer("vocab_size", 1, _MAX_VOCABULARY)
    if isinstance(tokens, str) or not hasattr(tokens, "__len__") or not 1 <= len(tokens) <= _MAX_VOCABULARY:
        raise ModelError(f"tokenizer.ggml.tokens: expected a list of 1 to {_MAX_VOCABULARY} tokens, {found(tokens)}")
    return len(tokens)


def read_pooling(keys: Keys, key: str, default: Pooling) -> Pooling:
    """Return the pooling; -1 and the largest uint32 mean "not set"."""
    number = keys.integer(key, -1, (1 << 32) - 1, default=-1)
    if number not in (-1, (1 << 32) - 1) and number >= len(get_args(Pooling)):
        supported = ", ".join(f"{n} ({name})" for n, name in enumerate(get_args(Pooling)))
        raise ModelError(f"{keys.prefix}{key}: supported are {supported}, found {number}")
    return default if number in (-1, (1 << 32) - 1) else cast(Pooling, get_args(Pooling)[number])
