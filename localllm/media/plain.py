"""Pictures and sounds in memory as files: PPM and WAV, which the decoder turns into the same values again."""

from __future__ import annotations

import struct
from typing import Any

from localllm.media.decode import Decoder, mono


def ppm(source: Any, name: str) -> bytes:
    """Return a PIL image or an array as PPM. Raises MediaError as `Decoder.picture` does."""
    with Decoder() as decoder:
        pixels = decoder.picture(source, name)
    height, width, _ = pixels.shape
    return b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()


def wav(source: Any, name: str) -> bytes:
    """Return (samples, rate) as WAV: one channel of float32. Raises MediaError as `Decoder.sound` does."""
    samples, rate = mono(source, name)
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, rate, 4 * rate, 4, 32)  # 3: float
    return b"RIFF" + struct.pack("<I", 4 + len(form) + 8 + len(data)) + b"WAVE" + form + b"data" + struct.pack(
        "<I", len(data)
    ) + data  # fmt: skip
