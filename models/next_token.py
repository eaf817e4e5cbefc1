"""Next-token heads (multi-token prediction, arXiv:2412.19437, section 2.2): a layer that predicts one more token.

Row t of a head reads token t + 1 and the hidden row of token t, and its logits are for token t + 2. The hidden rows
come from the model (`Plan.hidden`) or from the previous head. So each head is a separate plan with its own cache, and
begins with a Receive of the hidden rows. In a model with hyper-connections the hidden rows hold all streams, and the
head joins each of them with the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from localllm.models.architecture import Architecture
from localllm.models.builder import Builder
from localllm.models.config import Config
from localllm.models.connections import ConnectionRecorder
from localllm.models.errors import ModelError
from localllm.models.feed_forward import FeedForward
from localllm.models.forward import attention_of, finish
from localllm.models.layers import LayerRecorder
from localllm.models.reading.config import read_config
from localllm.models.recurrent import Recurrence
from localllm.models.tensors import Tensors
from localllm.plan import Plan, Recorder, Tensor, Value


def record_mtp_heads(
    metadata: Mapping[str, Any], architecture: Architecture, tensors: Mapping[str, Tensor], context: int | None = None
) -> tuple[Plan, ...]:
    """Record every next-token head that a file holds, in order; some files count heads in `metadata` but hold none."""
    plans: list[Plan] = []
    config = read_config(metadata, architecture.name)
    # no other program runs these heads, so results cannot be verified
    if config.connections is not None and config.compression is None:
        return ()
    while config.nextn_layers and f"blk.{config.layers}.nextn.eh_proj.weight" in tensors:
        config = read_config(metadata, architecture.name, head=len(plans) + 1)
        plans.append(record_mtp_head(config, architecture, tensors, context))
    return tuple(plans)


def record_mtp_head(
    config: Config, architecture: Architecture, tensors: Mapping[str, Tensor], context: int | None = None
) -> Plan:
    """Record a next-token head, the last layer of `config` (see `read_config`); raise ModelError as `record` does.

    `context` is as in `record`. The plan runs by `begin`, `run([hidden rows (T, width)])`, `result`.
    """
    checked, recorder, last = Tensors(tensors, architecture.ignored), Recorder(), config.layers - 1
    config, name = _attending(config, architecture), f"blk.{last}.nextn."
    builder = Builder(config, architecture, checked, recorder)
    recorder.begin_layer()
    streams = 1 if config.connections is None else config.connections.streams
    hidden = recorder.receive(streams * config.width, "hidden")
    table = _first(checked, f"{name}embed_tokens", "token_embd")
    x = recorder.embed(checked.matrix(f"{table}.weight", config.vocabulary, config.width))
    if config.embedding_scale != 1.0:
        x = recorder.scale(x, config.embedding_scale)
    x = _joined(builder, name, x, hidden)
    attention = attention_of(builder, context or config.context_length)
    kind = LayerRecorder if config.connections is None else ConnectionRecorder
    layers = kind(builder, attention, Recurrence(builder), FeedForward(builder))
    seen = layers.layer(x, last)
    recorder.begin_layer()
    norm = _first(checked, f"{name}shared_head_norm", f"blk.{last}.layer_output_norm", architecture.output_norm)
    output = _first(checked, f"{name}shared_head_head", "output")
    return finish(builder, layers.end(seen), norm, output, hidden=layers.hidden(seen))


def _joined(builder: Builder, name: str, x: Value, hidden: Value) -> Value:
    """Combine token rows (T, width) with each stream of the hidden rows into (T, streams * width)."""
    recorder, config = builder.recorder, builder.config
    token = builder.norm(name + "enorm", x)
    if config.connections is None:
        joined = recorder.concat(token, builder.norm(name + "hnorm", hidden))
        return builder.linear(name + "eh_proj", joined, config.width, joined.width)
    weight = builder.tensors.vector(f"{name}hnorm.weight", config.width)
    normed = recorder.rms_norm(hidden, weight, config.eps, config.connections.streams)
    starts = range(0, normed.width, config.width)
    pairs = [recorder.concat(token, recorder.slice(normed, start, start + config.width)) for start in starts]
    streams = [builder.linear(name + "eh_proj", pair, config.width, pair.width) for pair in pairs]
    return reduce(recorder.concat, streams)


def _first(tensors: Tensors, *names: str) -> str:
    """Return the first of the names whose weights the file holds; otherwise the last one, which is the model's own."""
    return next((name for name in names if f"{name}.weight" in tensors), names[-1])


def _attending(config: Config, architecture: Architecture) -> Config:
    """Return the config with self-attention in the last layer, regardless of the model's layer pattern."""
    name, last = config.architecture, config.layers - 1
    if architecture.recurrent is not None and architecture.recurrent.alone:
        raise ModelError(f"{name}.nextn_predict_layers: heads of models whose layers have one part are not supported")
    if not config.kv_heads[last]:
        raise ModelError(f"{name}.attention.head_count_kv: expected heads in layer {last}, a next-token head, found 0")
    return replace(
        config,
        attends=(*config.attends[:last], True),
        recurs=(*config.recurs[:last], False),
        kv_layer=(*config.kv_layer[:last], last),
        indexer=None,  # heads attend to all positions
    )
