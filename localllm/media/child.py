"""Decode pictures (Pillow) and sound (soundfile) as a task of the confined child process.

The libraries parse untrusted files in C. Limits are compared with the header before anything is decoded.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from localllm.media.resample import HIGHEST, LOWEST, Resampler
from localllm.media.rgb import ORIENTATION, to_rgb
from localllm.sandbox import BLOB

PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM")  # formats of Pillow
MOST_CHANNELS = 64
_FRAMES = 1 << 16  # of sound, at a time
_DAMAGED = "it is damaged or incomplete; save it again"


def prepare() -> None:
    """Load the libraries while files can still be opened. A missing one is reported with the first request for it."""
    try:
        from PIL import Image, MpoImagePlugin  # noqa: F401 (a JPEG of several pictures)

        Image.MAX_IMAGE_PIXELS = None  # the request has a limit
        exif = Image.Exif()
        exif[ORIENTATION] = 3
        for format in PICTURES:  # a picture through each codec loads it, and the reader of metadata
            for mode in ("RGB", "L"):
                data = io.BytesIO()
                Image.new(mode, (8, 8)).save(data, format, **({} if format == "PPM" else {"exif": exif}))
                with Image.open(data, formats=PICTURES) as image:
                    to_rgb(image)
    except ImportError:
        pass
    try:
        import soundfile

        data = io.BytesIO()
        soundfile.write(data, np.zeros(8, np.float32), 16000, format="WAV")
        data.seek(0)
        soundfile.read(data)  # allocates the callbacks, which need executable memory
    except (ImportError, OSError):
        pass


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Decode `request[BLOB]`: a picture, or a sound at `request["rate"]`. An unusable file gives {"error": reason}."""
    try:
        return _picture(request) if request["kind"] == "image" else _sound(request)
    except MemoryError:
        raise
    except ImportError as error:
        return {"missing": str(error)}
    except Exception as error:  # the parsers raise many types
        return {"error": f"{_DAMAGED} ({str(error)[:200] or type(error).__name__})"}


def _picture(request: dict[str, Any]) -> dict[str, Any]:
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(request[BLOB]), formats=PICTURES)
    except UnidentifiedImageError:
        return {"error": f"it is not a picture that can be read; supported: {', '.join(PICTURES)}"}
    with image:
        width, height = image.size
        if not 0 < width * height <= request["pixels"]:
            limit = f"{request['pixels']} pixels are supported: make it smaller"
            return {"error": f"it has {width} x {height} pixels, at most {limit}"}
        pixels = to_rgb(image)
    return {"shape": list(pixels.shape), BLOB: pixels.tobytes()}


def _sound(request: dict[str, Any]) -> dict[str, Any]:
    import soundfile

    try:
        file = soundfile.SoundFile(io.BytesIO(request[BLOB]))
    except soundfile.LibsndfileError:
        return {"error": "it is not a sound that can be read; supported: WAV, FLAC, OGG, MP3"}
    with file:
        rate, channels = file.samplerate, file.channels
        if not LOWEST <= rate <= HIGHEST or not 1 <= channels <= MOST_CHANNELS:
            supported = f"{LOWEST} to {HIGHEST} samples per second and up to {MOST_CHANNELS} channels"
            return {"error": f"it has {rate} samples per second and {channels} channels; supported: {supported}"}
        if file.frames > request["seconds"] * rate:  # soundfile reads no more than it says here
            return {"error": f"it is longer than {request['seconds']:g} s; cut it"}
        resampler, parts = Resampler(rate, request["rate"]), []
        while len(block := file.read(_FRAMES, "float32", always_2d=True)):
            parts.append(resampler.push(block.mean(1, dtype=np.float32)))
        parts.append(resampler.flush())
    samples = np.concatenate(parts)
    if not len(samples):
        return {"error": "it has no samples"}
    return {"samples": len(samples), BLOB: samples.tobytes()}
