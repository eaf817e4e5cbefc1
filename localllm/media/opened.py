"""From the keys of an mmproj file to the settings of its row: constants that the file replaces, limits, tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localllm.media import tiling
from localllm.media.errors import MediaError
from localllm.media.mel import Floats
from localllm.media.pictures import SLICED_2_5, PictureRow
from localllm.media.pixels import MOST_PIXELS
from localllm.media.settings import MOST_BINS, MOST_CANDIDATES, MOST_SIDE, MOST_TILES, Keys, Settings
from localllm.media.sounds import PARAKEET, SoundRow, SoundSettings

Weights = Callable[[str], NDArray[np.float32] | None]  # the values of a small tensor of the file; None: not in the file

_MOST = 2**31 - 1
_BOUNDS = ("adapter.boi", "v.boi", "mm.boi")
_MINICPM = (2, 3, 4, 5, 6, 100045)
_LLAMA4_SIDE = 3  # tiles
_INTERNVL = (1, 12)
_OCR_TILES = {"deepseekocr": (640, 9), "deepseekocr2": (768, 6)}  # side, maximum number
_STEP_LONGEST = 3024


@dataclass(frozen=True, slots=True)
class Opened:
    """The row of a file, and its settings."""

    row: PictureRow
    values: Settings


def picture_settings(
    keys: Keys, type: str, row: PictureRow, weights: Weights, minimum: int | None, maximum: int | None
) -> Opened:
    """Return the row for pictures and its settings. Raises MediaError for a key that cannot be used."""
    mean, std = keys.channels("vision.image_mean"), keys.channels("vision.image_std")
    if not np.abs(std).min() > 1e-6:
        raise keys.error("vision.image_std", "numbers other than 0")
    patch = keys.number("vision.patch_size", 1, 1024)
    image = keys.number("vision.image_size", 0, MOST_SIDE)
    merge = keys.number(f"vision.{row.merge_key}", 1, 64, row.merge) if row.merge_key else row.merge
    if type in _OCR_TILES:
        patch, image = 16, 1024
    if patch * merge > MOST_SIDE:
        raise keys.error("vision.patch_size", f"{MOST_SIDE // merge} or less")
    settings = Settings(patch, merge, image, mean, std, row.filter, row.pad, row.color)
    settings = _with_limits(keys, row, settings, minimum, maximum)
    if special := _SPECIAL.get(type):
        row, settings = special(keys, row, settings)
    pinpoints = keys.numbers("vision.image_grid_pinpoints", 2 * MOST_CANDIDATES)
    if pinpoints and (row.pinpoints or row.rule is tiling.stacked):
        settings = replace(settings, candidates=_candidates(keys, pinpoints, image))
        row = row if row.rule is tiling.stacked else replace(row, rule=tiling.candidates)
    if row.rule is tiling.stacked and not settings.candidates:
        raise keys.error("vision.image_grid_pinpoints", "pairs of width and height")
    if type == "pixtral" or type == "lightonocr":
        settings = replace(settings, breaks=weights("v.token_embd.img_break") is not None)
    if type in ("ldp", "ldpv2", "adapter"):
        settings = replace(settings, bounds=any(weights(name) is not None for name in _BOUNDS))
    if settings.image < settings.patch:
        raise keys.error("vision.image_size", f"{settings.patch} (the patch size) or more")
    return Opened(row, settings)


def _with_limits(keys: Keys, row: PictureRow, settings: Settings, minimum: int | None, maximum: int | None) -> Settings:
    """Return the settings with limits of pixels. The user's limits come first, then the file's, then the row's."""
    area, low, high = settings.align**2, 0, 0
    if row.tokens:
        low, high = (tokens * area for tokens in row.tokens)
    if row.pixel_keys:
        default = None if row.pixel_keys == "required" else 0
        stored = [keys.number(f"vision.image_{name}_pixels", 0, _MOST, default) for name in ("min", "max")]
        if row.pixel_keys == "each":
            low, high = stored[0] or low, stored[1] or high
        elif row.pixel_keys == "required" or all(stored):
            low, high = stored
    low = minimum * area if minimum else low
    high = maximum * area if maximum else high
    if low > high > 0:
        if minimum or maximum:
            raise MediaError(f"a picture needs {low // area} to {high // area} tokens; change the limits of tokens")
        raise keys.error("vision.image_max_pixels", f"{low} (image_min_pixels) or more")
    if low > MOST_PIXELS:
        raise keys.error("vision.image_min_pixels", f"{MOST_PIXELS} or less")
    return replace(settings, min_pixels=low, max_pixels=min(high, MOST_PIXELS))


def _candidates(keys: Keys, numbers: list[int], image: int) -> tuple[tuple[int, int], ...]:
    key = "vision.image_grid_pinpoints"
    if len(numbers) % 2 or not all(0 < side <= 1 << 15 for side in numbers):
        raise keys.error(key, "pairs of width and height")
    if image < 1 or any(side % image for side in numbers):
        raise keys.error(key, f"multiples of the image size, {image}")
    pairs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    if any(wide * high > MOST_PIXELS for wide, high in pairs):
        raise keys.error(key, f"grids of {MOST_PIXELS} pixels or less")
    return pairs


# ---------------------------------------------------------------- keys of single projector types

_Special = Callable[[Keys, PictureRow, Settings], tuple[PictureRow, Settings]]


