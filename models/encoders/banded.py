"""Rearranges patches, tables and cells in bands of rows. Between two bands, an encoder lets other work run."""

from __future__ import annotations

import numpy as np

from localllm.models.encoders import grids
from localllm.models.encoders.grids import Grid, Ints
from localllm.plan import F32
from localllm.plan.runs import Arranging, bands


def places(index: Ints) -> Ints:
    """Return the place of each row in an order of all rows."""
    found = np.empty_like(index)
    found[index] = np.arange(len(index))
    return found


def patches(
    picture: F32, size: int, index: Ints, into: F32, signed: bool = False, last: bool = False
) -> Arranging[None]:
    """Store the patches of a picture, as `grids.patch_rows` makes them, in the order `index` of row-major numbers.

    With `signed`, pixels from 0 to 1 become -1 to 1.
    """
    place, across = places(index), picture.shape[1] // size
    for band in bands(picture.shape[0] // size, across * into.strides[0]):
        own = picture[band.start * size : band.stop * size]
        own = own * 2 - 1 if signed else own
        into[place[band.start * across : band.stop * across]] = grids.patch_rows(own, size, last)
        yield None


def taken(rows: F32, index: Ints, into: F32) -> Arranging[None]:
    """Store the rows with these numbers."""
    for band in bands(len(index), into.strides[0]):
        into[band] = rows[index[band]]
        yield None


def chosen(rows: F32, index: Ints, *learned: F32) -> Arranging[F32]:
    """Return the rows with these numbers. Learned rows, (1, width) each, have the numbers after `rows`."""
    count, found = len(rows), np.empty((len(index), rows.shape[1]), np.float32)
    for band in bands(len(index), found.strides[0]):
        own = index[band]
        found[band] = rows[np.minimum(own, count - 1)]
        for number, row in enumerate(learned, count):
            found[band][own == number] = row
        yield None
    return found


def with_ends(count: int, lines: int, mark: int) -> Ints:
    """Return the numbers of `count` rows, (lines, rows per line + 1), with this number at the end of each line."""
    return np.pad(np.arange(count).reshape(lines, -1), ((0, 0), (0, 1)), constant_values=mark)


def cells(
    x: F32, grid: Grid, index: Ints, side: int, channels_first: bool = False, padded: bool = False
) -> Arranging[F32]:
    """Return `grids.cells` of rows of patches, which are in the order `index` of row-major numbers."""
    place, columns = places(index), grid.columns
    down, across = ((n + (side - 1) * padded) // side for n in (grid.rows, columns))
    found = np.empty((down * across, side * side * x.shape[1]), np.float32)
    for band in bands(down, across * found.strides[0]):
        first, stop = band.start * side, min(band.stop * side, grid.rows)
        own = x[place[first * columns : stop * columns]]
        found[band.start * across : band.stop * across] = grids.cells(
            own, stop - first, columns, side, channels_first, padded
        )
        yield None
    return found
