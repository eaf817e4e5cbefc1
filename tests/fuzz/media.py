"""Damaged pictures, sounds and mmproj keys become pieces, or one line.

Files go through the confined child. Keys are changed in the metadata of every projector type, with a picture or a sound
to prepare.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from localllm.gguf import open_gguf, write_gguf
from localllm.media import EncoderInput, MediaError, Projector, TextModel
from localllm.media.decode import Decoder
from localllm.media.pictures import PICTURES
from localllm.media.sounds import SOUNDS
from tests.fuzz import values
from tests.fuzz.case import Case, Wrong
from tests.localllm.media.test_projector import metadata, picture, weights

_HALVES = np.full(3, 0.5)
_TOO_MUCH = 300 << 20  # bytes of the tensors of one picture


class Kind:
    together: ClassVar[int] = 250
    seconds: ClassVar[float] = 60.0

    def __init__(self, home: Path) -> None:
        self._pictures, self._sounds = _pictures(), _sounds()
        self._headers = _headers(home)
        self._decoder = _PerProcess()

    def make(self, random: Random, folder: Path) -> Case:
        choice = random.random()
        if choice < 0.55:
            return self._file(random, folder, self._pictures, _use_picture)
        if choice < 0.85:
            return self._file(random, folder, self._sounds, _use_sound)
        size = random.choice(((1, 1), (30, 20), (300, 200), (2, 900), (1000, 3)))
        if choice < 0.92:
            name = random.choice(list(self._headers))
            path = folder / "mmproj.gguf"
            path.write_bytes(values.damage(random, self._headers[name]))
            return Case((f"header of {name}",), lambda: _use_file(path, size))
        kind, table = random.choice((("image", list(PICTURES)), ("audio", list(SOUNDS))))
        keys = metadata(kind, random.choice(table))
        changes = [_change_key(random, keys) for _ in range(random.choice((1, 1, 2, 4)))]
        (folder / "keys").write_text(f"{keys}\n{size}\n", errors="replace")
        return Case(tuple(changes), lambda: _use_keys(keys, size))

    def _file(
        self,
        random: Random,
        folder: Path,
        files: dict[str, bytes],
        use: Callable[[Decoder, bytes], str],
    ) -> Case:
        name = random.choice(list(files))
        data = values.damage(random, files[name], random.choice((40, 200, None)))
        (folder / name.replace(" ", "-")).write_bytes(data)
        return Case((name,), lambda: use(self._decoder.get(), data))


class _PerProcess:
    """One decoder per process: a child must not be shared by forked processes."""

    def __init__(self) -> None:
        self._decoder: tuple[int, Decoder] | None = None

    def get(self) -> Decoder:
        if self._decoder is None or self._decoder[0] != os.getpid():
            self._decoder = os.getpid(), Decoder()
        return self._decoder[1]


def _pictures() -> dict[str, bytes]:
    from PIL import Image

    files = {}
    rgb = Image.fromarray(picture(40, 30))
    exif = Image.Exif()
    exif[0x0112] = 6
    forms: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "png": (rgb, "PNG", {"exif": exif}),
        "png grey": (rgb.convert("LA"), "PNG", {}),
        "png palette": (rgb.quantize(16), "PNG", {"transparency": 2}),
        "png animated": (rgb, "PNG", {"save_all": True, "append_images": [rgb.rotate(90)]}),
        "png 16 bits": (Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100), "PNG", {}),
        "jpeg": (rgb, "JPEG", {"exif": exif}),
        "jpeg progressive": (rgb, "JPEG", {"progressive": True, "quality": 90}),
        "jpeg ink": (rgb.convert("CMYK"), "JPEG", {}),
        "jpeg grey": (rgb.convert("L"), "JPEG", {}),
        "webp": (rgb, "WEBP", {"exif": exif}),
        "webp lossless": (rgb.convert("RGBA"), "WEBP", {"lossless": True}),
        "webp animated": (rgb, "WEBP", {"save_all": True, "append_images": [rgb.rotate(90)]}),
        "gif": (rgb, "GIF", {"save_all": True, "append_images": [rgb.rotate(90)]}),
        "bmp": (rgb, "BMP", {}),
        "bmp palette": (rgb.quantize(16), "BMP", {}),
        "ppm": (rgb, "PPM", {}),
        "pgm": (rgb.convert("L"), "PPM", {}),
    }
    for name, (image, format, options) in forms.items():
        data = io.BytesIO()
        image.save(data, format, **options)
        files[name] = data.getvalue()
    return files


def _sounds() -> dict[str, bytes]:
    import soundfile

    tone = (0.3 * np.sin(np.arange(4000) * 0.05)).astype(np.float32)
    stereo = np.stack([tone, -tone], 1)
    forms = {
        "wav": ("WAV", "PCM_16", tone),
        "wav 24 bits": ("WAV", "PCM_24", stereo),
        "wav float": ("WAV", "FLOAT", tone),
        "wav adpcm": ("WAV", "MS_ADPCM", tone),
        "wav u-law": ("WAV", "ULAW", tone),
        "flac": ("FLAC", "PCM_16", stereo),
        "vorbis": ("OGG", "VORBIS", stereo),
        "opus": ("OGG", "OPUS", tone),
        "mp3": ("MP3", "MPEG_LAYER_III", tone),
        "aiff": ("AIFF", "PCM_16", tone),
        "caf": ("CAF", "PCM_16", tone),
    }
    files = {}
    for name, (format, subtype, samples) in forms.items():
        data = io.BytesIO()
        soundfile.write(data, samples, 16000, format=format, subtype=subtype)
        files[name] = data.getvalue()
    return files


def _headers(home: Path) -> dict[str, bytes]:
    """Return small mmproj files of all projector types."""
    files = {}
    for kind, table in (("image", PICTURES), ("audio", SOUNDS)):
        for type in table:
            tensors = [("v.token_embd.img_break", "F32", (64,), bytes(256))]
            for name in ("a.mel_filters", "a.window"):
                small = weights(name)
                assert small is not None
                tensors.append((name, "F32", (len(small),), small.tobytes()))
            write_gguf(home / "mmproj.gguf", metadata(kind, type), tensors, overwrite=True)
            files[type] = (home / "mmproj.gguf").read_bytes()
    return files


def _use_picture(decoder: Decoder, data: bytes) -> str:
    found = decoder.picture(data)
    if found.dtype != np.uint8 or found.ndim != 3 or found.shape[2] != 3 or not found.size:
        raise Wrong(f"a picture of {found.dtype} {found.shape}")
    if found.size < 1 << 22:
        _prepare(Projector(metadata("image", "qwen3vl_merger"), TextModel(64), weights).picture, [found])
    return "picture"


def _use_sound(decoder: Decoder, data: bytes) -> str:
    found = decoder.sound(data, 16000)
    if found.dtype != np.float32 or found.ndim != 1 or not found.size or not np.isfinite(found).all():
        raise Wrong(f"a sound of {found.dtype} {found.shape}")
    if found.size < 1 << 18:
        _prepare(Projector(metadata("audio", "gemma4a"), TextModel(64), weights).sound, found)
    return "sound"


def _use_file(path: Path, size: tuple[int, int]) -> str:
    with open_gguf(path) as file:
        return _use(Projector.of(file, TextModel(64)), size)


def _use_keys(keys: dict[str, Any], size: tuple[int, int]) -> str:
    return _use(Projector(keys, TextModel(64), weights), size)


def _use(projector: Projector, size: tuple[int, int]) -> str:
    samples = np.sin(np.arange(30 * max(size)) * 0.1).astype(np.float32)
    if "image" in projector.kinds:
        _prepare(projector.picture, [picture(*size)])
    if "audio" in projector.kinds:
        _prepare(projector.sound, samples)
    return f"keys of {' and '.join(projector.kinds)}"


def _prepare(
    prepare: Callable[[Any], list[str | EncoderInput]], medium: list[NDArray[np.uint8]] | NDArray[np.float32]
) -> None:
    try:
        parts = prepare(medium)
    except MediaError:
        return
    pieces = [part for part in parts if isinstance(part, EncoderInput)]
    if not pieces or any(piece.tokens < 1 for piece in pieces):
        raise Wrong(f"{len(pieces)} pieces with {[piece.tokens for piece in pieces]} tokens")
    if not all(np.isfinite(tensor).all() for piece in pieces for tensor in piece.tensors):
        raise Wrong("a tensor has values that are not finite")
    if sum(piece.nbytes for piece in pieces) > _TOO_MUCH:
        raise Wrong(f"{sum(piece.nbytes for piece in pieces)} bytes of tensors")


def _change_key(random: Random, keys: dict[str, Any]) -> str:
    key = random.choice([key for key in keys if key.startswith("clip.")])
    old = keys[key]
    new: Any
    if isinstance(old, np.ndarray) and random.random() < 0.7:
        if len(old) and random.random() < 0.5:
            new = old.copy()
            at = random.randrange(len(new))
            with np.errstate(all="ignore"):
                real, whole = values.real(random), values.integer(random) % 2**31
                new[at] = real if new.dtype.kind == "f" else whole
        else:
            new = np.resize(old, random.choice((0, 1, 2, 3, 5, 5000, 10**6)))
    elif isinstance(old, int) and random.random() < 0.8:
        new = values.integer(random, old)
    else:
        others = (True, False, None, 1, -1, 0.5, float("nan"), np.array([], np.int32), _HALVES, [], "")
        new = random.choice((*others, values.text(random), values.integer(random)))
    if new is None:
        del keys[key]
    else:
        keys[key] = new
    return f"{key} = {str(new)[:60]}"
