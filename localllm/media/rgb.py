"""Pictures of any format and mode as (height, width, 3) uint8, in the way of llama.cpp's decoder.

Alpha is dropped, 16-bit values keep their upper byte, palettes and CMYK become RGB, and animations show their first
frame. Unlike there, the rotation in Exif data is applied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ORIENTATION = 0x0112  # Exif tag
_TURNS = (
    "",
    "",
    "FLIP_LEFT_RIGHT",
    "ROTATE_180",
    "FLIP_TOP_BOTTOM",
    "TRANSPOSE",
    "ROTATE_270",
    "TRANSVERSE",
    "ROTATE_90",
)


def to_rgb(image: Any) -> NDArray[np.uint8]:
    """Return the pixels of a PIL image."""
    from PIL import Image

    turn = _turn(image)
    if image.mode.startswith("I"):  # 16-bit greys
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        image = Image.fromarray(grey)
    if image.mode == "F":
        raise ValueError("floating-point values")
    if image.mode != "RGB":
        image = image.convert("RGB")
    if turn:
        image = image.transpose(Image.Transpose[turn])
    return np.asarray(image)


def _turn(image: Any) -> str:
    """Return the name of the transposition in Exif data, "" without a valid one."""
    try:
        orientation = image.getexif().get(ORIENTATION)
    except MemoryError:
        raise
    except Exception:  # damaged metadata: Pillow raises struct.error, ValueError, TypeError and more
        return ""
    return _TURNS[orientation] if isinstance(orientation, int) and 0 <= orientation < len(_TURNS) else ""
