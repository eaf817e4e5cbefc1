"""Grids of patches: the order of patches, windows, cells of merged patches, and resized position tables.

Everything here depends only on the size of a picture, so it is computed with NumPy and given to the plan as input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.plan import F32
from localllm.plan.runs import Arranging

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The patches of a picture in the order in which the encoder takes them."""

    rows: int
    columns: int
    y: Ints  # (patches,)
    x: Ints

    @property
    def index(self) -> Ints:
        """The index of each patch in row-major order."""
        return self.y * self.columns + self.x

    def axes(self, *names: str, shift: int = 0) -> NDArray[np.int32]:
        return np.stack([getattr(self, name) + shift for name in names], axis=1).astype(np.int32)

    def windows(self, side: int) -> tuple[Ints, tuple[int, ...]]:
        """Return the order that puts the patches of each window of side x side together, and the windows' sizes."""
        number = self.y // side * (-(-self.columns // side)) + self.x // side
        order = np.argsort(number, kind="stable")
        counts = np.bincount(number)
        return order, tuple(counts[counts > 0].tolist())


def by_rows(rows: int, columns: int) -> Grid:
    y, x = np.mgrid[0:rows, 0:columns].astype(np.int64)
    return Grid(rows, columns, y.reshape(-1), x.reshape(-1))


def by_cells(rows: int, columns: int, side: int) -> Grid:
    """Return the order in which the patches of each cell of side x side follow each other."""
    grid = np.mgrid[0:rows, 0:columns].astype(np.int64)
    y, x = grid.reshape(2, rows // side, side, columns // side, side).transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return Grid(rows, columns, y, x)


def patch_rows(picture: F32, size: int, last: bool = False) -> F32:
    """Return the patches (patches, 3 * size * size) of a picture (height, width, 3), in rows.

    The values of a patch are in the order channel, row, column; with `last`, row, column, channel.
    """
    rows, columns = picture.shape[0] // size, picture.shape[1] // size
    x = picture[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
    order = (0, 2, 1, 3, 4) if last else (0, 2, 4, 1, 3)
    return np.ascontiguousarray(x.transpose(order), np.float32).reshape(rows * columns, -1)


def cells(x: F32, rows: int, columns: int, side: int, channels_first: bool = False, padded: bool = False) -> F32:
    """Return the cells (cells, side * side * width) of rows of patches in row-major order.

    The values of a cell are in the order row, column, channel, or channel, row, column. With `padded`, an incomplete
    last row or column of cells is filled with zeros.
    """
    grid = x.reshape(rows, columns, -1)
    if padded:
        grid = np.pad(grid, ((0, -rows % side), (0, -columns % side), (0, 0)))
    down, across = grid.shape[0] // side, grid.shape[1] // side
    parts = grid[: down * side, : across * side].reshape(down, side, across, side, -1)
    order = (0, 2, 4, 1, 3) if channels_first else (0, 2, 1, 3, 4)
    return np.ascontiguousarray(parts.transpose(order)).reshape(down * across, -1)


# -- position tables ---------------------------------------------------------------------------------------------------

Weights = NDArray[np.float64]
Resize = Callable[[int, int], Weights]  # (size of the table, size of the grid) -> weights (grid, table)


def resized(table: F32, rows: int, columns: int, weights: Resize) -> Arranging[F32]:
    """Return a square table (side * side, width) for a grid, in row-major order, (rows * columns, width).

    Sums have a fixed order. In a matrix product of NumPy, the order depends on the processor.
    """
    side = math.isqrt(len(table))
    if (rows, columns) == (side, side) and weights is not enlarged:
        return table
    grid, found = table.reshape(side, side, -1), np.empty((rows, columns, table.shape[1]), np.float32)
    across, factors = _terms(weights(side, columns))
    for row, (lines, own) in enumerate(zip(*_terms(weights(side, rows)), strict=True)):
        line = np.zeros(grid.shape[1:])
        for n, factor in zip(lines, own, strict=True):
            line += grid[n].astype(np.float64) * factor
        both = np.zeros((columns, line.shape[1]))
        for n in range(across.shape[1]):
            both += line[across[:, n]] * factors[:, n, None]
        found[row] = both
        yield None
    return found.reshape(rows * columns, -1)


def _terms(weights: Weights) -> tuple[Ints, Weights]:
    """Return which entries of the table each place of the grid takes, and by which factors. Most weights are 0."""
    most = int((weights != 0).sum(axis=1).max())
    places = np.argsort(weights == 0, axis=1, kind="stable")[:, :most]  # weights that are not 0 come first
    index = np.sort(places, axis=1)
    return index, np.take_along_axis(weights, index, axis=1)


def _spread(side: int, count: int, positions: Weights) -> Weights:
    """Return linear interpolation weights at fractional positions within the table."""
    found = np.zeros((count, side))
    for row, at in enumerate(np.clip(positions, 0, side - 1).tolist()):
        low = min(int(at), side - 1)
        found[row, low] += 1 - (at - low)
        found[row, min(low + 1, side - 1)] += at - low
    return found


def corners(side: int, count: int) -> Weights:
    """Interpolate linearly; the first and the last positions coincide with the table's."""
    return _spread(side, count, np.arange(count, dtype=np.float64) * ((side - 1) / max(count - 1, 1)))


def linear(side: int, count: int) -> Weights:
    """Interpolate linearly between the centres of cells, without antialiasing."""
    return _spread(side, count, (np.arange(count) + 0.5) * side / count - 0.5)


def enlarged(side: int, count: int) -> Weights:
    """Interpolate like `linear`, but for a grid that is larger by a tenth of a cell, as HunyuanVL does."""
    return _spread(side, count, (np.arange(count, dtype=np.float64) + 0.5) * side / (count + 0.1) - 0.5)


def antialiased(side: int, count: int) -> Weights:
    """Interpolate linearly with a triangle filter as wide as a cell of the grid."""
    support, found = max(1.0, side / count), np.zeros((count, side))
    for row in range(count):
        centre = (row + 0.5) * side / count
        for at in range(max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), side)):
            found[row, at] = max(0.0, 1 - abs((at - centre + 0.5) / support))
    found /= found.sum(axis=1, keepdims=True)
    return found


def cubic(side: int, count: int) -> Weights:
    """Interpolate with cubics (a = -0.75), without antialiasing; positions outside repeat the border."""
    a, found = -0.75, np.zeros((count, side))
    for row in range(count):
        centre = (row + 0.5) * side / count - 0.5
        first = math.floor(centre)
        for at in range(first - 1, first + 3):
            t = abs(centre - at)
            weight = ((a + 2) * t - (a + 3)) * t * t + 1 if t <= 1 else ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
            found[row, min(max(at, 0), side - 1)] += weight
    return found


def buckets(side: int, count: int) -> Weights:
    """Take the nearest earlier entry: position i of n reads entry i * side // n."""
    return np.eye(side)[np.arange(count) * side // count]
