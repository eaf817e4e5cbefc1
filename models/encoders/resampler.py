"""MiniCPM-V's resampler: learned queries read the patches by attention, so that each picture has as many tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localllm.models.encoders import grids
from localllm.models.encoders.network import table
from localllm.models.encoders.steps import Encoding, Layout, Part, Run
from localllm.models.encoders.vision import MOST, Vision, VisionEncoder
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Plan

HEAD = 128  # width of a head of the resampler
ROW = Vision(head=lambda network, x: x, resize=grids.buckets, swaps=True, after="v.post_ln")


class ResamplerEncoder(VisionEncoder):
    """A vision encoder with a resampler in place of a projector."""

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        self._queries = np.zeros((0, 0), np.float32)
        super().__init__(ROW, keys, tensors)
        self.parts["head"] = Part(self.parts["head"].plan, MOST + len(self._queries))

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
        received = *self._patches(pictures), self._base(grid)
        (x,) = yield Run("layers", received, (Layout((count,)),))
        layouts = Layout((count,), border=count), Layout((len(queries),), start=count, border=count)
        (y,) = yield Run("head", (x, _waves(grid, queries.shape[1])), layouts, (queries,))
        return y


def _waves(grid: grids.Grid, width: int) -> F32:
    """Return sines and cosines of the column and the row of each patch, (patches, width)."""
    rate = 10000.0 ** (-np.arange(width // 4) / (width // 4))
    x, y = (each[:, None] * rate for each in (grid.x, grid.y))
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)
