"""The encoders of MiniCPM-V: with a resampler, or from version 4.6 on with layers that merge patches.

In a resampler, learned queries read the patches by attention. So every picture has the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localllm.models.encoders import banded, grids
from localllm.models.encoders.heads import mlp
from localllm.models.encoders.layers import Layers, Style
from localllm.models.encoders.network import table
from localllm.models.encoders.vision import VisionEncoder
from localllm.models.encoders.vision_row import Vision
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Plan
from localllm.plan.runs import Arranging, Encoding, Layout, Part, Run, bands

HEAD = 128  # width of a head of the resampler
ROW = Vision(head=lambda network, x: x, resize=grids.buckets, swaps=True, after="v.post_ln")


class ResamplerEncoder(VisionEncoder):
    """A vision encoder with a resampler in place of a projector."""

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        self._queries = np.zeros((0, 0), np.float32)
        super().__init__(ROW, keys, tensors)
        self.parts["head"] = Part(self.parts["head"].plan, max(self.most, len(self._queries)))

    def _head(self) -> Plan:
        """Record the keys and values of the patches in one stage, and the queries in another."""
        network, name = self._network(), "resampler."
        recorder, width = network.recorder, network.tensors.height(f"{name}kv.weight") or 1
        if width % HEAD:
            raise ModelError(f"{name}kv.weight: expected a multiple of {HEAD} rows, found {width}")
        count = network.tensors.values(f"{name}query") // width
        self._queries = table(network.tensors, f"{name}query", max(1, count), width)
        x, positions = recorder.receive_all({"patches": self._columns, "positions": width})
        v = network.norm(network.linear(x, name + "kv", width), name + "ln_kv", "layer")
        k = recorder.add(v, positions)
        k, v = (network.linear(each, f"{name}attn.{of}", width) for of, each in (("k", k), ("v", v)))
        layer = recorder.append(k, v, width // HEAD)
        network.end()
        q = network.norm(recorder.receive(width, "queries"), name + "ln_q", "layer")
        q = network.linear(q, name + "attn.q", width)
        y = recorder.attention(q, layer, width // HEAD, HEAD**-0.5, causal=False)
        y = network.norm(network.linear(y, name + "attn.out", width), name + "ln_post", "layer")
        y = network.linear(y, name + "proj")
        network.end(y)
        self.width = y.width
        return network.plan()

    def encode(self, pictures: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs of a picture (height, width, 3)."""
        grid = self._grid(pictures[0])
        count, queries = len(grid.y), self._queries
        received = yield from self._received(pictures, grid, grid.index)
        (x,) = yield Run("layers", received, (Layout((count,)),))
        layouts = Layout((count,), border=count), Layout((len(queries),), border=count)
        waves = yield from _waves(grid, queries.shape[1])
        (y,) = yield Run("head", (x, waves), layouts, (queries,))
        return y


MERGING = Vision(
    head=mlp("mm.up", "mm.down", "gelu_erf", norm="mm.input_norm"), resize=grids.buckets, swaps=True, side=2,
    after="v.post_ln",
)  # fmt: skip


class MergingEncoder(VisionEncoder):
    """A vision encoder that may merge cells of 2 x 2 patches between two layers, and always merges them at the end."""

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        self._merges = "v.vit_merger.ln1.weight" in tensors
        self._early = keys.integers("vision.wa_layer_indexes", 1, 0, 511)[0] + 1 if self._merges else 0
        # the key counts both merges
        own = keys.having(vision__projector__scale_factor=MERGING.side)
        super().__init__(replace(MERGING, order="cells" if self._merges else "rows"), own, tensors)
        if self._merges:
            if self._early >= self._layer_count:
                raise ModelError(f"clip.vision.wa_layer_indexes: no layer follows layer {self._early - 1}")
            self.parts["layers"] = Part(self._first_layers(), self.most, 4)
            self.parts["rest"] = Part(self._last_layers(), max(64, self.most // 4))

    def _first_layers(self) -> Plan:
        """Record the layers before the merge, and the attention within the cells."""
        network, shape = self._network(), self.sizes.shape
        patches, added = network.recorder.receive_all({"patches": 3 * self.sizes.patch**2, "positions": shape.width})
        x, layers = self._embedded(network, [patches], added), Layers(network, shape, Style())
        for number in range(self._early):
            x = layers.layer(x, number)
            network.end()
        y = layers.attention(network.norm(x, "v.vit_merger.ln1"), "v.vit_merger.")
        network.end(network.recorder.add(x, y))
        return network.plan()

    def _last_layers(self) -> Plan:
        """Record the merge of cells, and the layers after it."""
        network, shape, name = self._network(), self.sizes.shape, "v.vit_merger."
        recorder = network.recorder
        x = recorder.receive(4 * shape.width, "cells")
        y = network.mlp(network.norm(x, name + "ds_ln"), name + "ds_ffn_up", name + "ds_ffn_down")
        x, layers = recorder.add(network.mean(x, 4), y), Layers(network, shape, Style())
        for number in range(self._early, self._layer_count):
            if number > self._early:
                network.end()
            x = layers.layer(x, number)
        network.end(network.norm(x, "v.post_ln"))
        return network.plan()

    def encode(self, pictures: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs of a picture (height, width, 3)."""
        if not self._merges:
            return (yield from super().encode(pictures, flags))
        grid, side = self._grid(pictures[0]), self.sizes.side
        received = yield from self._received(pictures, grid, grid.index)
        count = len(grid.y)
        whole, cells = Layout((count,)), Layout((4,) * (count // 4))
        (x,) = yield Run("layers", received, (whole,) * self._early + (cells,))
        x = x.reshape(count // 4, -1)  # in the order of cells
        (x,) = yield Run("rest", (x,), (Layout((len(x),)),))
        # an odd last row or column of cells is dropped
        merged = grids.by_rows(grid.rows // side, grid.columns // side)
        x = yield from banded.cells(x, merged, merged.index, side)
        (y,) = yield Run("head", (x,), (Layout((len(x),)),))
        return y


def _waves(grid: grids.Grid, width: int) -> Arranging[F32]:
    """Return sines and cosines of the column and the row of each patch, (patches, width)."""
    rate, count = 10000.0 ** (-np.arange(width // 4) / (width // 4)), max(grid.rows, grid.columns)
    waves = np.empty((count, width // 2), np.float32)  # of each number of a column or a row
    for band in bands(count, 32 * waves.shape[1]):  # a sine takes as long as a copy of 32 bytes
        angle = np.arange(band.start, band.stop)[:, None] * rate
        waves[band] = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
        yield None
    found = np.empty((len(grid.x), width), np.float32)
    for band in bands(len(found), found.strides[0]):
        np.concatenate([waves[grid.x[band]], waves[grid.y[band]]], axis=1, out=found[band])
        yield None
    return found
