"""Chameleon: norms that may follow attention and feed-forward, and image tokens that are never generated."""

from __future__ import annotations

import math
from dataclasses import replace

from localllm.models.architecture import Architecture, Attention, LayerRecorder, Output
from localllm.models.config import Config
from localllm.models.properties import Properties
from localllm.models.reading import Keys, read_general
from localllm.plan import Value, Weight

IMAGES = range(4, 8196)  # the ids of image tokens


def _read(keys: Keys, row: Properties, head: int) -> Config:
    """Read a model; `own` says whether norms follow the blocks instead of preceding them (Swin Transformer V2)."""
    return replace(read_general(keys, row, head), own=keys.flag("swin_norm", False))


class ChameleonAttention(Attention):
    layer_norm_eps = 1e-5


class ChameleonLayers(LayerRecorder):
    def residual(self, x: Value, y: Value, norm: str) -> Value:
        return self.recorder.add(x, self.builder.norm(norm, y) if self.builder.own(bool) else y)

    def input_norm(self, name: str, x: Value) -> Value:
        return x if self.builder.own(bool) else super().input_norm(name, x)


class WithoutImages(Output):
    def bias(self, name: str, rows: int) -> Weight | None:
        silent = [-math.inf if token in IMAGES else 0.0 for token in range(rows)]
        return super().bias(name, rows) or self.tensors.numbers(f"silent({rows})", silent)


ROWS = (
    Architecture(  # text part only
        "chameleon", "interleaved", read=_read, layers=ChameleonLayers, attention=ChameleonAttention,
        output=WithoutImages, ignored=("attn_output.bias",), qk_norm=True, attention_post_norm="attn_norm",
        ffn_post_norm="ffn_norm",
    ),
)  # fmt: skip
