"""Gemma 4's assistants: a few layers without keys and values, which draft for Gemma 4 and read its KV cache.

A matrix projects the model's embedding of a token and the hidden state before it to the drafter's width
(`nextn.pre_projection`). The layers attend to the cache of the model's last layer, which has full attention, or of the
sliding-window layer before. All drafts of a step have the position of the newest token. Centroids of the vocabulary
(`masked_embd_*`), which would shorten the output product, are unused, as in llama.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from localllm.models.architecture import Architecture
from localllm.models.attention import Ropes
from localllm.models.builder import Builder
from localllm.models.config import Config
from localllm.models.draft_architecture import DraftArchitecture, Drafter, Target
from localllm.models.errors import ModelError
from localllm.models.families.gemma import ROWS as GEMMAS
from localllm.models.families.gemma import Gemma4Attention
from localllm.models.forward import Parts, attention_of, record
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import DraftHead, Plan, Recorder

ROWS: tuple[Architecture, ...] = ()  # it is not a model
_FULL, _SLIDING = -1, -2  # layers of the model, counted from the end


class AssistantAttention(Gemma4Attention):
    """Queries have the position after the newest hidden state, which is the position of the step's rows."""

    def ropes(self, layer: int) -> Ropes:
        ropes = Gemma4Attention.ropes(self, layer)
        assert ropes.query is not None
        return Ropes(replace(ropes.query, shift=1), None)


_GEMMA4 = next(row for row in GEMMAS if row.name == "gemma4")
_ROW = replace(_GEMMA4, name="gemma4-assistant", attention=AssistantAttention, logit_softcap=None)
_PREFIX = f"{_ROW.name}: "  # of tensor names in the plan


def _record(target: Target, drafter: Drafter) -> Plan:
    """Record the model, and the drafter as a second stage."""
    recorder, parts = Recorder(), Parts()
    model = record(
        target.config, target.architecture, target.tensors, target.context, every_row=True, recorder=recorder,
        parts=parts, media=target.media,
    )  # fmt: skip
    assert model.hidden is not None
    config = _checked(Keys(drafter.metadata, f"{_ROW.name}."), target, model, parts)
    recorder.end_stage()
    recorder.begin_layer()
    tensors, width = Tensors(drafter.named(_PREFIX)), target.config.width
    builder = Builder(config, _ROW, tensors, recorder)
    received = recorder.receive(model.hidden.width, "hidden")
    owns = Tensors(target.tensors, target.architecture.ignored)
    token = recorder.embed(owns.matrix("token_embd.weight", target.config.vocabulary, width))
    token = recorder.scale(token, target.config.embedding_scale)
    x = builder.linear("nextn.pre_projection", recorder.concat(token, received), config.width, 2 * width)
    attention = attention_of(builder, _ROW, target.context or target.config.context_length)
    attention.stored.update({layer: _cached(target, parts, layer) for layer in (_FULL, _SLIDING)})
    layers = _ROW.layers(builder, attention, _ROW.recurrence(builder), _ROW.feed_forward(builder), True)
    for layer in range(config.layers):
        x = layers.layer(x, layer)
    normed = recorder.select_rows(builder.norm("output_norm", x))
    logits = _ROW.output(builder).logits(normed, "output")
    following = builder.linear("nextn.post_projection", normed, width, config.width)
    names = model.tensors | owns.used() | {_PREFIX + each for each in tensors.used()}
    plan = recorder.finish(logits, names)
    head = DraftHead(model.hidden, logits, following, shares_cache=True)
    return replace(
        plan, logits=model.logits, hidden=model.hidden, normed=model.normed, starts=model.starts, drafts=(head,)
    )  # fmt: skip


def _cached(target: Target, parts: Parts, layer: int) -> int:
    """Return the cache layer that a layer of the model reads; negative numbers count from the end."""
    return parts.cached[target.config.kv_layer[layer]]


def _checked(keys: Keys, target: Target, model: Plan, parts: Parts) -> Config:
    """Return the configuration, whose layers read the model's cache; raise ModelError if they cannot."""
    unused = {"nextn_predict_layers": 0, "attention__shared_kv_layers": 0, "embedding_length_per_layer_input": 0}
    config = _ROW.read(keys.having(**unused), _ROW, 0)
    ours = target.config
    for key, given, expected in (
        ("embedding_length_out", keys.integer("embedding_length_out", 1, 1 << 30), ours.width),
        ("vocab_size", config.vocabulary, ours.vocabulary),
    ):
        if given != expected:
            raise ModelError(f"{keys.prefix}{key}: expected {expected}, as in the model, found {given}")
    if not _fits(ours):
        raise ModelError(f"{keys.prefix}attention: reads the cache of a Gemma 4 model, and this model has other layers")
    windows = set(config.windows) - {0}
    if windows - {ours.windows[_SLIDING]}:
        found = f"expected {ours.windows[_SLIDING]}, as in the model, found {max(windows)}"
        raise ModelError(f"{keys.prefix}attention.sliding_window: {found}")
    for layer in range(config.layers):
        cache = model.attention_layer(_cached(target, parts, _SLIDING if config.windows[layer] else _FULL))
        if (config.head_dim[layer], config.value_dim[layer]) != (cache.head_dim, cache.value_dim):
            found = f"expected {cache.head_dim} in layer {layer}, as in the model, found {config.head_dim[layer]}"
            raise ModelError(f"{keys.prefix}attention.key_length: {found}")
        if config.heads[layer] % cache.kv_heads:
            found = f"expected a multiple of the model's {cache.kv_heads} in layer {layer}"
            raise ModelError(f"{keys.prefix}attention.head_count: {found}, found {config.heads[layer]}")
    return replace(
        config,
        kv_heads=tuple([max(each, 1) for each in config.kv_heads]),
        kv_layer=tuple([_SLIDING if window else _FULL for window in config.windows]),
        windows=tuple([max(window - 1, 0) for window in config.windows]),  # the newest token is not in the cache
    )


def _fits(model: Config) -> bool:
    """Whether the last layers of a model are a sliding-window layer and a full-attention layer, with KV heads."""
    if model.layers < 2 or model.latent is not None or not all(model.attends[-2:]):
        return False
    return model.windows[_SLIDING] > 1 and not model.windows[_FULL] and model.connections is None


DRAFTERS = (DraftArchitecture("gemma4-assistant", _record),)
