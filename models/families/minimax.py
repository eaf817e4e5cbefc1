"""MiniMax 01, whose residual adds start from the normed input, and MiniMax M3, whose indexer selects blocks."""

from __future__ import annotations

from dataclasses import replace

from localllm.models.architecture import Architecture, LayerRecorder
from localllm.models.config import Config, RecurrentConfig
from localllm.models.errors import ModelError
from localllm.models.indexer import NormedSelector
from localllm.models.properties import Indexer, Properties, Recurrent
from localllm.models.reading import Keys, read_general
from localllm.models.reading.bounds import MAX_CONTEXT, MAX_HEAD_DIM, MAX_LAYERS
from localllm.models.reading.indexer import read_chooser
from localllm.models.recurrent import Parts, Recurrence
from localllm.models.routing import SOFTMAX, ExpertGating
from localllm.plan import Rope, Value


def _read_01(keys: Keys, row: Properties, head: int) -> Config:
    config = read_general(keys, row, head)
    size, heads = keys.integer("attention.key_length", 1, MAX_HEAD_DIM), max(config.heads)
    return replace(config, recurrent=RecurrentConfig(0, heads * size, size, heads, heads, False))


def _read_m3(keys: Keys, row: Properties, head: int) -> Config:
    config, key = read_general(keys, row, head), "attention.indexer."
    assert row.indexer is not None
    lead = keys.integer("leading_dense_block_count", 0, MAX_LAYERS, default=0)
    indexer = read_chooser(keys, row.indexer, tuple([layer >= lead for layer in range(config.layers)]))
    if {indexer.heads} != {indexer.heads, *config.kv_heads[lead:]}:
        raise ModelError(
            f"{keys.prefix}{key}head_count: expected {max(config.kv_heads)}, the number of key-value heads in "
            f"every layer with experts, found {indexer.heads}"
        )
    block, local = keys.integer(key + "block_size", 1, MAX_CONTEXT), keys.integer(key + "local_blocks", 0, MAX_CONTEXT)
    return replace(config, indexer=replace(indexer, block=block, local=local))


class Minimax01Layers(LayerRecorder):
    """Adds to the normed input, times the residual scale, instead of the input."""

    def base(self, x: Value, normed: Value) -> Value:
        return normed

    def residual(self, x: Value, y: Value, norm: str) -> Value:
        return self.recorder.add(self.recorder.scale(x, self.config.residual_scale), y)


class Lightning(Recurrence):
    """The lightning attention of MiniMax 01 (arXiv:2501.08313): every head has a constant decay, slower in later
    layers.
    """

    def mix(self, parts: Parts, x: Value) -> Value:
        recorder, sizes = parts.recorder, parts.sizes
        heads, last = sizes.heads, max(1, parts.config.layers - 1)
        matrices = parts.weights("attn_qkv", x.width, (sizes.state,) * 3, heads)
        q, k, v = parts.active([recorder.linear(x, matrix) for matrix in matrices])
        pace, slope = 1.0 - parts.layer / last + 1e-5, 2.0 ** -(8.0 / heads)
        rates = [-pace * slope ** (head + 1) for head in range(heads)]
        rate = parts.tensors.numbers(f"rates of {heads} heads, layer {parts.layer} of {last}", rates)
        seen = recorder.linear_attention(q, k, v, None, None, rate, heads)
        return recorder.glu(parts.bare("attn_gate", x, sizes.inner), parts.norm("attn_norm_2", seen, 1), "sigmoid")


class BlockSelector(NormedSelector):
    """Selects blocks of positions per KV head."""

    by_head = True

    def recorded(self, name: str, x: Value, narrow: Value, rope: Rope | None) -> Value:
        own, recorder = self.own, self.recorder
        parts = ("q", own.heads), ("k", 1)
        q, k = (self.placed(name + part, self.projected(name + part, x, heads), rope) for part, heads in parts)
        layer = recorder.append_index(k)
        return recorder.indexer_top_k(q, None, layer, own.heads, own.count, own.block, own.local)


ROWS = (
    Architecture(
        "minimax-01", "neox", read=_read_01, layers=Minimax01Layers, recurrence=Lightning, multipliers="divided",
        recurrent=Recurrent("lightning", "interval", interval=8), routing=SOFTMAX,
    ),
    Architecture(
        "minimax-m3", "neox", "swiglu_oai", read=_read_m3, selector=BlockSelector, qk_norm=True,
        indexer=Indexer("neox", "own"), routing=ExpertGating("sigmoid", False, from_file=True, activation="swiglu_oai"),
    ),
)  # fmt: skip