def _internvl(keys: Keys, row: PictureRow, settings: Settings) -> tuple[PictureRow, Settings]:
    low = keys.number("vision.preproc_min_tiles", 1, MOST_TILES, _INTERNVL[0])
    high = keys.number("vision.preproc_max_tiles", low, MOST_TILES, max(low, _INTERNVL[1]))
    grids = [(a, b) for a in range(low, high + 1) for b in range(max(-(-low // a), low), min(high // a, high) + 1)]
    return row, _grids(keys, settings, grids)


def _llama4(keys: Keys, row: PictureRow, settings: Settings) -> tuple[PictureRow, Settings]:
    sides = range(1, _LLAMA4_SIDE + 1)
    return row, _grids(keys, settings, [(a, b) for a in sides for b in sides if (a, b) != (1, 1)])


def _grids(keys: Keys, settings: Settings, grids: list[tuple[int, int]]) -> Settings:
    image = settings.image
    fit = tuple((a * image, b * image) for a, b in grids if a * b * image * image <= MOST_PIXELS)
    if not fit:
        raise keys.error("vision.image_size", f"less: grids of tiles exceed {MOST_PIXELS} pixels")
    return replace(settings, candidates=fit)


def _minicpmv(keys: Keys, row: PictureRow, settings: Settings) -> tuple[PictureRow, Settings]:
    version = keys.number("minicpmv_version", 0, _MOST, 0) or 2
    if version not in _MINICPM:
        raise keys.error("minicpmv_version", f"one of {', '.join(map(str, _MINICPM))}")
    query = keys.number("minicpmv_query_num", 0, 1 << 16, 0) or (96 if version == 2 else 64)
    if version == 2:
        row = replace(row, marks=SLICED_2_5)
    return row, replace(settings, query=query, version=version)


def _minicpmv4_6(keys: Keys, row: PictureRow, settings: Settings) -> tuple[PictureRow, Settings]:
    if settings.merge not in (2, 4):
        raise keys.error("vision.projector.scale_factor", "2 or 4")
    return row, settings


def _longest(default: int) -> _Special:
    """The longest side: a key, else `default`, else (-1) the image size."""

    def special(keys: Keys, row: PictureRow, settings: Settings) -> tuple[PictureRow, Settings]:
        fallback = settings.image if default < 0 else default
        longest = keys.number("vision.preproc_image_size", 0, MOST_SIDE, fallback)
        return row, replace(settings, longest=longest or (0 if default == 0 else fallback))

    return special


def _ocr(side: int, high: int) -> _Special:
    def special(keys: Keys, row: PictureRow, settings: Settings) -> tuple[PictureRow, Settings]:
        most = MOST_PIXELS // side**2
        low = keys.number("vision.preproc_min_tiles", 1, MOST_TILES, 2)
        top = keys.number("vision.preproc_max_tiles", low, MOST_TILES, max(low, high))
        return row, replace(settings, tile=side, min_tiles=min(low, most), max_tiles=min(top, most))

    return special


def _granite(keys: Keys, row: PictureRow, settings: Settings) -> tuple[PictureRow, Settings]:
    patches = settings.image // settings.patch
    window = keys.number("vision.projector.window_side", 1, max(1, patches))
    sides = (keys.number("vision.projector.query_side", 1, 64), window)
    return row, replace(settings, sides=sides)


def _deepseek4v(keys: Keys, row: PictureRow, settings: Settings) -> tuple[PictureRow, Settings]:
    from localllm.media.views import MOST_TOKENS

    area = settings.align**2
    most = max(settings.max_pixels // area, 16) if settings.max_pixels else MOST_TOKENS
    low = settings.min_pixels or keys.number("vision.image_min_pixels", 0, _MOST)
    return row, replace(settings, min_pixels=min(low, most * area), max_pixels=most * area)


_SPECIAL: dict[str, _Special] = {
    "internvl": _internvl,
    "llama4": _llama4,
    "resampler": _minicpmv,
    "minicpmv4_6": _minicpmv4_6,
    "idefics3": _longest(0),
    "lightonocr": _longest(-1),
    "step3vl": _longest(_STEP_LONGEST),
    "granite4_vision": _granite,
    "deepseek4v": _deepseek4v,
} | {type: _ocr(*limits) for type, limits in _OCR_TILES.items()}


def sound_settings(keys: Keys, row: SoundRow, weights: Weights) -> SoundSettings:
    """Return the settings for sound. Raises MediaError for a key or a tensor that cannot be used."""
    bins = row.bins or keys.number("audio.num_mel_bins", 2, MOST_BINS)
    settings = SoundSettings(bins)
    if row.stack:
        settings = replace(settings, stack=keys.number("audio.projector.stack_factor", 1, 256))
    if row.windows:
        window = keys.number("audio.projector.window_size", 1, 8192)
        settings = replace(settings, window=window, step=keys.number("audio.projector.downsample_rate", 1, window))
    if row.groups:
        settings = replace(settings, group=keys.number("audio.local_group_size", 1, 8192))
    if row.tensors:
        width = PARAKEET.fft // 2 + 1
        filters = _tensor(keys, weights, "a.mel_filters", bins * width).reshape(bins, width)
        hann = _tensor(keys, weights, "a.window", PARAKEET.window)
        settings = replace(settings, filters=filters, hann=np.pad(hann, (PARAKEET.fft - PARAKEET.window) // 2))
    return settings


def _tensor(keys: Keys, weights: Weights, name: str, size: int) -> Floats:
    values = weights(name)
    if values is None or values.size != size or not np.isfinite(values).all():
        what = "is missing" if values is None else f"has {values.size} values, or some that are not finite"
        raise MediaError(f"{keys.name}: tensor '{name}' {what}; expected {size} finite values: get another file")
    return values.reshape(-1).astype(np.float64)
