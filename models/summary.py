"""What a model costs, counted by recording its forward into a tally: parameters, bytes and operations per token.

`show` and `bench` print these numbers: bytes per token over measured bandwidth is the roof of decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import quant
from models.architectures import Activation, Architecture, ExpertActivation, Gating
from models.config import Config
from models.forward import walk
from models.tensors import Tensors
from plan import Tensor, Weight

Stack = tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of one model; a weight that is used twice (a tied embedding) counts once where it is stored."""

    parameters: int
    weight_bytes: int  # of the tensors in use, as stored in the file
    bytes_per_token: int  # weights read to decode one token: every matrix and vector once, one row of the embedding
    flops_per_token: int  # two per weight of every matrix product; attention apart
    attention_flops_per_position: int  # more for every token in the cache, in layers without a window
    cache_values_per_token: int  # keys and values of all layers
    unused: tuple[str, ...]  # tensors of the file that the forward does not read


def summarize(config: Config, architecture: Architecture, tensors: Mapping[str, Tensor]) -> Summary:
    """The counts of a model; ModelError where its forward cannot be recorded."""
    checked = Tensors(tensors)
    tally = walk(config, architecture, checked, _Tally())
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
    """A recorder whose values are their widths and whose plan is itself, with everything counted."""

    def __init__(self) -> None:
        self.weights: dict[str, Weight] = {}
        self.bytes_read = self.flops = self.attention_flops = self.cache_values = 0

    def _read(self, *weights: Weight | None) -> None:
        for weight in weights:
            if weight is not None:
                self.weights[weight.name] = weight
                self.bytes_read += _bytes(weight)

    def begin_layer(self) -> None: ...

    def embed(self, table: Weight) -> int:
        self.weights[table.name] = table
        self.bytes_read += quant.row_bytes(table.format, table.shape[1])
        return table.shape[1]

    def rms_norm(self, x: int, weight: Weight, eps: float, groups: int = 1) -> int:
        self._read(weight)
        return x

    def layer_norm(self, x: int, weight: Weight, bias: Weight | None, eps: float, groups: int = 1) -> int:
        self._read(weight, bias)
        return x

    def linear(self, x: int, weight: Weight, bias: Weight | None = None, scale: float = 1.0) -> int:
        self._read(weight, bias)
        self.flops += 2 * prod(weight.shape)
        return weight.shape[0]

    def rope(
        self,
        style: Literal["norm", "neox"],
        n_rot: int,
        inverse_frequency: tuple[float, ...],
        magnitude: float = 1.0,
        temperature: float = 0.0,
        temperature_length: int = 1,
    ) -> None: ...

    def rotate(self, x: int, head_dim: int, rope: None) -> int:
        return x

    def append(self, layer: int, k: int, v: int, kv_heads: int) -> None:
        self.cache_values += k + v

    def attention(
        self, q: int, layer: int, heads: int, scale: float, window: int = 0, softcap: float = 0.0,
        sinks: Weight | None = None,
    ) -> int:  # fmt: skip
        self._read(sinks)
        self.attention_flops += 0 if window else 4 * q  # a product and a sum for the score, and for the mix
        return q

    def glu(self, gate: int, up: int, activation: Activation | Literal["sigmoid"]) -> int:
        return up

    def stack(self, weight: Weight, scale: Weight | None = None, bias: Weight | None = None) -> Stack:
        return tuple(w for w in (weight, scale, bias) if w is not None)

    def experts(
        self, x: int, router: int, gate: Stack, up: Stack, down: Stack, used: int, gating: Gating, normalize: bool,
        scale: float, activation: ExpertActivation, choice_bias: Weight | None = None,
    ) -> int:  # fmt: skip
        """Only the chosen experts are read and computed with."""
        for weight in (*gate, *up, *down):
            self.weights[weight.name] = weight
            self.bytes_read += _bytes(weight) * used // weight.shape[0]
        self.flops += sum(2 * used * prod(stack[0].shape[1:]) for stack in (gate, up, down))
        self._read(choice_bias)
        return down[0].shape[1]

    def activate(self, x: int, activation: Activation) -> int:
        return x

    def softcap(self, x: int, cap: float) -> int:
        return x

    def add(self, a: int, b: int) -> int:
        return a

    def scale(self, x: int, factor: float) -> int:
        return x

    def select_rows(self, x: int) -> int:
        return x

    def finish(self, logits: int) -> _Tally:
        return self
