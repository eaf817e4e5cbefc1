"""Rules that cut a picture into tiles, usually with an overview of the whole picture."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localllm.media.encoder_input import Flags
from localllm.media.errors import MediaError
from localllm.media.pixels import (
    Picture,
    aligned_size,
    best_candidate,
    best_ratio,
    check_size,
    crops,
    padded,
    rounded,
    stretched,
)
from localllm.media.settings import Settings
from localllm.media.views import View, Views, normalized

_F = np.float32
_SLICES = 9  # minicpmv


def _tiled(big: Picture, overview: Picture, settings: Settings, width: int, height: int) -> Views:
    """Cut `big` into tiles of this size."""
    tiles = [normalized(tile, settings) for tile in crops(big, width, height)]
    rows, columns = big.shape[0] // height, big.shape[1] // width
    return Views(tiles, normalized(overview, settings), columns, rows)


def candidates(picture: Picture, settings: Settings) -> Views:
    """llava 1.6, internvl, llama4: the grid that keeps most of the picture; only the overview if it is small."""
    side = settings.image
    height, width = picture.shape[:2]
    overview = stretched(picture, side, side, "bicubic")
    if max(height, width) <= side:
        return Views([], normalized(overview, settings))
    size = best_candidate(width, height, list(settings.candidates))
    return _tiled(padded(picture, *size, "bicubic"), overview, settings, side, side)


def stacked(picture: Picture, settings: Settings) -> Views:
    """granite4_vision: overview and tiles in one tensor, below each other; the encoder assembles the grid."""
    side = settings.image
    height, width = picture.shape[:2]
    wide, high = best_candidate(width, height, list(settings.candidates))
    check_size(side, side + wide * high // side)
    views = [stretched(picture, side, side, settings.filter)]
    views += crops(padded(picture, wide, high, "bicubic"), side, side)
    flags = Flags(grid=(wide // side, high // side), original=(width, height))
    return Views([normalized(np.concatenate(views), settings, flags)])


def slices(picture: Picture, settings: Settings) -> Views:
    """minicpmv: overview and a grid of at most 9 slices; both keep the ratio, in whole tokens."""
    side, (height, width) = settings.image, picture.shape[:2]
    area = _F(width) * _F(height) / _F(side * side)
    if settings.merge == 2 and area <= 1:
        size = _near(width, height, settings, enlarge=True)
        return Views([], normalized(stretched(picture, *size, "bicubic"), settings))
    if max(height, width) <= side:
        return Views([], normalized(stretched(picture, side, side, "bicubic"), settings))
    overview = stretched(picture, *_near(width, height, settings, enlarge=False), "bicubic")
    columns, rows = _slice_grid(min(math.ceil(area), _SLICES), _F(math.log(_F(width) / _F(height))))
    cell = (_divisible(width, columns) // columns, _divisible(height, rows) // rows)
    wide, high = _near(*cell, settings, enlarge=True)
    big = padded(picture, wide * columns, high * rows, "bicubic")
    return _tiled(big, overview, settings, wide, high)


def _near(width: int, height: int, settings: Settings, enlarge: bool) -> tuple[int, int]:
    """Return the size with about the area of the encoder's square and the ratio of the picture."""
    if enlarge or width * height > settings.image**2:
        ratio = _F(width) / _F(height)
        height = int(_F(settings.image) / np.sqrt(ratio))
        width = int(_F(height) * ratio)
    return _divisible(width, settings.align), _divisible(height, settings.align)


def _divisible(length: int, part: int) -> int:
    return max(rounded(_F(length) / _F(part)) * part, part)


