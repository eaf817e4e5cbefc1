"""MiMo-VL: most layers attend to neighbours along rows or columns of cells, the others to the whole picture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from localllm.models.encoders import banded
from localllm.models.encoders.grids import Grid, Ints
from localllm.models.encoders.heads import mlp
from localllm.models.encoders.layers import Layers, halves
from localllm.models.encoders.vision import VisionEncoder
from localllm.models.encoders.vision_row import Vision
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Plan
from localllm.plan.runs import Arranging, Layout, Part, Run

WHOLE, ROWS, COLUMNS = -1, 0, 1  # modes of a layer


class MimoVisionEncoder(VisionEncoder):
    """A vision encoder whose layers are grouped into parts, between which the order of the cells changes."""

    ROW = Vision(
        head=mlp("mm.0", "mm.2"), order="cells", kernels=2, norms="rms", turn=halves(), side=2, cell_norm="v.post_ln",
        cell_norms="layer", cell_eps=1e-6,
    )  # fmt: skip

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        heads = keys.integer("vision.attention.head_count", 1, 256)
        kv_heads = keys.integer("vision.attention.head_count_kv", 1, 256, heads)
        width = tensors.height("v.blk.0.attn_qkv.weight") // (heads + 2 * kv_heads)
        layers = keys.integer("vision.block_count", 1, 512)
        self._modes = keys.integers("vision.wa_pattern_mode", layers, WHOLE, COLUMNS)
        self._distance = keys.integer("vision.window_size", 1, 1 << 14)
        super().__init__(self.ROW, keys.having(vision__attention__key_length=width), tensors)
        if self.sizes.side != self.ROW.side:
            raise ModelError(f"clip.vision.spatial_merge_size: expected {self.ROW.side}, found {self.sizes.side}")
        for number, mode in enumerate(self._modes):
            if mode != WHOLE:
                tensors.vector(f"v.blk.{number}.attn_sinks", heads)
        for number, (start, stop, _) in enumerate(self._groups()):
            if number:
                self.parts[f"layers {number}"] = Part(self._recorded(start, stop), self.parts["layers"].rows)

    def _groups(self) -> list[tuple[int, int, bool]]:
        """Return the start and the end of groups of layers, and whether their cells are ordered by column."""
        found: list[tuple[int, int, bool]] = []
        for number, mode in enumerate(self._modes):
            columns = mode == COLUMNS
            if found and (mode == WHOLE or found[-1][2] == columns):  # the order does not matter to the whole
                found[-1] = (found[-1][0], number + 1, found[-1][2])
            else:
                found.append((number, number + 1, columns))
        return found

    def _layers(self) -> Plan:
        start, stop, _ = self._groups()[0]
        return self._recorded(start, stop)

    def _recorded(self, start: int, stop: int) -> Plan:
        network, shape, size = self._network(), self.sizes.shape, self.sizes.patch
        names = ("patches 0", "patches 1") if not start else ("patches",)
        columns = shape.width if start else 3 * size * size
        received = network.recorder.receive_all(dict.fromkeys(names, columns))
        x = received[0] if start else self._embedded(network, received, None)
        reaches = tuple([0 if mode == WHOLE else self._distance for mode in self._modes])
        layers = Layers(network, shape, replace(self.row.style_of(shape.head_dim), reaches=reaches))
        for number in range(start, stop):
            if number > start:
                network.end()
            x = layers.layer(x, number)
        self._columns = x.width
        if stop == shape.layers:
            assert self.row.cell_norms is not None
            x = network.norm(x, self.row.cell_norm, self.row.cell_norms, self.row.cell_eps)
        network.end(x)
        return network.plan()

    def _attended(
        self, received: tuple[F32, ...], grid: Grid, order: Ints, windows: tuple[int, ...]
    ) -> Arranging[list[F32]]:
        side = self.sizes.side
        cells = np.arange(len(order) // side**2).reshape(grid.rows // side, grid.columns // side)
        by_column = (cells.T.reshape(-1, 1) * side**2 + np.arange(side**2)).reshape(-1)
        axes = grid.axes("y", "x")[order]
        for number, (_, _, columns) in enumerate(self._groups()):
            own = by_column if columns else np.arange(len(order))
            layout, inputs = Layout((len(order),), axes[own]), []
            for each in received:
                inputs.append((yield from banded.chosen(each, own)) if columns else each)
            (x,) = yield Run(f"layers {number}" if number else "layers", tuple(inputs), (layout,))
            received = ((yield from banded.chosen(x, banded.places(by_column))) if columns else x,)
        return list(received)
