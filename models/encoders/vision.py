"""Vision encoders: patches, positions, layers, and a projector over cells of patches.

`VisionEncoder` records the plans of a row of data, `Vision`, and runs them on a picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localllm.base.notices import Notice, Setting
from localllm.models.encoders import banded, grids
from localllm.models.encoders.grids import Grid, Ints
from localllm.models.encoders.keys import length, read_sizes
from localllm.models.encoders.layers import Layers
from localllm.models.encoders.network import Network, Norms, flat, swapped, table
from localllm.models.encoders.positions import Positions
from localllm.models.encoders.vision_row import Vision
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Plan, Value
from localllm.plan.runs import Arranging, Encoding, Layout, Part, Run

MOST = 16384  # patches of a picture, by default: 4096 tokens of 2 x 2 patches


class VisionEncoder:
    """The encoder of a picture: plans, and a generator of their runs."""

    def __init__(self, row: Vision, keys: Keys, tensors: Tensors) -> None:
        sizes = read_sizes(keys, "vision", row.side, row.turn is not None)
        self.row, self.sizes = row, replace(sizes, patch=row.patch * sizes.patch)
        shape = self.sizes.shape
        self._tensors = swapped(tensors, shape.width) if row.swaps else tensors
        self._norms: Norms = row.norms or ("layer" if "v.blk.0.ln1.bias" in tensors else "rms")
        self._features = self._feature_layers(keys)
        self._layer_count = max(self._features) if self._features else shape.layers - row.short
        if self._layer_count < 0:
            raise ModelError(f"clip.vision.block_count: expected at least {row.short} layers, found {shape.layers}")
        self._window = row.window // self.sizes.patch
        if row.window_key:
            self._window = keys.integer("vision.window_size", 1, 1 << 12, row.window) // self.sizes.patch
        self._taps = tuple([n for n in range(shape.layers) if row.deep and f"v.deepstack.{n}.fc1.weight" in tensors])
        self._positions = Positions(row, self._tensors, shape.width)
        if row.table_window and self._positions.table is not None:
            self._window = max(1, math.isqrt(len(self._positions.table)))
        self._global = self._global_layers(keys)
        self._limit = keys.real("vision.swiglu_clamp", 0.0, 1e6, 0.0)
        least, self.most = self._window * self.sizes.side, self._most_patches(keys)
        self.parts = {
            "layers": Part(self._layers(), self.most + len(self._positions.learned), least),
            "head": Part(self._head(), max(64, self.most // self.sizes.side**2)),
        }

        self._break: F32 | None = None
        if row.break_row and row.break_row in tensors:
            self._break = table(tensors, row.break_row, 1, self.width)
        self._ends = [table(tensors, name, 1, self.width) for name in row.ends or ()]

    # -- what the file says --------------------------------------------------------------------------------------------

    def _global_layers(self, keys: Keys) -> frozenset[int]:
        """Return the layers that attend to the whole picture; the others attend to windows."""
        layers = range(self._layer_count)
        if keys.holds("vision.wa_layer_indexes"):
            count = length(keys, "vision.wa_layer_indexes", 512)
            return frozenset(keys.integers("vision.wa_layer_indexes", count, 0, 511))
        period = keys.integer("vision.n_wa_pattern", 0, 512, self.row.period)
        last = self._layer_count - 1 if self.row.period else -1
        return frozenset([n for n in layers if not self._window or not period or (n + 1) % period == 0 or n == last])

    def _most_patches(self, keys: Keys) -> int:
        """Return the largest number of patches of a picture, which bounds the memory."""
        positions = self._positions.table
        if positions is not None and self.row.resize == "fixed" and not self.row.axes_table:
            return min(MOST, len(positions))
        pixels = keys.integer("vision.image_max_pixels", 0, 1 << 40, 0)
        return max(64, min(MOST, pixels // self.sizes.patch**2)) if pixels else MOST

    def _feature_layers(self, keys: Keys) -> tuple[int, ...]:
        """Return the numbers of layers, counted from 1, whose outputs stand side by side; () means only the last."""
        if not keys.holds("vision.feature_layer"):
            return ()
        count = length(keys, "vision.feature_layer", 16)
        return keys.integers("vision.feature_layer", count, 1, max(1, self.sizes.shape.layers))

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _network(self) -> Network:
        row, sizes = self.row, self.sizes
        network = Network(self._tensors, sizes.eps, row.activation or sizes.activation, self._norms)
        network.limit = self._limit
        return network

    def _layers(self) -> Plan:
        """Record the layers, one stage each. Tapped layers are results, too."""
        network, row, shape, size = self._network(), self.row, self.sizes.shape, self.sizes.patch
        recorder = network.recorder
        inputs = {f"patches {number}": 3 * size * size for number in range(row.kernels)}
        if self._positions.added:
            inputs["positions"] = shape.width
        (*patches,) = recorder.receive_all(inputs)
        added = patches.pop() if self._positions.added else None
        x = self._embedded(network, patches, added)
        if row.before:
            x = network.norm(x, row.before)
        layers, taps = Layers(network, shape, row.style_of(shape.head_dim)), []
        features: list[Value] = []
        for number in range(self._layer_count):
            if number:
                network.end()
            x = layers.layer(x, number)
            if number in self._taps:
                taps.append(x)
            if number + 1 in self._features:
                features.append(x)
        after = "v.post_ln" if features else row.after
        if after:
            x = network.norm(x, after)
        for earlier in reversed(features[:-1]):
            x = recorder.concat(earlier, x)
        cell_norm = row.cell_norm.removeprefix("?")
        if cell_norm == row.cell_norm != "" or f"{cell_norm}.weight" in network.tensors:
            x = network.norm(x, cell_norm, row.cell_norms, row.cell_eps)
        if row.per_patch is not None:
            x = row.per_patch(network, x)
        self._columns = x.width
        network.end(x, *taps)
        return network.plan()

    def _embedded(self, network: Network, patches: Sequence[Value], added: Value | None) -> Value:
        recorder, width, names = (
            network.recorder,
            self.sizes.shape.width,
            ("v.patch_embd.weight", "v.patch_embd.weight.1"),
        )
        bias = (
            None
            if self.row.cls or "v.patch_embd.bias" not in network.tensors
            else flat(network.tensors, "v.patch_embd.bias", (width,))
        )
        if "v.patch_norm.1.weight" in network.tensors:
            patches = [network.norm(patch, "v.patch_norm.1", eps=1e-5) for patch in patches]
        x = None
        for patch, name in zip(patches, names, strict=False):
            y = recorder.linear(patch, flat(network.tensors, name, (width, patch.width)), bias if x is None else None)
            x = y if x is None else recorder.add(x, y)
        assert x is not None
        if "v.norm_embd.weight" in network.tensors:
            x = network.norm(x, "v.norm_embd")
        if "v.patch_norm.2.weight" in network.tensors:
            x = network.norm(x, "v.patch_norm.2", eps=1e-5)
        x = x if added is None else recorder.add(x, added)
        return network.norm(x, "v.patch_norm.3", eps=1e-5) if "v.patch_norm.3.weight" in network.tensors else x

    def _cell_columns(self) -> int:
        """Return the width of a cell, the input of the projector."""
        return self.sizes.side**2 * self._columns

    def _head(self) -> Plan:
        """Record the projector over cells of patches, and the projectors of tapped layers."""
        network, columns = self._network(), self._cell_columns()
        names = ["cells", *[f"cells {number}" for number in self._taps]]
        x, *taps = network.recorder.receive_all(dict.fromkeys(names, columns))
        y = self.row.head(network, x)
        for number, tap in zip(self._taps, taps, strict=True):
            name = f"v.deepstack.{number}."
            deep = network.mlp(network.norm(tap, name + "norm", "layer"), name + "fc1", name + "fc2", "gelu_erf")
            y = network.recorder.concat(y, deep)
        network.end(y)
        self.width = y.width
        return network.plan()

    # -- runs ----------------------------------------------------------------------------------------------------------

    def encode(self, pictures: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs of a picture (height, width, 3), or of two pictures of equal size, the frames of a video."""
        grid = self._grid(pictures[0])
        order = np.arange(len(grid.y))
        windows: tuple[int, ...] = (len(order),)
        if self._window and len(self._global) < self._layer_count:
            order, windows = grid.windows(self._window)
        index, row = grid.index[order], self.row
        received = yield from self._received(pictures, grid, index)
        x, *taps = yield from self._attended(received, grid, order, windows)
        inputs = []
        for each in (x, *taps):
            own, side = self._positions.without_learned(each), self.sizes.side
            cells = yield from banded.cells(own, grid, index, side, row.channels_first, row.padded)
            inputs.append((yield from self._prepared(cells, grid)))
        (y,) = yield Run("head", tuple(inputs), (Layout((len(inputs[0]),)),))
        return (yield from self._finished(y, grid, flags))

    def _received(self, pictures: Sequence[F32], grid: Grid, index: Ints) -> Arranging[tuple[F32, ...]]:
        """Return the patches of each kernel, then their positions if there are any. `index` is the order of patches.

        A single picture is read by all kernels. Patches have zeros in the place of learned rows.
        """
        row, size, found = self.row, self.sizes.patch, list[F32]()
        for picture in pictures[: row.kernels]:
            rows, own, learned = self._positions.room(len(index), 3 * size * size)
            learned[:] = 0.0
            yield from banded.patches(picture, size, index, own, row.signed, row.pixels_last)
            found.append(rows)
        found *= row.kernels // len(found)
        if self._positions.added:
            rows, own, learned = self._positions.room(len(index), self.sizes.shape.width)
            learned[:] = self._positions.of_learned()
            yield from banded.taken((yield from self._positions.of(grid)), index, own)
            found.append(rows)
        return tuple(found)

    def _attended(
        self, received: tuple[F32, ...], grid: Grid, order: Ints, windows: tuple[int, ...]
    ) -> Arranging[list[F32]]:
        """Return the results of the layers, whose rows are patches in this order."""
        return (yield Run("layers", received, self._layouts(grid, order, windows)))

    def _prepared(self, x: F32, grid: Grid) -> Encoding:
        """Return the input of the projector from cells in row-major order."""
        yield from ()
        return x

    def check(self, pictures: Sequence[F32]) -> None:
        """Raise ModelError if the encoder cannot take pictures of this size."""
        self._patches(pictures[0])

    def _grid(self, picture: F32) -> Grid:
        rows, columns = self._patches(picture)
        if self.row.order == "cells":
            return grids.by_cells(rows, columns, self.sizes.side)
        return grids.by_rows(rows, columns)

    def _patches(self, picture: F32) -> tuple[int, int]:
        """Return the rows and columns of patches."""
        rows, columns = (n // self.sizes.patch for n in picture.shape[:2])
        side, found = self.sizes.side, f"{rows} x {columns} patches"
        exact = all(n % self.sizes.patch == 0 for n in picture.shape[:2])
        exact = exact and (rows % side == columns % side == 0 or self.row.padded)
        if not rows or not columns or not exact or picture.shape[2:] != (3,):
            raise ModelError(
                f"picture: {picture.shape} is not a whole number of cells of {side * self.sizes.patch} pixels"
            )
        if rows * columns > self.most:
            limit = Setting("image_max_tokens", self.most // side**2)
            problem = f"{found} are more than {self.most}; use a smaller picture, or load the model with "
            raise ModelError(Notice(problem, limit))
        positions = self._positions.table if self.row.axes_table else None
        if positions is not None and 2 * max(rows, columns) > len(positions):
            half = len(positions) // 2
            raise ModelError(f"{found}, and the position table has {half} per side; use a smaller picture")
        return rows, columns

    def _layouts(self, grid: Grid, order: Ints, windows: tuple[int, ...]) -> tuple[Layout, ...]:
        axes = None
        if self.row.turn is not None:
            own = grid.axes("y", "x", shift=self.row.turned_from)[order]
            zeros = np.zeros((len(self._positions.learned), 2), np.int32)
            axes = np.concatenate([zeros, own] if self.row.cls == "first" else [own, zeros])
        whole = Layout((len(order) + len(self._positions.learned),), axes)
        parts = Layout(windows, axes)
        return tuple([whole if n in self._global else parts for n in range(self._layer_count)]) or (whole,)

    def _finished(self, y: F32, grid: Grid, flags: Sequence[int]) -> Encoding:
        """Return the embeddings with the learned rows between lines and at both ends."""
        if self._break is None and not self._ends:
            return y
        count, marks, index = len(y), list(self._ends), np.arange(len(y))
        if self._break is not None:
            index = banded.with_ends(count, -(-grid.rows // self.sizes.side), count + len(marks)).reshape(-1)[:-1]
            marks.append(self._break)
        if self._ends:
            index = np.concatenate([[count], index, [count + 1]])
        return (yield from banded.chosen(y, index, *marks))
