"""What is added to patches: position tables, resized to the picture, and learned rows before or behind the patches."""

from __future__ import annotations

import numpy as np

from localllm.models.encoders import grids
from localllm.models.encoders.grids import Grid
from localllm.models.encoders.network import table
from localllm.models.encoders.vision_row import Vision
from localllm.models.errors import ModelError
from localllm.models.tensors import Tensors
from localllm.plan import F32
from localllm.plan.runs import Arranging, bands


class Positions:
    """The position table of a vision encoder, which may be absent, and its learned rows."""

    def __init__(self, row: Vision, tensors: Tensors, width: int) -> None:
        self._row, self._width = row, width
        self.learned, self.table, self._bias = self._tables(tensors)
        self._sized: tuple[tuple[int, int], F32] | None = None  # the newest result, with its size in patches

    @property
    def added(self) -> bool:
        """Whether anything is added to the patches."""
        return bool(self._row.cls) or self.table is not None

    def _tables(self, tensors: Tensors) -> tuple[F32, F32 | None, F32]:
        """Return what is added to the patches: learned rows, positions and, with learned rows, the bias."""
        row, width = self._row, self._width
        learned, bias = np.zeros((0, width), np.float32), np.zeros((1, width), np.float32)
        if row.cls:
            learned = table(tensors, "v.class_embd", tensors.values("v.class_embd") // width or 1, width)
            if "v.patch_embd.bias" in tensors:
                bias = table(tensors, "v.patch_embd.bias", 1, width)
        name = "v.position_embd.weight"
        if row.resize is None or (row.optional_table and name not in tensors):
            return learned, None, bias
        return learned, table(tensors, name, tensors.values(name) // width or 1, width), bias

    def of_learned(self) -> F32:
        """Return the learned rows with their positions."""
        if len(self.learned) and self._shares_table and self.table is not None:
            return self.learned + self._split(self.table)[0]
        return self.learned

    def of(self, grid: Grid) -> Arranging[F32]:
        """Return what is added to the patches, computed again only if the size changes, because that takes a while."""
        size, sized = (grid.rows, grid.columns), self._sized
        if sized is None or sized[0] != size:
            self._sized = sized = size, (yield from self._computed(grid))
        return sized[1]

    def _computed(self, grid: Grid) -> Arranging[F32]:
        """Return what is added to the patches, in row-major order: positions and, with learned rows, the bias."""
        count = grid.rows * grid.columns
        positions, row = self.table, self._row
        if positions is None:
            found = np.zeros((count, self._width), np.float32)
        elif row.axes_table:
            flat_grid, half = grids.by_rows(grid.rows, grid.columns), len(positions) // 2
            found = np.empty((count, positions.shape[1]), np.float32)
            for band in bands(count, found.strides[0]):
                found[band] = positions[flat_grid.x[band]] + positions[half + flat_grid.y[band]]
                yield None
        else:
            own = self._split(positions)[1] if self._shares_table else positions
            found = own
            if callable(row.resize):
                found = yield from grids.resized(own, grid.rows, grid.columns, row.resize)
            if len(found) != count:
                raise ModelError(f"picture: {count} patches, and the position table has {len(found)}")
        both = np.empty_like(found)
        for band in bands(count, both.strides[0]):
            both[band] = found[band] + self._bias
            yield None
        return both

    @property
    def _shares_table(self) -> bool:
        """Whether the position table has rows for the learned rows, too."""
        return bool(self._row.cls) and self._row.cls_position

    def _split(self, positions: F32) -> tuple[F32, F32]:
        """Return the positions of the learned rows, and of the patches."""
        count = len(self.learned)
        if self._row.cls == "first":
            return positions[:count], positions[count:]
        return positions[-count:], positions[:-count]

    def room(self, count: int, width: int) -> tuple[F32, F32, F32]:
        """Return memory for rows of patches with the learned rows before or after them, and both parts of it."""
        rows, learned = np.empty((count + len(self.learned), width), np.float32), len(self.learned)
        if self._row.cls == "first":
            return rows, rows[learned:], rows[:learned]
        return rows, rows[:count], rows[count:]

    def without_learned(self, rows: F32) -> F32:
        count = len(self.learned)
        if not count:
            return rows
        return rows[count:] if self._row.cls == "first" else rows[:-count]
