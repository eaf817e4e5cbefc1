"""`Decoder`: pictures and sound from files, bytes, PIL images and arrays.

Files are untrusted: a confined child process parses them (`localllm.media.child`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.base.closing import Closing
from localllm.base.files.media_kinds import START, kind_of
from localllm.base.files.regular import read_regular
from localllm.base.printable import printable
from localllm.media.errors import INSTALL, MediaError
from localllm.media.resample import HIGHEST, LOWEST, resample
from localllm.media.rgb import to_rgb
from localllm.sandbox import BLOB, Confined, ConfinedError, ConfinedLate, ConfinedLimit, ResourceLimits

Data = bytes | bytearray | memoryview
_NEEDS = {"image": ("PIL", "pictures need Pillow"), "audio": ("soundfile", "sound needs soundfile")}
_KINDS = {"image": "a picture", "audio": "a sound"}
_SECONDS = 1800.0  # maximum duration of a sound
_MEMORY = 900 << 20  # bytes of the child


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one file: its size, the pixels of a picture, the duration of a sound."""

    file_bytes: int = 64 << 20
    pixels: int = 50_000_000
    seconds: float = _SECONDS


class Decoder(Closing):
    """Decodes files in a child process, which starts with the first file. Thread-safe; one file at a time."""

    def __init__(self, limits: MediaLimits | None = None) -> None:
        self.limits = limits or MediaLimits()
        self._child = Confined("localllm.media.child", ResourceLimits(memory=_MEMORY))

    def start(self) -> None:
        """Start the child without waiting."""
        self._child.start()

    def close(self) -> None:
        """End the child."""
        self._child.close()

    def picture(self, source: Any, name: str = "picture") -> NDArray[np.uint8]:
        """Return (height, width, 3) uint8 from a path, the bytes of a file, a PIL image, or an array.

        An array is uint8: (height, width), or (height, width, 1, 3 or 4); a fourth channel is dropped. `name` is the
        source in messages; a path names itself. Raises MediaError.
        """
        if isinstance(source, np.ndarray):
            return self._array(source, name)
        if hasattr(source, "getexif"):
            return self._image(source, name)
        data, name = self._read(source, name)
        limits = ResourceLimits(seconds=20, wall=90, memory=_MEMORY, answer=3 * self.limits.pixels + 4096)
        answer = self._ask({"kind": "image", "pixels": self.limits.pixels, BLOB: data}, limits, name)
        match answer:
            case {"shape": [int(height), int(width), 3], "blob": bytearray(pixels)} if min(
                height, width
            ) > 0 and height * width * 3 == len(pixels):
                return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
        raise MediaError(f"{name}: its decoder sent an invalid reply; try again")

    def sound(self, source: Any, rate: int, name: str = "sound") -> NDArray[np.float32]:
        """Return mono float32 samples at `rate` from a path, the bytes of a file, or (samples, rate of the samples).

        Samples of integer types are scaled to -1 .. 1. Channels, the second axis, are averaged. Raises MediaError.
        """
        if isinstance(source, tuple) and len(source) == 2:
            recorded, given = mono(source, name, self.limits.seconds)
            return _finite(resample(recorded, given, rate), name)
        data, name = self._read(source, name)
        most = int(4 * (rate + 1) * self.limits.seconds) + 4096
        limits = ResourceLimits(seconds=120, wall=300, memory=_MEMORY, answer=most)
        answer = self._ask({"kind": "audio", "rate": rate, "seconds": self.limits.seconds, BLOB: data}, limits, name)
        match answer:
            case {"samples": int(count), "blob": bytearray(samples)} if count > 0 and 4 * count == len(samples):
                values = np.frombuffer(samples, "<f4")
                return _finite(values, name)
        raise MediaError(f"{name}: its decoder sent an invalid reply; try again")

    def _read(self, source: Any, name: str) -> tuple[Data, str]:
        """Return the bytes of a file, and its name for messages."""
        most = self.limits.file_bytes
        if isinstance(source, str) and not source:
            raise MediaError(f"{name or 'the file'}: its path is empty; name a file")
        if isinstance(source, str | os.PathLike):
            name = printable(Path(source).name, None)
            try:
                source = read_regular(source, most)
            except OSError as error:
                raise MediaError(f"{printable(str(source), None)}: {error.strerror or error}") from None
            except ValueError:  # a NUL in the path
                raise MediaError(f"{name}: is not the path of a file") from None
        if not isinstance(source, bytes | bytearray | memoryview):
            expected = "a path, the bytes of a file, or an array"
            raise MediaError(f"{name}: expected {expected}, got {type(source).__name__}")
        if not source:
            raise MediaError(f"{name}: is empty")
        if len(source) > most:
            raise MediaError(f"{name}: has {len(source)} bytes, at most {most} are supported: make it smaller")
        return source, name

    def _ask(self, request: dict[str, Any], limits: ResourceLimits, name: str) -> dict[str, Any]:
        module, needs = _NEEDS[request["kind"]]
        if (found := kind_of(bytes(request[BLOB][:START]))) not in (None, request["kind"]):
            raise MediaError(f"{name}: is {_KINDS[found]}, not {_KINDS[request['kind']]}; give it as {_KINDS[found]}")
        if find_spec(module) is None:
            raise MediaError(f"{name}: {needs}; run: {INSTALL}")
        try:
            answer = self._child.call(request, limits)
        except ConfinedLate as error:
            raise MediaError(f"{name}: was not decoded: {error}; try again") from None
        except ConfinedLimit as error:
            raise MediaError(f"{name}: cannot be decoded: {error}; make it smaller") from None
        except ConfinedError as error:
            raise MediaError(f"{name}: cannot be decoded: {error}; save it in another format") from None
        if "missing" in answer:
            raise MediaError(f"{name}: {needs} ({printable(str(answer['missing']), None)}); run: {INSTALL}")
        if "error" in answer:
            raise MediaError(f"{name}: {printable(str(answer['error'])[:400], None)}")
        return answer

    def _check_pixels(self, width: int, height: int, name: str) -> None:
        if not 0 < width * height <= self.limits.pixels:
            supported = f"at most {self.limits.pixels} pixels are supported: make it smaller"
            raise MediaError(f"{name}: has {width} x {height} pixels, {supported}")

    def _array(self, source: NDArray[Any], name: str) -> NDArray[np.uint8]:
        values = source[..., None] if source.ndim == 2 else source
        if values.dtype != np.uint8 or values.ndim != 3 or values.shape[2] not in (1, 3, 4):
            expected = "an array of a picture is uint8 (height, width) or (height, width, 1, 3 or 4)"
            raise MediaError(f"{name}: {expected}, got {source.dtype} {source.shape}")
        self._check_pixels(values.shape[1], values.shape[0], name)
        return np.ascontiguousarray(np.broadcast_to(values[..., :3], (*values.shape[:2], 3)))

    def _image(self, source: Any, name: str) -> NDArray[np.uint8]:
        """Convert a PIL image, which belongs to the caller and is not confined."""
        width, height = source.size
        self._check_pixels(width, height, name)
        try:
            return np.ascontiguousarray(to_rgb(source))
        except Exception as error:
            raise MediaError(f"{name}: cannot be decoded: {printable(str(error)[:200], None)}") from None


