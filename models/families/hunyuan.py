"""Hunyuan 4: independent residual streams, and an indexer that rotates the last dimensions of a head."""

from __future__ import annotations

from dataclasses import replace

from localllm.models.architecture import Architecture, Selector
from localllm.models.config import Config
from localllm.models.connections import ConnectionRecorder, read_connections
from localllm.models.properties import Indexer, Properties
from localllm.models.reading import Keys, read_general
from localllm.models.reading.bounds import MAX_CONTEXT
from localllm.models.routing import FILE_SIGMOID
from localllm.plan import Rope, Value


def _read(keys: Keys, row: Properties, head: int) -> Config:
    """Read a model; GGUFs without `attention.indexer.top_k` have no indexer."""
    if not keys.integer("attention.indexer.top_k", 0, MAX_CONTEXT, default=0):
        row = replace(row, indexer=None)
    return replace(read_general(keys, row, head), connections=read_connections(keys, mixed=False))


class TrailingSelector(Selector):
    def turned(self, x: Value, rope: Rope) -> Value:
        return self.builder.rotate_last(x, self.own.head_dim, rope)


ROWS = (
    Architecture(
        "hy_v4", "interleaved", read=_read, layers=ConnectionRecorder, selector=TrailingSelector, heads_verified=False,
        ignored=("attn_output.scale", "attn_gate.scale", "swiglu_clamp_shexp"), cache="latent",
        indexer=Indexer("interleaved", "types", "rms"), gated="sigmoid", limits="swiglu_clamp", routing=FILE_SIGMOID,
    ),
)  # fmt: skip
