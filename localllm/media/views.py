"""Rules for pictures that an encoder reads as one tensor: fixed squares, and sizes that follow the picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.media import pixels
from localllm.media.encoder_input import Flags
from localllm.media.errors import MediaError
from localllm.media.pixels import Picture, aligned_size, padded, rounded, stretched
from localllm.media.settings import Settings

_F = np.float32
_STEP = _F(0.02)  # youtuvl: the scale falls by this until the patches fit
_LEAD = 3  # deepseek4v: room for pads in front


class View(NamedTuple):
    """A tensor for the encoder, (height, width, 3), with its flags."""

    values: NDArray[np.float32]
    flags: Flags = Flags()


@dataclass(frozen=True, slots=True)
class Views:
    """The views of a picture. `tiles` fill `columns` x `rows` in reading order. 0 x 0: not tiled."""

    tiles: list[View]
    overview: View | None = None
    columns: int = 0
    rows: int = 0


Rule = Callable[[Picture, Settings], Views]


def normalized(picture: Picture, settings: Settings, flags: Flags | None = None) -> View:
    return View(pixels.normalized(picture, settings.mean, settings.std), flags or Flags())


def _sized(picture: Picture, settings: Settings, width: int, height: int) -> Views:
    if settings.pad:
        picture = padded(picture, width, height, settings.filter, settings.color)
    else:
        picture = stretched(picture, width, height, settings.filter)
    return Views([normalized(picture, settings)])


def fixed(picture: Picture, settings: Settings) -> Views:
    """A square of the encoder's size."""
    return _sized(picture, settings, settings.image, settings.image)


def dynamic(picture: Picture, settings: Settings) -> Views:
    """Both sides rounded to whole tokens, within limits of pixels."""
    height, width = picture.shape[:2]
    size = aligned_size(width, height, settings.align, settings.min_pixels, settings.max_pixels, settings.longest)
    return _sized(picture, settings, *size)


def canvas(picture: Picture, settings: Settings) -> Views:
    """glm5v: the picture at the top left of a black canvas of whole tokens; it is enlarged only below the limit."""
    height, width, align = *picture.shape[:2], settings.align

    def up(side: int) -> int:
        return -(-side // align) * align

    high, wide = up(height), up(width)
    if high * wide < settings.min_pixels:
        scale = math.sqrt(settings.min_pixels / (height * width))
        high, wide = up(max(1, math.ceil(height * scale))), up(max(1, math.ceil(width * scale)))
    if high * wide > settings.max_pixels:
        low, top, (high, wide) = 1, height, (align, align)
        while low <= top:  # the largest content whose canvas fits
            middle = (low + top) // 2
            canvas_high, canvas_wide = up(middle), up(max(1, width * middle // height))
            if canvas_high * canvas_wide <= settings.max_pixels:
                high, wide, low = canvas_high, canvas_wide, middle + 1
            else:
                top = middle - 1
    scale = min(high / height, wide / width)
    if height * width >= settings.min_pixels:
        scale = min(1.0, scale)
    pixels.check_size(wide, high)
    content = stretched(
        picture,
        max(1, min(wide, math.floor(width * scale))),
        max(1, min(high, math.floor(height * scale))),
        settings.filter,
    )
    out = np.zeros((high, wide, 3), np.uint8)
    out[: content.shape[0], : content.shape[1]] = content
    return Views([normalized(out, settings)])


def scaled(picture: Picture, settings: Settings) -> Views:
    """youtuvl: the largest of the scales 1, 0.98, 0.96 ... whose patches fit, both sides rounded up to whole tokens."""
    height, width, align = *picture.shape[:2], settings.align
    most = settings.max_pixels // settings.patch**2

    def up(side: int, scale: np.float32) -> int:
        return max(align, math.ceil(_F(side) * scale / _F(align)) * align)

    scale = _F(1)
    high, wide = up(height, scale), up(width, scale)
    while scale > 0 and (high // settings.patch) * (wide // settings.patch) > most:
        scale = _F(scale - _STEP)
        high, wide = up(height, scale), up(width, scale)
    return _sized(picture, settings, wide, high)


def nearest_grid(picture: Picture, settings: Settings) -> Views:
    """muse-glimmer: of the grids of tokens around the picture's, the one whose ratio is nearest; stretched."""
    height, width, most = *picture.shape[:2], settings.max_pixels // settings.align**2
    rows, columns = height / settings.align, width / settings.align
    ratio = columns / rows
    if rows * columns > most:
        rows = math.sqrt(most / ratio)
        columns = rows * ratio
    best: tuple[float, int, int, int] | None = None  # difference, -tokens, columns, rows
    for high in (math.floor(rows), math.ceil(rows)):
        for wide in (math.floor(columns), math.ceil(columns)):
            if high < 1 or wide < 1 or high * wide > most:
                continue
            difference = abs(high / wide - height / width)
            if best is None or (difference, -high * wide) < best[:2]:
                best = (difference, -high * wide, wide, high)
    wide, high = best[2:] if best else (max(1, rounded(columns)), max(1, rounded(rows)))
    return Views(
        [normalized(stretched(picture, wide * settings.align, high * settings.align, settings.filter), settings)]
    )


# deepseek4v: the largest size whose block of tokens fits
BLOCK = 4  # tokens; a block is a multiple of it
MOST_TOKENS, MOST_RATIO = 384, 8


def block_tokens(columns: int, rows: int, lead_pad: int = 0) -> int:
    """Return the tokens of deepseek4v's block: pads, start, pairs of rows with a newline each, pads, end."""
    rows += rows % 2
    return lead_pad + 1 + rows * (columns + 1) + rows // 2 * (columns + 1) % 2 * 2 + 1


def block(picture: Picture, settings: Settings) -> Views:
    """deepseek4v: whole patches within a budget of tokens, grey around the picture."""
    height, width = original = picture.shape[:2]
    width = min(width, height * MOST_RATIO)
    if width * height < settings.min_pixels:
        scale = math.sqrt(settings.min_pixels / (width * height))
        width, height = int(width * scale), int(height * scale)
    most = settings.max_pixels // settings.align**2
    wide, high = (-(-side // settings.patch) * settings.patch for side in (width, height))
    budget = most = most - _LEAD
    while _block_tokens(wide, high, settings) > most:
        wide, high = _solve(width, height, settings, budget)
        budget -= 1
        if budget < BLOCK:
            raise MediaError(f"a picture of {original[1]} x {original[0]} pixels is too narrow for this model; crop it")
    if original[1] >= MOST_RATIO * original[0]:
        out = stretched(picture, wide, high, settings.filter)
    else:
        out = padded(picture, wide, high, settings.filter, settings.color, nearest=True)
    return Views([normalized(out, settings)])


def _block_tokens(wide: int, high: int, settings: Settings) -> int:
    return block_tokens(-(-wide // settings.align), -(-high // settings.align))


def _solve(width: int, height: int, settings: Settings, most: int) -> tuple[int, int]:
    """Return the width and height for at most `most` tokens."""
    patch, align, ratio = settings.patch, settings.align, height / width
    columns = math.sqrt((most - 2) / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        down = (most - 2) // 2
        return align, (down - down % 2) * align
    if rows < 2:
        return max((most - 2) // 2 - 1, 2) * align, 2 * align
    down = math.floor(rows)
    scale = min(math.floor(columns) * align / width, (down - down % 2) * align / height)
    return math.floor(width * scale / patch) * patch, math.floor(height * scale / patch) * patch