def _slice_grid(count: int, log_ratio: np.float32) -> tuple[int, int]:
    best, least = (1, 1), _F(np.inf)
    for n in (count - 1, count, count + 1):
        if n == 1 or n > _SLICES:
            continue
        for columns in range(1, n + 1):
            if n % columns == 0:
                error = _F(abs(float(log_ratio) - math.log(columns / (n // columns))))
                if error < least:
                    best, least = (columns, n // columns), error
    return best


def doubly_resized(picture: Picture, settings: Settings) -> Views:
    """idefics3: the longest side to a length, then up to whole tiles; the overview comes from the enlarged picture.

    Old files without this length: whole tiles nearest to the picture's size.
    """
    side, (height, width) = settings.image, picture.shape[:2]
    if not settings.longest or settings.min_pixels or settings.max_pixels:
        size = aligned_size(width, height, side, settings.min_pixels, settings.max_pixels, settings.longest)
        big = padded(picture, *size, "bicubic")
        return _tiled(big, stretched(picture, side, side, "bicubic"), settings, side, side)
    ratio = width / height
    if width >= height:
        wide, high = settings.longest, int(settings.longest / ratio)
        high += high % 2
    else:
        wide, high = int(settings.longest * ratio), settings.longest
        wide += wide % 2
    if not (wide and high):
        raise MediaError(f"a picture of {width} x {height} pixels is too narrow for this model; crop it")
    wide_tiles, high_tiles = -(-wide // side) * side, -(-high // side) * side
    check_size(wide_tiles, high_tiles)
    big = stretched(stretched(picture, wide, high, settings.filter), wide_tiles, high_tiles, settings.filter)
    return _tiled(big, stretched(big, side, side, settings.filter), settings, side, side)


_TILE, _LFM2_TILES = 512, (2, 10)


def thumbnail(picture: Picture, settings: Settings) -> Views:
    """lfm2: one view within limits of tokens; above twice the limit, tiles of 512 and a thumbnail."""
    height, width = picture.shape[:2]

    def near(side: int) -> int:
        return max(settings.patch, round(side / settings.align) * settings.align)  # halves to the even multiple

    size = aligned_size(width, height, settings.align, settings.min_pixels, settings.max_pixels)
    overview = stretched(picture, *size, settings.filter)
    if near(height) * near(width) <= 2 * settings.max_pixels:
        return Views([normalized(overview, settings)])
    columns, rows = best_ratio(width, height, *_LFM2_TILES, _TILE)
    big = padded(picture, _TILE * columns, _TILE * rows, settings.filter)
    return _tiled(big, overview, settings, _TILE, _TILE)


def views_and_rows(picture: Picture, settings: Settings) -> Views:
    """deepseekocr: an overview on grey, tiles for large pictures; a row of tiles is one tensor, stacked in height."""
    views = views_and_tiles(picture, settings)
    if not views.columns:
        return views
    rows = [views.tiles[at : at + views.columns] for at in range(0, len(views.tiles), views.columns)]
    stacked = [View(np.concatenate([tile.values for tile in row])) for row in rows]
    return replace(views, tiles=stacked, columns=1)


def views_and_tiles(picture: Picture, settings: Settings) -> Views:
    """deepseekocr2: an overview on grey, and tiles for large pictures."""
    tile, (height, width) = settings.tile, picture.shape[:2]
    whole = padded(picture, settings.image, settings.image, "bicubic", settings.color, nearest=True)
    overview = normalized(whole, settings, Flags(view_separator=True))
    if max(width, height) <= tile:
        return Views([], overview)
    columns, rows = best_ratio(width, height, settings.min_tiles, settings.max_tiles, tile)
    big = stretched(picture, tile * columns, tile * rows, "bicubic")
    return replace(_tiled(big, whole, settings, tile, tile), overview=overview)


_CROP, _NARROW, _WIDE, _MORE = 504, 1.5, 4.0, 0.2


def windows(picture: Picture, settings: Settings) -> Views:
    """step3vl: an overview, and windows of 504 pixels for long or large pictures, by its own resizing in float32."""
    picture = _prepared(picture, settings.longest)
    height, width = picture.shape[:2]
    overview = View(_bilinear(picture, settings.image, settings))
    size = _window(max(width, height), min(width, height), settings.image)
    if size <= 0:
        return Views([], overview)
    big = stretched(picture, _extent(width, size), _extent(height, size), "bilinear")
    tops, lefts = _starts(big.shape[0], size), _starts(big.shape[1], size)
    tiles = []
    check_size(_CROP * len(lefts), _CROP * len(tops))
    for top in tops:
        for left in lefts:
            window = np.zeros((size, size, 3), np.uint8)
            part = big[top : top + size, left : left + size]
            window[: part.shape[0], : part.shape[1]] = part
            tiles.append(View(_bilinear(window, _CROP, settings)))
    return Views(tiles, overview, len(lefts), len(tops))


def _prepared(picture: Picture, longest: int) -> Picture:
    height, width = picture.shape[:2]
    if min(height, width) < 32 and not 1 / _WIDE <= width / height <= _WIDE:
        check_size(max(height, width), max(height, width))
        square = np.zeros((max(height, width), max(height, width), 3), np.uint8)
        square[:height, :width] = picture
        picture = square
        height, width = picture.shape[:2]
    if max(height, width) > longest:
        scale = _F(longest) / _F(max(height, width))
        wide, high = (max(1, math.floor(_F(side) * scale)) for side in (width, height))
        picture = stretched(picture, wide, high, "bilinear")
    return picture


def _window(longer: int, shorter: int, image: int) -> int:
    ratio = _F(longer) / _F(shorter)
    if longer <= image:
        return shorter if ratio > _NARROW else 0
    return min(shorter, _CROP) if ratio > _WIDE else _CROP


def _extent(length: int, window: int) -> int:
    ratio = _F(length) / _F(window)
    if ratio < 1:
        return length
    whole = math.floor(ratio)
    return window * (whole + bool(ratio - _F(whole) > _F(_MORE)))


def _starts(length: int, window: int) -> list[int]:
    count = 1 if length <= window else math.ceil(_F(length - window) / _F(window) + _F(1))
    starts = [window * i for i in range(count)]
    if count > 1 and starts[-1] + window > length:
        starts[-1] = length - window
    return starts


def _bilinear(picture: Picture, side: int, settings: Settings) -> NDArray[np.float32]:
    """Return the picture as a square, interpolated after normalizing, without antialiasing."""
    values = normalized(picture, settings).values
    if picture.shape[:2] == (side, side):
        return values

    def axis(length: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
        at = (np.arange(side, dtype=np.float32) + _F(0.5)) * (_F(length) / _F(side)) - _F(0.5)
        floor = np.floor(at)
        low = floor.astype(np.intp)
        return np.clip(low, 0, length - 1), np.clip(low + 1, 0, length - 1), at - floor

    top, bottom, down = axis(picture.shape[0])
    left, right, across = axis(picture.shape[1])
    down, across = down[:, None, None], across[None, :, None]
    upper = values[top][:, left] + (values[top][:, right] - values[top][:, left]) * across
    lower = values[bottom][:, left] + (values[bottom][:, right] - values[bottom][:, left]) * across
    return upper + (lower - upper) * down
