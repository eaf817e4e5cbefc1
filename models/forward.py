"""Records the forward pass of a transformer as a plan, layer by layer; `models.layers` records a layer.

The tensors in the GGUF (biases, q/k norms, experts, output matrix, frequency factors) and the `Architecture` decide
what is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from localllm.models.altup import AltUpRecorder
from localllm.models.architecture import Architecture
from localllm.models.attention import NOT_ROTATED, Attention, Ropes
from localllm.models.builder import Builder
from localllm.models.checkpoints import CheckpointRecorder
from localllm.models.compressed import CompressedAttention
from localllm.models.config import Config, RopeConfig
from localllm.models.connections import ConnectionRecorder
from localllm.models.decoder import decoder_of, tensors_of
from localllm.models.distances import name_in_stack
from localllm.models.errors import ModelError
from localllm.models.feed_forward import FeedForward
from localllm.models.head import PoolingHead
from localllm.models.indexer import Selector
from localllm.models.latent import LatentAttention
from localllm.models.layers import LateNorms, LayerRecorder
from localllm.models.low_rank import LowRankRecorder
from localllm.models.per_layer import PerLayer
from localllm.models.recurrent import Recurrence
from localllm.models.rope import inverse_frequencies, magnitude
from localllm.models.rwkv import MIXERS as RWKV_MIXERS
from localllm.models.rwkv import RwkvLayers, TimeMix
from localllm.models.stacks import LoopRecorder, StackRecorder, stored_name
from localllm.models.tensors import Tensors
from localllm.plan import Plan, Recorder, Rope, Tensor, Value

_FEW = 32  # columns of a matrix of zeros; any small number works


def record(
    config: Config,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    context: int | None = None,
    embeddings: bool = False,
    every_row: bool = False,
) -> Plan:
    """Record the plan of this model's forward pass; raise ModelError for a missing or unsuitable tensor.

    `context` is the number of positions that the plan will serve (default: the model's). If a model has two sets of
    frequency factors, `context` selects one. Encoders return embeddings (T, width) instead of logits; other models do
    so with `embeddings`. With `every_row`, the plan's hidden states cover all tokens of a batch, as
    multi-token-prediction heads need, and not only the tokens whose logits are requested.
    """
    _check_layers(config, tensors)
    checked, recorder = Tensors(tensors, architecture.ignored, _stored(config, architecture)), Recorder()
    table = checked.matrix("token_embd.weight", config.vocabulary, config.width)
    x = recorder.embed(table)
    if config.embedding_scale != 1.0:
        x = recorder.scale(x, config.embedding_scale)
    builder = Builder(config, architecture, checked, recorder)
    if architecture.embedding_norm:
        x = recorder.rms_norm(x, checked.ones(x.width), config.eps)
    x = _with_type(builder, x)
    x = _with_positions(builder, x, context or config.context_length)
    if architecture.output_norm != "token_embd_norm":  # LFM2's name for the output norm
        x = builder.optional_norm("token_embd_norm", x)
    embedding = x
    per_layer = PerLayer(builder) if config.per_layer_width else None
    if per_layer is not None:
        per_layer.begin(x)
    attention = attention_of(builder, context or config.context_length)
    recurrence = _recurrence(builder)
    all_rows = every_row or (config.decoder is not None and not embeddings)
    layers = _kind(config, architecture)(builder, attention, recurrence, FeedForward(builder), per_layer, all_rows)
    x = layers.begin(x)
    for layer in range(config.layers):
        recorder.begin_layer()
        x = layers.layer(x, layer)
        if architecture.embedding_skip:
            x = _skip(builder, embedding, x, layer)
    if config.decoder is None or embeddings:
        recorder.begin_layer()
    hidden, x = layers.hidden(x), layers.end(x)
    if embeddings or architecture.encoder:
        PoolingHead.read(config, checked)  # check the head's tensors before weights are loaded
        normed = builder.norm(architecture.output_norm, x) if architecture.output_norm else x
        return recorder.finish(normed, checked.used())
    if config.decoder is not None:
        decoder = decoder_of(builder, tensors_of(checked))
        x = decoder.record(builder.norm(architecture.output_norm, x), table)
        recorder.begin_layer()
        return finish(decoder.builder, x, architecture.decoder, "output")
    return finish(builder, x, architecture.output_norm, "output", every_row, hidden)


def _check_layers(config: Config, tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelError for GGUFs that contain only multi-token-prediction heads, written by llama.cpp's converter with
    `--mtp`.
    """
    first = f"blk.{config.layers}.nextn.eh_proj.weight"
    if config.nextn_layers and first in tensors and not any(name.startswith("blk.0.") for name in tensors):
        raise ModelError(f"{first}: the file holds next-token heads and no layers; open the file of the model itself")


def _stored(config: Config, architecture: Architecture) -> Callable[[str], str]:
    """Return the function that maps a tensor name to its name in the GGUF."""
    if architecture.stack:
        return partial(name_in_stack, architecture.stack)
    return str if config.stacks is None else partial(stored_name, config.stacks)


def _kind(config: Config, architecture: Architecture) -> type[LayerRecorder]:
    """Return the class that records a layer."""
    if architecture.recurrent is not None and architecture.recurrent.channel_mix:
        return RwkvLayers
    if config.connections is not None:
        return LowRankRecorder if config.connections.rank else ConnectionRecorder
    if config.checkpoint_interval:
        return CheckpointRecorder
    if config.norms_follow:
        return LateNorms
    if config.stacks is not None:
        return StackRecorder if architecture.stacks else LoopRecorder
    return AltUpRecorder if config.streams else LayerRecorder


def _recurrence(builder: Builder) -> Recurrence:
    own = builder.row.recurrent
    return TimeMix(builder) if own is not None and own.mixer in RWKV_MIXERS else Recurrence(builder)


def finish(
    builder: Builder, x: Value, norm: str, output: str, every_row: bool = False, hidden: Value | None = None
) -> Plan:
    """Finish the plan with the named norm and output matrix. With `every_row`, select the requested tokens here.

    `hidden` is the input of multi-token-prediction heads if it differs from the output's input.
    """
    normed = builder.norm(norm, x) if norm else x
    wanted = builder.recorder.select_rows(normed) if every_row else normed
    logits = _logits(builder, wanted, output)
    read = hidden or (normed if builder.row.heads_norm else x)
    return builder.recorder.finish(logits, builder.tensors.used(), read)


def _logits(builder: Builder, x: Value, name: str) -> Value:
    """Return the logits of normed hidden states; without the named matrix, the output is tied to
    the embedding table."""
    config, recorder, tensors = builder.config, builder.recorder, builder.tensors
    given = f"{name}.weight" in tensors
    rows = config.vocabulary
    if given and builder.row.narrow_output:
        rows = min(rows, tensors.height(f"{name}.weight"))
    weight = tensors.matrix(f"{name}.weight" if given else "token_embd.weight", rows, config.width)
    scale = config.logit_scale * (builder.scale(name) if given else 1.0)
    if builder.row.decoder and not given:  # T5 was trained with this scale for tied embeddings
        scale *= config.width**-0.5
    bias = tensors.optional(f"{name}.bias", rows)
    if (silent := range(*builder.row.silent)) and bias is None:
        bias = tensors.numbers(f"silent({rows})", [-math.inf if i in silent else 0.0 for i in range(rows)])
    logits = recorder.linear(x, weight, bias, scale)
    if rows < config.vocabulary:
        logits = recorder.concat(_never(builder, x, config.vocabulary - rows), logits)
    return recorder.softcap(logits, config.logit_softcap) if config.logit_softcap else logits


def _never(builder: Builder, x: Value, count: int) -> Value:
    """Return minus infinity as the logits of `count` tokens that are never generated, for any x."""
    recorder, tensors = builder.recorder, builder.tensors
    few = min(_FEW, x.width)
    nothing = tensors.constant_rows(f"zeros({few})", [0.0] * few, count)
    bias = tensors.numbers(f"-inf({count})", [-math.inf] * count)
    return recorder.linear(recorder.slice(x, 0, few), nothing, bias)


def attention_of(builder: Builder, context: int) -> Attention:
    """Return the attention of all layers, with rotations for this context length."""
    config, architecture = builder.config, builder.row
    factors = _factors(config, builder.tensors, context)
    full = _ropes(config, architecture, config.rope, factors)
    of_sliding = factors if architecture.sliding is None or architecture.sliding.factors else None
    sliding = _ropes(config, architecture, config.window_rope, of_sliding)
    still = _still(config, architecture)
    selector = None
    if config.indexer is not None and architecture.indexer is not None:
        selector = Selector(builder, config.indexer, architecture.indexer, context)
    kind = CompressedAttention if config.compression else LatentAttention if config.latent else Attention
    return kind(builder, full, sliding, still=still, selector=selector)


def _with_type(builder: Builder, x: Value) -> Value:
    """Add the embedding of token type 0, the type of a single text."""
    name, count = "token_types.weight", builder.tensors.height("token_types.weight")
    if not count:
        return x
    first = builder.tensors.rows(name, 0, 1, count, x.width)
    # positions past the table's end read its last row
    return builder.recorder.add(x, builder.recorder.embed(first, positions=True))


def _with_positions(builder: Builder, x: Value, context: int) -> Value:
    """Add learned position embeddings if the GGUF has them."""
    name, count = "position_embd.weight", builder.tensors.height("position_embd.weight")
    if not count:
        return x
    if context > count:
        raise ModelError(f"{name}: holds {count} positions, fewer than the context of {context}; use a smaller context")
    positions = builder.recorder.embed(builder.tensors.matrix(name, count, x.width), positions=True)
    return builder.recorder.add(x, positions)


def _skip(builder: Builder, embedding: Value, x: Value, layer: int) -> Value:
    """Add the token embedding after a layer, times the layer's scale."""
    name, recorder = f"blk.{layer}.layer_output_scale.weight", builder.recorder
    scale = builder.tensors.optional_numbers(name, 1)
    if scale is None:
        raise ModelError(f"{name}: the file does not hold this tensor; expected shape (1)")
    own = recorder.select_rows(embedding) if embedding.rows != x.rows else embedding
    return recorder.add(x, recorder.scale(own, float(scale[0])))


def _still(config: Config, architecture: Architecture) -> Ropes:
    """Return rotations by angle 0 that only apply the position-dependent query temperature, if there is one."""
    if architecture.unrotated_temperature is None or not any(config.windows):
        return NOT_ROTATED
    (growth, length), head_dim = architecture.unrotated_temperature, config.head_dim[0]
    if head_dim % 2:
        raise ModelError(f"{config.architecture}.attention.key_length: expected an even number, found {head_dim}")
    angles = (0.0,) * (head_dim // 2)
    own = Rope("interleaved", head_dim, angles, temperature=growth, temperature_length=length, temperature_start=1)
    return Ropes(own, None)


def _factors(config: Config, tensors: Tensors, context: int) -> list[float] | None:
    """Return the frequency factors: one set for all contexts, or the short or long set."""
    beyond = "long" if context > config.rope.original_context else "short"
    most = max(config.rope.n_rot, config.window_rope.n_rot) // 2
    for name in ("rope_freqs.weight", f"rope_factors_{beyond}.weight"):
        factors = tensors.optional_numbers(name, most)
        if factors is not None:
            if not factors.all():
                raise ModelError(f"{name}: holds a zero; frequencies are divided by these numbers")
            return [float(f) for f in factors]
    return None


def _ropes(config: Config, architecture: Architecture, rope: RopeConfig, factors: list[float] | None) -> Ropes:
    """Return the rotations of queries and of keys, which differ at most by the query temperature."""
    if rope.temperature and config.latent is None and {rope.n_rot} != set(config.head_dim):
        raise ModelError(
            f"{config.architecture}.attention.temperature_scale: needs rope.dimension_count equal to the head width "
            f"{config.head_dim[0]}, found {rope.n_rot}"
        )
    style = "neox" if rope.sections and architecture.sections else architecture.rope_style or "interleaved"
    own = None if factors is None else factors[: rope.n_rot // 2]
    keys = Rope(style, rope.n_rot, inverse_frequencies(rope, own), magnitude(rope))
    if not rope.temperature:
        return Ropes(keys, keys)
    return Ropes(replace(keys, temperature=rope.temperature, temperature_length=rope.temperature_length), keys)