def mono(source: Any, name: str, seconds: float = _SECONDS) -> tuple[NDArray[np.float32], int]:
    """Return float32 samples, the channels averaged, and their rate, from (samples, rate). Raises MediaError."""
    samples, rate = np.asarray(source[0]), source[1]
    if not isinstance(rate, int) or not LOWEST <= rate <= HIGHEST:
        raise MediaError(f"{name}: has {rate!r} samples per second; supported: {LOWEST} to {HIGHEST}")
    kind = samples.dtype.kind
    if kind not in "fiu" or samples.ndim not in (1, 2) or not samples.size:
        expected = "an array of a sound is (samples,) or (samples, channels) of numbers"
        raise MediaError(f"{name}: {expected}, got {samples.dtype} {samples.shape}")
    if len(samples) > seconds * rate:
        raise MediaError(f"{name}: is longer than {seconds:g} s; cut it")
    if kind == "f":
        values = samples.astype(np.float32)
    else:
        half = 2.0 ** (8 * samples.dtype.itemsize - 1)
        values = ((samples.astype(np.float64) - (half if kind == "u" else 0)) / half).astype(np.float32)
    return (values.mean(1, dtype=np.float32) if values.ndim == 2 else values), rate


def _finite(samples: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    if not np.isfinite(samples).all():
        raise MediaError(f"{name}: has values that are infinite or not numbers; save it again as 16-bit WAV")
    return samples
