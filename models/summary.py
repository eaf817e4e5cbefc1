"""What a model costs, counted by recording its forward into a tally: parameters, bytes and operations per token.

`show` and `bench` print these numbers: bytes per token over measured bandwidth is the roof of decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import quant
from models.architectures import Architecture
from models.config import Config
from models.forward import walk
from models.tensors import Tensors, Weight


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of one model; a weight that is used twice (a tied embedding) counts once where it is stored."""

    parameters: int
    weight_bytes: int  # of the tensors in use, as stored in the file
    bytes_per_token: int  # weights read to decode one token: every matrix and vector once, one row of the embedding
    flops_per_token: int  # two per weight of every matrix product; attention apart
    attention_flops_per_position: int  # more for every token in the cache
    cache_values_per_token: int  # keys and values of all layers
    unused: tuple[str, ...]  # tensors of the file that the forward does not read


def summarize(config: Config, architecture: Architecture, tensors: Mapping[str, Weight]) -> Summary:
    """The counts of a model; ModelError where its forward cannot be recorded."""
    checked = Tensors(tensors)
    tally = walk(config, architecture, checked, _Tally(config.head_dim))
    return Summary(
        parameters=sum(prod(w.shape) for w in tally.weights.values()),
        weight_bytes=sum(_bytes(w) for w in tally.weights.values()),
        bytes_per_token=tally.bytes_read,
        flops_per_token=tally.flops,
        attention_flops_per_position=tally.attention_flops,
        cache_values_per_token=tally.cache_values,
        unused=checked.unused(),
    )


def _bytes(weight: Weight) -> int:
    return prod(weight.shape[:-1]) * quant.row_bytes(weight.format, weight.shape[-1])


class _Tally:
    """A recorder whose values are nothing and whose plan is itself, with everything counted."""

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim
        self.weights: dict[str, Weight] = {}
        self.bytes_read = self.flops = self.attention_flops = self.cache_values = 0

    def _read(self, *weights: Weight | None) -> None:
        for weight in weights:
            if weight is not None:
                self.weights[weight.name] = weight
                self.bytes_read += _bytes(weight)

    def embed(self, table: Weight) -> None:
        self.weights[table.name] = table
        self.bytes_read += quant.row_bytes(table.format, table.shape[1])

    def rms_norm(self, x: None, weight: Weight, eps: float, groups: int = 1) -> None:
        self._read(weight)

    def linear(self, x: None, weight: Weight, bias: Weight | None = None, scale: float = 1.0) -> None:
        self._read(weight, bias)
        self.flops += 2 * prod(weight.shape)

    def rope(
        self,
        style: Literal["norm", "neox"],
        n_rot: int,
        inverse_frequency: tuple[float, ...],
        magnitude: float = 1.0,
        temperature: float = 0.0,
        temperature_length: int = 1,
    ) -> None: ...

    def rotate(self, x: None, head_dim: int, rope: None) -> None: ...

    def append(self, layer: int, k: None, v: None, kv_heads: int) -> None:
        self.cache_values += 2 * kv_heads * self._head_dim

    def attention(self, q: None, layer: int, heads: int, scale: float) -> None:
        self.attention_flops += 4 * heads * self._head_dim  # a product and a sum for the score, and for the mix

    def glu(self, gate: None, up: None, activation: Literal["silu", "gelu"]) -> None: ...

    def add(self, a: None, b: None) -> None: ...

    def scale(self, x: None, factor: float) -> None: ...

    def select_rows(self, x: None) -> None: ...

    def finish(self, logits: None) -> _Tally:
        return self
