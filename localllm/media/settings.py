"""Reads and validates the keys of an mmproj file that preprocessing needs. The file is untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.base.printable import printable
from localllm.media.errors import MediaError
from localllm.media.pixels import BLACK, Color, Filter

MOST_SIDE = 8192  # of an encoder's picture, and of a patch
MOST_CANDIDATES = 4096
MOST_TILES = 256
MOST_BINS = 4096


class Keys:
    """The keys `clip.*` of a file, with checks. `name` is the file in messages."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self._metadata, self.name = metadata, name

    def error(self, key: str, expected: str) -> MediaError:
        value = self._metadata.get(f"clip.{key}")
        if isinstance(value, str):
            value = value[:60]  # a text may be long
        value = printable(repr(value)[:60], None)
        return MediaError(
            f"{self.name}: key 'clip.{key}' is {value}; expected {expected}: get another file, this one is damaged"
        )

    def get(self, key: str) -> Any:
        return self._metadata.get(f"clip.{key}")

    def text(self, key: str) -> str:
        """Return a string, "" without the key."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a text")
        return value or ""

    def flag(self, key: str) -> bool:
        """Return a truth value, False without the key."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false")
        return bool(value)

    def number(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return an integer from `low` to `high`. Without `default`, the key is required."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def numbers(self, key: str, most: int) -> list[int]:
        """Return an array of integers, [] without the key."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or len(value) > most:
            raise self.error(key, f"at most {most} integers")
        return [int(entry) for entry in value]

    def channels(self, key: str) -> NDArray[np.float32]:
        """Return the first three values of an array of finite numbers."""
        value = self.get(key)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or not 3 <= len(value) <= MOST_BINS:
            raise self.error(key, "three numbers")
        values: NDArray[np.float32] = value[:3].astype(np.float32)
        if not np.isfinite(values).all() or np.abs(values).max() > 1e6:
            raise self.error(key, "three finite numbers")
        return values


@dataclass(frozen=True, slots=True)
class Settings:
    """What a rule for pictures knows: constants of the projector's row, and keys of the file. Sizes are in pixels."""

    patch: int
    merge: int  # patches per side that become one token
    image: int  # side of the encoder's square, or of a tile
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    filter: Filter
    pad: bool = True  # keep the ratio and fill with `color`; False: stretch
    color: Color = BLACK
    min_pixels: int = 0  # 0: no limit
    max_pixels: int = 0
    longest: int = 0  # longest side; 0: no such rule
    candidates: tuple[tuple[int, int], ...] = ()  # width and height of grids of tiles
    min_tiles: int = 0
    max_tiles: int = 0
    tile: int = 0
    query: int = 0  # tokens of a resampler
    version: int = 0  # minicpmv_version
    sides: tuple[int, int] = (0, 0)  # of queries and windows (granite4_vision)
    breaks: bool = False  # the file has a learned row end ([IMG_BREAK])
    bounds: bool = False  # the file has learned begin and end rows

    @property
    def align(self) -> int:
        return self.patch * self.merge
