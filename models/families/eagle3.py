"""EAGLE-3 (arXiv:2503.01840): one layer that drafts from the hidden states of three layers of the model.

A matrix combines the hidden states of a token to the width of the draft layer (`fc`). The layer reads this and the
embedding of the next token, both normed and concatenated. Further drafts read the layer's own output instead.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from localllm.models.architecture import Architecture
from localllm.models.builder import Builder
from localllm.models.config import Config
from localllm.models.draft_architecture import DraftArchitecture, Drafter, Target
from localllm.models.errors import ModelError
from localllm.models.forward import Parts, attention_of, record
from localllm.models.reading import Keys, read_general
from localllm.models.tensors import Tensors
from localllm.plan import DraftHead, Plan, Recorder, Tensor, Value

ROWS: tuple[Architecture, ...] = ()  # it is not a model
_ROW = Architecture("eagle3", "interleaved")
_PREFIX = f"{_ROW.name}: "  # of tensor names in the plan


def _record(target: Target, drafter: Drafter) -> Plan:
    """Record the model, which also combines its hidden states, and the draft layer as a second stage."""
    keys = Keys(drafter.metadata, f"{_ROW.name}.")
    config, layers = _checked(keys, target.config)
    tensors, recorder, parts = Tensors(drafter.named(_PREFIX)), Recorder(), Parts()
    every_row = max(layers) > max(target.config.kv_layer)  # of later layers, only some rows have hidden states
    model = record(
        target.config, target.architecture, target.tensors, target.context, every_row=every_row, recorder=recorder,
        parts=parts, media=target.media,
    )  # fmt: skip
    builder = Builder(config, _ROW, tensors, recorder)
    hidden = _combined(keys, builder, [parts.states[layer] for layer in layers], target.config.width)
    recorder.end_stage()
    recorder.begin_layer()
    received = recorder.receive(hidden.width, "hidden")
    owns = Tensors(target.tensors, target.architecture.ignored)
    embedding = tensors if "token_embd.weight" in tensors else owns
    token = recorder.embed(embedding.matrix("token_embd.weight", target.config.vocabulary, config.width))
    following = _layer(keys, builder, token, received, target.context or target.config.context_length)
    tokens = _tokens(drafter.tensors.get("d2t"), target.config.vocabulary)
    normed = builder.norm("output_norm", following)
    output = tensors if "output.weight" in tensors else owns
    name = "output.weight" if "output.weight" in output else "token_embd.weight"  # the model's output may be tied
    count = target.config.vocabulary if tokens is None else len(tokens)
    logits = recorder.linear(normed, output.matrix(name, count, config.width))
    names = model.tensors | owns.used() | {_PREFIX + each for each in tensors.used()}
    plan = recorder.finish(logits, names)
    head = DraftHead(hidden, logits, following, target.config.vocabulary, tokens=tokens)
    return replace(
        plan, logits=model.logits, hidden=hidden, normed=model.normed, starts=model.starts, drafts=(head,)
    )  # fmt: skip


def _checked(keys: Keys, model: Config) -> tuple[Config, tuple[int, ...]]:
    """Return the configuration, and the layers whose inputs are read; the number of layers means the last output."""
    config = read_general(keys, _ROW, 0)
    layers = keys.integers("target_layers", 3, 0, model.layers)
    for key, given, expected in (
        ("block_count", config.layers, 1),
        ("target_hidden_size", keys.integer("target_hidden_size", 1, 1 << 30), model.width),
        ("vocab_size", config.vocabulary, model.vocabulary),
    ):
        if given != expected:
            of = "" if key == "block_count" else ", as in the model"
            raise ModelError(f"{keys.prefix}{key}: expected {expected}{of}, found {given}")
    return config, layers


def _combined(keys: Keys, builder: Builder, states: list[Value], width: int) -> Value:
    """Return the states of a token (T, width) each as one vector (T, draft width)."""
    if any(state.width != width for state in states):
        raise ModelError(f"{keys.prefix}target_layers: the model has several residual streams, and EAGLE-3 reads one")
    joined = reduce(builder.recorder.concat, states)
    if keys.flag("norm_before_fc", False):
        joined = builder.norm("enc.output_norm", joined)
    return builder.linear("fc", joined, builder.config.width, joined.width)


def _layer(keys: Keys, builder: Builder, token: Value, hidden: Value, context: int) -> Value:
    """Return the output of the draft layer, for the tokens whose logits are requested."""
    recorder, name = builder.recorder, "blk.0."
    attention, feed_forward = attention_of(builder, _ROW, context), _ROW.feed_forward(builder)
    normed = builder.norm(f"{name}attn_norm_2", hidden)
    base = normed if keys.flag("norm_before_residual", False) else hidden
    mixed = attention.mixed(recorder.concat(builder.norm(f"{name}attn_norm", token), normed), 0)
    mixed, base = recorder.select_rows(mixed), recorder.select_rows(base)
    x = recorder.add(base, attention.output(mixed, 0))
    return recorder.add(x, feed_forward(builder.norm(f"{name}ffn_norm", x), 0, x, x))


def _tokens(tensor: Tensor | None, vocabulary: int) -> NDArray[np.int32] | None:
    """Return the model's token of each logit (draft vocabulary,); None if they are the model's own vocabulary."""
    if tensor is None:
        return None
    if tensor.format != "I64" or len(tensor.shape) != 1 or not 1 <= tensor.shape[0] <= vocabulary:
        found = f"{tensor.format} ({', '.join(map(str, tensor.shape))})"
        raise ModelError(f"d2t: expected 1 to {vocabulary} tokens in format I64, found {found}")
    tokens = np.ascontiguousarray(tensor.read(0, 1)).view(np.int64).reshape(-1)
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(outside):
        raise ModelError(f"d2t: expected tokens from 0 to {vocabulary - 1}, found {outside[0]}")
    if len(np.unique(tokens)) < len(tokens):
        raise ModelError("d2t: expected different tokens, found one twice")
    return tokens.astype(np.int32)


DRAFTERS = (DraftArchitecture("eagle3", _record),)
