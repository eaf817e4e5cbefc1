"""GLM 5.3 Flash, whose indexer selects pools of positions, each represented by a key that is pooled with gates."""

from __future__ import annotations

from dataclasses import replace

from localllm.models.architecture import Architecture, Selector
from localllm.models.config import Config
from localllm.models.connections import ConnectionRecorder, read_connections
from localllm.models.errors import ModelError
from localllm.models.properties import QKV_EXTRAS, Indexer, Properties, Recurrent
from localllm.models.reading import Keys, read_general
from localllm.models.reading.feed_forward import with_limits_of_experts
from localllm.models.reading.indexer import with_pools
from localllm.models.routing import FILE_SIGMOID
from localllm.plan import BLOCK, Value


def _read(keys: Keys, row: Properties, head: int) -> Config:
    config, key = read_general(with_limits_of_experts(keys), row, head), "attention.indexer.kpool"
    assert config.indexer is not None
    assert config.recurrent is not None
    indexer = with_pools(keys, config.indexer, key, keys.integer(key, 2, BLOCK))
    if not keys.flag(key + "_select_tail", True):
        raise ModelError(f"{keys.prefix}{key}_select_tail: only true is supported, found false")
    recurrent, connections = replace(config.recurrent, unit_eps=1e-6), read_connections(keys, mixed=True)
    return replace(config, indexer=indexer, recurrent=recurrent, connections=connections)


class PooledSelector(Selector):
    pooled = True

    def keys(self, name: str, k: Value, x: Value) -> Value:
        name, own = name.removesuffix(".") + "_compressor_", self.own
        gate = self.builder.linear(name + "gate", x, own.head_dim, x.width)
        bias = self.tensors.matrix(name + "ape.weight", own.block, own.head_dim)
        return self.recorder.pool(k, gate, bias)


ROWS = (
    Architecture(
        "glm5-next", None, read=_read, layers=ConnectionRecorder, selector=PooledSelector, heads_verified=False,
        cache="latent", limits="swiglu_clamp", ignored=(*QKV_EXTRAS, "attn_output.scale"),
        indexer=Indexer("interleaved", "types", "layer"),
        recurrent=Recurrent("kda", "without_heads", bounded="negative"), routing=FILE_SIGMOID,
    ),
)  # fmt: skip
