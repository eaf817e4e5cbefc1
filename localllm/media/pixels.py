"""Operations on pictures, (height, width, 3) uint8: resizing by Pillow, padding, normalizing, sizes that fit a grid.

llama.cpp's resizing has Pillow's fixed-point weights and gives the same bytes. Sizes are computed in float32 as there,
because a size that differs by one pixel changes every patch.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from localllm.media.errors import INSTALL, MediaError

Picture = NDArray[np.uint8]  # (height, width, 3)
Filter = Literal["bilinear", "bicubic", "lanczos"]
Color = tuple[int, int, int]

MOST_PIXELS = 20 << 20  # of a resized picture: 240 MB in float32
MOST_SIDE = 1 << 16
BLACK: Color = (0, 0, 0)
_F = np.float32


def pillow() -> Any:
    """Return the module PIL.Image, or raise MediaError if Pillow is missing."""
    try:
        from PIL import Image
    except ImportError:
        raise MediaError(f"pictures need Pillow; run: {INSTALL}") from None
    return Image


def check_size(width: int, height: int, most: int = MOST_PIXELS) -> None:
    """Raise MediaError if a picture of this size would take too much memory."""
    if not (0 < width <= MOST_SIDE and 0 < height <= MOST_SIDE and width * height <= most):
        raise MediaError(
            f"the encoder would read the picture as {width} x {height} pixels; at most {most} pixels and"
            f" {MOST_SIDE} on a side are supported: crop the picture, or limit its tokens"
        )


def stretched(picture: Picture, width: int, height: int, filter: Filter) -> Picture:
    """Return the picture resized to this size, without keeping its ratio."""
    check_size(width, height)
    if picture.shape[:2] == (height, width):
        return picture
    check_size(width, picture.shape[0], 4 * MOST_PIXELS)  # after the first pass
    image = pillow()
    kernel = image.Resampling[filter.upper()]
    # Columns first, in two calls: Pillow 13 chooses the order itself, and bytes differ by one.
    with image.fromarray(np.ascontiguousarray(picture)) as source:
        return np.asarray(source.resize((width, source.height), kernel).resize((width, height), kernel))


def padded(
    picture: Picture, width: int, height: int, filter: Filter, color: Color = BLACK, nearest: bool = False
) -> Picture:
    """Return the picture resized with its ratio kept, centred on `color`. Sizes are rounded up, or to the nearest."""
    check_size(width, height)
    high, wide = picture.shape[:2]
    if (wide, high) == (width, height):
        return picture
    scale = min(_F(width) / _F(wide), _F(height) / _F(high))
    fit = rounded if nearest else math.ceil
    new_width, new_height = min(fit(_F(wide) * scale), width), min(fit(_F(high) * scale), height)
    x, y = (width - new_width) / 2, (height - new_height) / 2
    left, top = (rounded(x), rounded(y)) if nearest else (int(x), int(y))
    out = np.empty((height, width, 3), np.uint8)
    out[:] = color
    if new_width < 1 or new_height < 1:
        raise MediaError(f"a picture of {wide} x {high} pixels is too narrow for {width} x {height}; crop it")
    resized = stretched(picture, new_width, new_height, filter)[: height - top, : width - left]
    out[top : top + resized.shape[0], left : left + resized.shape[1]] = resized
    return out


def normalized(picture: Picture, mean: NDArray[np.float32], std: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return (picture / 255 - mean) / std, rounded to float32 after each step."""
    values = picture.astype(np.float32)
    values /= _F(255)
    values -= mean
    values /= std
    return values


def crops(picture: Picture, width: int, height: int) -> list[Picture]:
    """Return the tiles of this size, row by row."""
    high, wide = picture.shape[:2]
    return [picture[y : y + height, x : x + width] for y in range(0, high, height) for x in range(0, wide, width)]


def aligned_size(
    width: int, height: int, align: int, min_pixels: int, max_pixels: int, longest: int = 0
) -> tuple[int, int]:
    """Return the width and height nearest to the picture's that are multiples of `align` and keep the limits of pixels.

    A limit of 0 is off. `longest` first scales the longest side to this length.
    """
    w, h, a = _F(width), _F(height), _F(align)

    def up(side: np.float32) -> int:
        return math.ceil(side / a) * align

    if longest:
        scale = min(_F(longest) / w, _F(longest) / h)
        new_width, new_height = up(w * scale), up(h * scale)
    else:
        new_width, new_height = (max(align, rounded(side / a) * align) for side in (w, h))
    if max_pixels and new_width * new_height > max_pixels:
        beta = np.sqrt(h * w / _F(max_pixels))
        return max(align, math.floor(w / beta / a) * align), max(align, math.floor(h / beta / a) * align)
    if min_pixels and new_width * new_height < min_pixels:
        beta = np.sqrt(_F(min_pixels) / (h * w))
        return up(w * beta), up(h * beta)
    return new_width, new_height


def best_candidate(width: int, height: int, candidates: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the size that keeps most pixels of the picture; of equal ones, that with the smallest waste."""
    best, most, least = (0, 0), 0, 1 << 62
    for wide, high in candidates:
        scale = min(_F(wide) / _F(width), _F(high) / _F(height))
        effective = min(int(_F(width) * scale) * int(_F(height) * scale), width * height)
        wasted = wide * high - effective
        if effective > most or (effective == most and wasted < least):
            best, most, least = (wide, high), effective, wasted
    if best == (0, 0):
        raise MediaError(f"a picture of {width} x {height} pixels fits no grid of tiles of this model; crop it")
    return best


def best_ratio(width: int, height: int, low: int, high: int, tile: int) -> tuple[int, int]:
    """Return the columns and rows, `low` to `high` tiles together, whose ratio is nearest to the picture's."""
    # Equal areas keep the order in which a search over squares of growing size finds them.
    grids = [(w, h) for w in range(1, high + 1) for h in range(1, high // w + 1) if w * h >= low]
    grids.sort(key=lambda grid: (grid[0] * grid[1], max(low, *grid), grid))
    ratio, best, least = _F(width) / _F(height), (1, 1), _F(np.finfo(_F).max)
    for columns, rows in grids:
        difference = abs(ratio - _F(columns) / _F(rows))
        if difference < least:
            least, best = difference, (columns, rows)
        elif difference == least and _F(width * height) > _F(0.5) * _F(tile * tile * columns * rows):
            best = (columns, rows)
    return best


def rounded(value: float | np.float32) -> int:
    """Round a value that is not negative; halves go up, as in C."""
    down = math.floor(value)
    return down + bool(value - down >= 0.5)
