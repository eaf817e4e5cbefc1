"""Granite 4 Vision: a QFormer per listed layer; their results stand side by side, for the layers of the text model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from localllm.models.encoders import banded, grids
from localllm.models.encoders.grids import Ints
from localllm.models.encoders.keys import length
from localllm.models.encoders.layers import Layers
from localllm.models.encoders.network import table
from localllm.models.encoders.qformer import EPS, attended_to_each_other, attended_to_rows, cross_runs, stored
from localllm.models.encoders.vision import VisionEncoder
from localllm.models.encoders.vision_row import Vision
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Plan
from localllm.plan.runs import Arranging, Encoding, Layout, Part, Run

HEAD = 64  # width of a head of the QFormers
TILES = 257  # the overview and a grid of 256


class GraniteVisionEncoder(VisionEncoder):
    """The encoder of square tiles, one below the other, the overview first."""

    ROW = Vision(head=lambda network, x: x, resize="fixed")

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        count = length(keys, "vision.feature_layer", 16)
        self._sources = keys.integers("vision.feature_layer", count, 0, keys.integer("vision.block_count", 1, 512) - 1)
        self._offsets = keys.integers("vision.projector.spatial_offsets", count, -1, 3)
        self._query, self._span = (keys.integer(f"vision.projector.{of}_side", 1, 64) for of in ("query", "window"))
        side = keys.integer("vision.image_size", 1, 1 << 14) // keys.integer("vision.patch_size", 1, 256)
        self._side, self._new = side, side // self._span * self._query  # patches and tokens per side of a tile
        if side % self._span or not self._new or side % self._new:
            raise ModelError(f"clip.vision.projector.window_side: {self._span} does not fit {side} patches per side")
        if any(offset >= 0 for offset in self._offsets) and side != 2 * self._new:
            raise ModelError("clip.vision.projector.spatial_offsets: an offset needs two patches per token and side")
        super().__init__(self.ROW, keys.having(vision__feature_layer=None), tensors)
        del self.parts["head"]
        self._constants: list[tuple[F32, F32]] = []
        self.width = 0
        for number in range(count):
            self._record(number)
        self._newline = np.tile(table(tensors, "v.image_newline", 1, self.width // count), count)

    def _layers(self) -> Plan:
        """Record the layers up to the last listed one; the results are the normed outputs of the listed layers."""
        network, shape = self._network(), self.sizes.shape
        patches, positions = network.recorder.receive_all(
            {"patches": 3 * self.sizes.patch**2, "positions": shape.width}
        )
        x, layers, found = self._embedded(network, [patches], positions), Layers(network, shape, self.row.style), {}
        for number in range(max(self._sources) + 1):
            if number:
                network.end()
            x = found[number] = layers.layer(x, number)
        self._columns = shape.width
        network.end(
            *[network.norm(found[source], f"v.proj_blk.{n}.norm", "layer") for n, source in enumerate(self._sources)]
        )
        return network.plan()

    def _record(self, number: int) -> None:
        name, width = f"v.proj_blk.{number}.", self.sizes.shape.width
        windows, rows, queries = (self._side // self._span) ** 2, self._span**2, self._query**2
        network = self._network()
        cells = (self._side // self._new) ** 2 if self._offsets[number] < 0 else 1
        x, added = network.recorder.receive_all({"cells": cells * width, "query": width})
        x = network.recorder.add(network.mean(x, cells) if cells > 1 else x, added)
        x = network.norm(x, name + "post_norm", "layer", EPS)
        network.end(attended_to_each_other(network, x, name, max(1, width // HEAD)))
        self.parts[f"queries {number}"] = Part(network.plan(), windows * queries, queries)
        network = self._network()
        x, added = network.recorder.receive_all({"rows": width, "positions": width})
        heads = max(1, width // HEAD)
        layer = stored(network, network.recorder.add(x, added), name, width, heads)
        network.end()
        x = network.recorder.receive(width, "queries")
        y = network.linear(attended_to_rows(network, x, name, layer, heads, "gelu_erf"), name + "linear")
        network.end(y)
        self.parts[f"tokens {number}"] = Part(network.plan(), windows * max(rows, queries), rows)
        self.width += y.width
        own = (
            table(network.tensors, name + "query", queries, width),
            table(network.tensors, name + "img_pos", rows, width),
        )
        self._constants.append((np.tile(own[0], (windows, 1)), np.tile(own[1], (windows, 1))))

    # -- runs ----------------------------------------------------------------------------------------------------------

    def check(self, pictures: Sequence[F32]) -> None:
        shape, size = pictures[0].shape, self._side * self.sizes.patch
        count = len(pictures[0]) // size
        if shape != (count * size, size, 3) or not 1 <= count <= TILES:
            raise ModelError(f"picture: {shape} is not 1 to {TILES} tiles of {size} x {size} pixels")

    def encode(self, pictures: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs. Flags 3 to 6 are the columns and rows of the grid of tiles, and the picture's size."""
        self.check(pictures)
        picture, size = pictures[0], self._side * self.sizes.patch
        count = len(picture) // size
        across, down, width, height = flags[3:7] if len(flags) >= 7 else (0, 0, 0, 0)
        if count > 1 and (count != 1 + across * down or min(width, height, across, down) < 1):
            raise ModelError(f"picture: {count - 1} tiles, which are not a grid of {across} x {down}")
        each = self._new**2  # tokens of a tile
        rows = np.empty((count * each, self.width), np.float32)
        for tile in range(count):
            own = picture[tile * size : (tile + 1) * size]
            yield from self._tile(own, rows[tile * each : (tile + 1) * each])
        if count == 1:
            return rows
        new = self._new
        x = np.arange(each, count * each).reshape(down, across, new, new).transpose(0, 2, 1, 3)
        x = _without_padding(x.reshape(down * new, across * new), width, height)
        x = np.pad(x, ((0, 0), (0, 1)), constant_values=count * each)
        index = np.concatenate([np.arange(each), x.reshape(-1)])
        return (yield from banded.chosen(rows, index, self._newline))

    def _tile(self, picture: F32, into: F32) -> Arranging[None]:
        """Store the tokens of a tile."""
        grid = self._grid(picture)
        received = yield from self._received([picture], grid, grid.index)
        results = yield Run("layers", received, (Layout((len(grid.y),)),))
        side, new, windows, at = self._side, self._new, (self._side // self._span) ** 2, 0
        order, windowed = grids.by_cells(new, new, self._query).index, grids.by_cells(side, side, self._span).index
        for number, (x, offset) in enumerate(zip(results, self._offsets, strict=True)):
            query, positions = self._constants[number]
            if offset < 0:
                own = yield from banded.cells(x, grid, grid.index, side // new)
                cells = yield from banded.chosen(own, order)
            else:
                one_of_four = grid.index.reshape(side, side)[offset >> 1 :: 2, offset & 1 :: 2].reshape(-1)
                cells = yield from banded.chosen(x, one_of_four[order])
            (q,) = yield Run(f"queries {number}", (cells, query), (Layout((self._query**2,) * windows),))
            rows = yield from banded.chosen(x, windowed)
            y = yield from cross_runs(f"tokens {number}", (rows, positions), (q,), windows)
            yield from banded.taken(y, banded.places(order), into[:, at : at + y.shape[1]])
            at += y.shape[1]


def _without_padding(grid: Ints, width: int, height: int) -> Ints:
    """Return the numbers of the tokens that show the picture (width, height), centred in the grid with its ratio."""
    rows, columns = grid.shape[:2]
    if np.float32(width) / np.float32(height) > np.float32(columns) / np.float32(rows):
        cut = (rows - math.floor(height * columns / width + 1e-7)) // 2
        return grid[cut : rows - cut]
    cut = (columns - math.floor(width * rows / height + 1e-7)) // 2
    return grid[:, cut : columns - cut]
