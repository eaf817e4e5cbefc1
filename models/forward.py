"""Records the forward pass of a transformer as a plan, layer by layer; `models.layers` records a layer.

The tensors in the GGUF (biases, q/k norms, experts, output matrix, frequency factors) and the `Architecture` decide
what is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from localllm.base.notices import FILE, Notice, Setting
from localllm.models.architecture import Architecture
from localllm.models.attention import Attention, Ropes
from localllm.models.builder import Builder
from localllm.models.config import Config, MediaInput, RopeConfig
from localllm.models.errors import ModelError
from localllm.models.head import PoolingHead
from localllm.models.latent import LatentAttention
from localllm.models.media import MediaRecorder, axes_of
from localllm.models.rope import inverse_frequencies, magnitude
from localllm.models.tensors import Tensors
from localllm.plan import Plan, Recorder, Rope, Tensor, Value


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a recorded model that a drafter reads."""

    states: list[Value] = field(default_factory=list)  # the input of each layer, and the output of the last
    cached: dict[int, int] = field(default_factory=dict)  # layer -> cache layer, for layers with their own KV cache


def record(
    config: Config,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    context: int | None = None,
    embeddings: bool = False,
    every_row: bool = False,
    recorder: Recorder | None = None,
    parts: Parts | None = None,
    media: MediaInput | None = None,
) -> Plan:
    """Record the plan of this model's forward pass; raise ModelError for a missing or unsuitable tensor.

    `context` is the number of positions that the plan will serve (default: the model's). If a model has two sets of
    frequency factors, `context` selects one. Encoders return embeddings (T, width) instead of logits; other models do
    so with `embeddings`. With `every_row`, the plan's hidden states cover all tokens of a batch, as
    multi-token-prediction heads need, and not only the tokens whose logits are requested. `recorder` receives the
    operations (default: a new one), and `parts` the parts of the model that a drafter reads. With `media`, the plan
    takes embeddings of media tokens.
    """
    _check_layers(config, tensors)
    context = context or config.context_length
    checked = Tensors(tensors, architecture.ignored, partial(architecture.layers.stored, config))
    recorder = recorder or Recorder()
    builder = Builder(config, architecture, checked, recorder, media)
    spliced = MediaRecorder(builder)
    x = _embedded(builder, context, spliced)
    attention, recurrence = attention_of(builder, architecture, context), architecture.recurrence(builder)
    layers = architecture.layers(
        builder, attention, recurrence, architecture.feed_forward(builder), every_row, embeddings
    )
    x = layers.begin(x)
    for layer in range(config.layers):
        recorder.begin_layer()
        if parts is not None:
            parts.states.append(x)
        x = spliced.behind(layer, layers.layer(x, layer))
    recorder.begin_layer()
    if parts is not None:
        parts.states.append(x)
        parts.cached.update(attention.stored)
    hidden, x = layers.hidden(x), layers.end(x)
    if embeddings or architecture.encoder:
        PoolingHead.read(config, checked)  # check the head's tensors before weights are loaded
        normed = builder.norm(architecture.output_norm, x) if architecture.output_norm else x
        return recorder.finish(normed, checked.used())
    return architecture.output(builder).finish(x, architecture.output_norm, every_row=every_row, hidden=hidden)


def _check_layers(config: Config, tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelError for GGUFs that contain only multi-token-prediction heads, written by llama.cpp's converter with
    `--mtp`.
    """
    first = f"blk.{config.layers}.nextn.eh_proj.weight"
    if config.nextn_layers and first in tensors and not any(name.startswith("blk.0.") for name in tensors):
        problem = f"{first}: the file has only next-token heads; open the model's own file, with "
        raise ModelError(Notice(problem, Setting("model_draft", FILE), " for this one"))


def _embedded(builder: Builder, context: int, media: MediaRecorder) -> Value:
    """Return token embeddings, plus type and position embeddings if the GGUF has them.

    A scale in the GGUF (Granite, MiniCPM) applies to media too, the scale of Gemma only to the text.
    """
    config, recorder = builder.config, builder.recorder
    x = recorder.embed(builder.tensors.matrix("token_embd.weight", config.vocabulary, config.width))
    if builder.row.multipliers:
        x = media.embedded(x)
    if config.embedding_scale != 1.0:
        x = recorder.scale(x, config.embedding_scale)
    if not builder.row.multipliers:
        x = media.embedded(x)
    x = _with_positions(builder, _with_type(builder, x), context)
    # LFM2's output norm has this name
    return x if builder.row.output_norm == "token_embd_norm" else builder.optional_norm("token_embd_norm", x)


def attention_of(builder: Builder, architecture: Architecture, context: int) -> Attention:
    """Return the attention of all layers, with rotations for this context length."""
    config = builder.config
    kind = LatentAttention if config.latent else architecture.attention
    factors = _factors(config, builder.tensors, context)
    media = builder.media is not None
    full = _ropes(config, architecture, config.rope, factors, media)
    sliding = _ropes(config, architecture, config.window_rope, factors if kind.sliding_factors else None, media)
    selector = None
    if config.indexer is not None and architecture.indexer is not None:
        selector = architecture.selector(builder, config.indexer, architecture.indexer, context)
    return kind(builder, full, sliding, selector)


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


def _factors(config: Config, tensors: Tensors, context: int) -> list[float] | None:
    """Return the frequency factors: one set for all contexts, or the short or long set."""
    beyond = "long" if context > config.rope.original_context else "short"
    most = max(config.rope.n_rot, config.window_rope.n_rot) // 2
    for name in ("rope_freqs.weight", f"rope_factors_{beyond}.weight"):
        factors = tensors.optional_numbers(name, most)
        if factors is not None:
            if not factors.all():
                raise ModelError(f"{name}: contains a zero; frequencies are divided by these numbers")
            return [float(f) for f in factors]
    return None


def _ropes(
    config: Config, architecture: Architecture, rope: RopeConfig, factors: list[float] | None, media: bool
) -> Ropes:
    """Return the rotations of queries and of keys, which differ at most by the query temperature.

    If the model takes `media`, pairs turn by several positions per token (M-RoPE).
    """
    if rope.temperature and config.latent is None and {rope.n_rot} != set(config.head_dim):
        raise ModelError(
            f"{config.architecture}.attention.temperature_scale: needs rope.dimension_count equal to the head width "
            f"{config.head_dim[0]}, found {rope.n_rot}"
        )
    style = "neox" if rope.sections and architecture.sections else architecture.rope_style or "interleaved"
    own = None if factors is None else factors[: rope.n_rot // 2]
    axes: tuple[int, ...] = ()
    if media and rope.sections and architecture.axes:
        axes = axes_of(rope.sections, rope.n_rot // 2, architecture.axes == "interleaved")
    keys = Rope(style, rope.n_rot, inverse_frequencies(rope, own), magnitude(rope), axes=axes)
    if not rope.temperature:
        return Ropes(keys, keys)
    return Ropes(replace(keys, temperature=rope.temperature, temperature_length=rope.temperature_length), keys)
