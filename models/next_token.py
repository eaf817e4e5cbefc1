"""Multi-token-prediction heads (arXiv:2412.19437, section 2.2): extra layers that predict the token after next.

At position t, head k (from 1) reads token t + k and a hidden state of position t; its logits are for token t + k + 1.
The first head reads the model's hidden states (`Plan.hidden`). The others read the previous head's, or the
model's too (`Properties.chained_heads`). Each head is therefore a separate plan with its own KV cache, which begins
with a Receive of the hidden states. With hyper-connections, the hidden states contain all
streams, and the head combines each stream with the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from localllm.models.architecture import Architecture
from localllm.models.builder import Builder
from localllm.models.config import Config, MediaInput
from localllm.models.connections import ConnectionRecorder
from localllm.models.errors import ModelError
from localllm.models.forward import attention_of, record
from localllm.models.layers import LayerRecorder
from localllm.models.lookup import read_config
from localllm.models.tensors import Tensors
from localllm.plan import DraftHead, Plan, Recorder, Tensor, Value


def record_mtp_heads(
    metadata: Mapping[str, Any], architecture: Architecture, tensors: Mapping[str, Tensor], context: int | None = None
) -> tuple[Plan, ...]:
    """Record every multi-token-prediction head in a GGUF, in order."""
    plans: list[Plan] = []
    config = read_config(metadata, architecture.name)
    while has_head(config, architecture, tensors):
        config = read_config(metadata, architecture.name, head=len(plans) + 1)
        plans.append(record_mtp_head(config, architecture, tensors, context))
    return tuple(plans)


def has_head(config: Config, architecture: Architecture, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a GGUF has a multi-token-prediction head; some GGUFs count heads in `metadata` but omit them."""
    present = f"blk.{config.layers}.nextn.eh_proj.weight" in tensors
    return bool(architecture.heads_verified and config.nextn_layers and present)


def record_with_heads(
    metadata: Mapping[str, Any], architecture: Architecture, tensors: Mapping[str, Tensor], context: int | None = None,
    most: int = 1, heads: Mapping[str, Any] | None = None, media: MediaInput | None = None,
) -> Plan:  # fmt: skip
    """Record a model and, as further stages, its first `most` multi-token-prediction heads, or all if it has fewer.
    Raises the errors of `record`. `heads` is the metadata of the heads if they come from another GGUF. Only the model
    takes the embeddings of `media`; its heads read row 0 of the table instead, so drafts inside pictures are worthless.

    Each head adds a cache layer after the model's layers, and shares their cache blocks. Position t of the layer of
    head k holds token t + k.
    """
    recorder = Recorder()
    config = read_config(metadata, architecture.name)
    model = plan = record(config, architecture, tensors, context, every_row=True, recorder=recorder, media=media)
    assert model.hidden is not None
    heads = heads or metadata
    config = read_config(heads, architecture.name)
    received, names, drafts = model.hidden, model.tensors, list[DraftHead]()
    while has_head(config, architecture, tensors) and len(drafts) < most:
        config = read_config(heads, architecture.name, head=len(drafts) + 1)
        feeds = architecture.chained_heads and has_head(config, architecture, tensors) and len(drafts) + 1 < most
        recorder.end_stage()
        plan = record_mtp_head(config, architecture, tensors, context, recorder, feeds, media)
        assert plan.hidden is not None
        drafts.append(DraftHead(received, plan.logits, plan.hidden))
        names, received = names | plan.tensors, plan.hidden if feeds else model.hidden
    return replace(
        plan, logits=model.logits, hidden=model.hidden, normed=model.normed, tensors=names, starts=model.starts,
        drafts=tuple(drafts), media=model.media,
    )  # fmt: skip


def record_mtp_head(
    config: Config, architecture: Architecture, tensors: Mapping[str, Tensor], context: int | None = None,
    recorder: Recorder | None = None, feeds: bool = False, media: MediaInput | None = None,
) -> Plan:  # fmt: skip
    """Record a multi-token-prediction head, the last layer of `config` (see `read_config`). Raises the errors of
    `record`.

    With `feeds`, its hidden states cover all tokens of a batch, as the next head needs. `context` and `recorder` are as
    in `record`. Run the plan with `begin`, `run([hidden states (T, width)])` and `result`.
    """
    checked, last = Tensors(tensors, architecture.ignored), config.layers - 1
    recorder = recorder or Recorder()
    config, name = _attending(config, architecture), f"blk.{last}.nextn."
    builder = Builder(config, architecture, checked, recorder, media and MediaInput())
    recorder.begin_layer()
    streams = 1 if config.connections is None else config.connections.streams
    hidden = recorder.receive(streams * config.width, "hidden")
    table = _first(checked, f"{name}embed_tokens", "token_embd")
    x = recorder.embed(checked.matrix(f"{table}.weight", config.vocabulary, config.width))
    if config.embedding_scale != 1.0:
        x = recorder.scale(x, config.embedding_scale)
    x = _joined(builder, name, x, hidden)
    attention = attention_of(builder, architecture, context or config.context_length)
    kind = LayerRecorder if config.connections is None else ConnectionRecorder
    layers = kind(builder, attention, architecture.recurrence(builder), architecture.feed_forward(builder), feeds)
    seen = layers.layer(x, last)
    recorder.begin_layer()
    norm = _first(checked, f"{name}shared_head_norm", f"blk.{last}.layer_output_norm", architecture.output_norm)
    output = _first(checked, f"{name}shared_head_head", "output")
    return architecture.output(builder).finish(layers.end(seen), norm, output, feeds, layers.hidden(seen))


def _joined(builder: Builder, name: str, x: Value, hidden: Value) -> Value:
    """Combine token embeddings (T, width) with each stream of the hidden states into (T, streams * width)."""
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
    """Return the first name whose weight is in the GGUF, or else the last name, which is the model's tensor."""
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
        indexer=None,  # heads use dense attention
    )
