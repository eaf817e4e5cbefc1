"""Files, PIL images and arrays become pictures and sound; every unusable one is refused in one line."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.media import MediaError
from localllm.media.decode import Decoder, MediaLimits

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
soundfile = pytest.importorskip("soundfile", reason="needs soundfile")

RGB = np.random.default_rng(1).integers(0, 256, (20, 30, 3), np.uint8)


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with Decoder() as decoder:
        yield decoder


def saved(image: Any, format: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, format, **options)
    return data.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, bits: int, color: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("format", ["PNG", "BMP", "PPM", "WEBP"])
def test_a_lossless_picture_is_itself(decoder: Decoder, format: str, tmp_path: Path) -> None:
    data = saved(Image.fromarray(RGB), format, **({"lossless": True} if format == "WEBP" else {}))
    np.testing.assert_array_equal(decoder.picture(data), RGB)
    path = tmp_path / "picture"
    path.write_bytes(data)
    np.testing.assert_array_equal(decoder.picture(path), RGB)
    np.testing.assert_array_equal(decoder.picture(str(path)), RGB)


def test_jpeg_is_near(decoder: Decoder) -> None:
    smooth = np.add.outer(np.arange(40) * 2, np.arange(60) * 2)[..., None].repeat(3, 2).astype(np.uint8)
    found = decoder.picture(saved(Image.fromarray(smooth), "JPEG", quality=95))
    assert np.abs(found.astype(int) - smooth).max() < 6


def test_alpha_is_dropped(decoder: Decoder) -> None:
    alpha = np.concatenate([RGB, np.zeros((20, 30, 1), np.uint8)], 2)
    np.testing.assert_array_equal(decoder.picture(saved(Image.fromarray(alpha), "PNG")), RGB)
    grey = Image.fromarray(RGB[..., :2])
    assert grey.mode == "LA"
    np.testing.assert_array_equal(decoder.picture(saved(grey, "PNG")), RGB[..., :1].repeat(3, 2))


def test_sixteen_bits_keep_the_upper_byte(decoder: Decoder) -> None:
    grey = np.array([[0, 255, 256, 65535]], ">u2")
    found = decoder.picture(png(4, 1, 16, 0, b"\0" + grey.tobytes()))
    assert found[0].tolist() == [[0] * 3, [0] * 3, [1] * 3, [255] * 3]
    color = np.array([[[0x1234, 0x56FF, 0xFF00]]], ">u2")
    assert decoder.picture(png(1, 1, 16, 2, b"\0" + color.tobytes())).tolist() == [[[0x12, 0x56, 0xFF]]]


def test_palettes_bits_and_cmyk(decoder: Decoder) -> None:
    palette = Image.fromarray(RGB).quantize(8)
    expected = np.asarray(palette.convert("RGB"))
    for format, options in (("PNG", {}), ("PNG", {"transparency": 3}), ("GIF", {}), ("BMP", {})):
        np.testing.assert_array_equal(decoder.picture(saved(palette, format, **options)), expected)
    bits = Image.fromarray(RGB[..., 0] > 127)
    np.testing.assert_array_equal(decoder.picture(saved(bits, "PNG")), np.asarray(bits.convert("RGB")))
    ink = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    cyan = decoder.picture(saved(ink, "JPEG")).astype(int)
    assert np.abs(cyan - [0, 255, 255]).max() < 4


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_turns_the_picture(decoder: Decoder, turn: int) -> None:
    from PIL import ImageOps

    image, exif = Image.fromarray(RGB), Image.Exif()
    exif[0x0112] = turn
    data = saved(image, "PNG", exif=exif)
    with Image.open(io.BytesIO(data)) as opened:
        expected = np.asarray(ImageOps.exif_transpose(opened))
    np.testing.assert_array_equal(decoder.picture(data), expected)


def test_damaged_exif_is_ignored(decoder: Decoder) -> None:
    data = saved(Image.fromarray(RGB), "PNG", exif=b"Exif\0\0XX*\0")  # Pillow raises SyntaxError
    np.testing.assert_array_equal(decoder.picture(data), RGB)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_an_animation_shows_its_first_frame(decoder: Decoder, format: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    data = saved(
        frames[0], format, save_all=True, append_images=frames[1:], **({"lossless": True} if format == "WEBP" else {})
    )
    assert decoder.picture(data)[3, 3].tolist() == [255, 0, 0]


def test_arrays_and_pil_images(decoder: Decoder) -> None:
    np.testing.assert_array_equal(decoder.picture(RGB), RGB)
    np.testing.assert_array_equal(decoder.picture(RGB[..., 0]), RGB[..., :1].repeat(3, 2))
    np.testing.assert_array_equal(decoder.picture(np.dstack([RGB, RGB[..., 0]])), RGB)
    np.testing.assert_array_equal(decoder.picture(Image.fromarray(RGB)), RGB)


def wav(samples: np.ndarray, rate: int, format: str = "WAV", subtype: str = "PCM_16") -> bytes:
    data = io.BytesIO()
    soundfile.write(data, samples, rate, format=format, subtype=subtype)
    return data.getvalue()


TONE = (0.3 * np.sin(np.arange(16000) * 0.05)).astype(np.float32)


@pytest.mark.parametrize(
    ("format", "subtype", "most"),
    [("WAV", "PCM_16", 1e-4), ("WAV", "PCM_U8", 1e-2), ("WAV", "FLOAT", 1e-7), ("FLAC", "PCM_16", 1e-4),
     ("OGG", "VORBIS", 0.05), ("MP3", "MPEG_LAYER_III", 0.05)],
)  # fmt: skip
def test_sound_of_a_format(decoder: Decoder, format: str, subtype: str, most: float) -> None:
    found = decoder.sound(wav(TONE, 16000, format, subtype), 16000)
    assert found.dtype == np.float32
    middle = slice(4000, 12000)
    assert np.abs(found[middle] - TONE[middle]).max() < most


def test_channels_are_averaged_and_rates_changed(decoder: Decoder) -> None:
    stereo = np.stack([TONE, -0.5 * TONE], 1)
    np.testing.assert_allclose(decoder.sound(wav(stereo, 16000, subtype="FLOAT"), 16000), 0.25 * TONE, atol=1e-6)
    found = decoder.sound(wav(TONE, 48000), 16000)
    assert len(found) == -(-16000 // 3)
    assert np.abs(found[1000:4000] - TONE[::3][1000:4000]).max() < 2e-3


def test_arrays_of_samples(decoder: Decoder) -> None:
    np.testing.assert_array_equal(decoder.sound((TONE, 16000), 16000), TONE)
    whole = np.round(TONE * 32767).astype(np.int16)
    np.testing.assert_allclose(decoder.sound((whole, 16000), 16000), TONE, atol=1e-4)
    assert len(decoder.sound((np.stack([TONE, TONE], 1), 48000), 16000)) == 5334


BOMB = png(60000, 60000, 8, 2, b"")
HUGE_WAV = wav(TONE, 16000)[:40] + struct.pack("<I", 2**32 - 2) + bytes(1000)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "is empty"),
        (b"GIF8", "not a picture"),
        (BOMB, "it has 60000 x 60000 pixels, at most 50000000"),
        (png(8, 8, 8, 2, b""), "damaged"),
        (saved(Image.fromarray(RGB), "JPEG")[:300], "damaged"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
        (saved(Image.fromarray(RGB), "TIFF"), "not a picture"),
        (RGB.astype(float), "is uint8"),
        (np.zeros((0, 4, 3), np.uint8), "0 pixels"),
        (7, "expected a path"),
        ("a\0b", "is not the path"),
        ("/nowhere/x.png", "No such file"),
        ("", "its path is empty; name a file"),
        ("/dev/zero", "device"),
        ("/", "folder"),
        (bytes((64 << 20) + 1), "at most 67108864"),
    ],
)
def test_an_unusable_picture_is_one_line(decoder: Decoder, source: Any, message: str) -> None:
    with pytest.raises(MediaError, match=message) as caught:
        decoder.picture(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"RIFF", "not a sound"),
        (wav(TONE[:0], 16000), "no samples"),
        (wav(TONE, 500), "500 samples per second"),
        ((TONE, 16), "16 samples per second"),
        ((TONE.astype(complex), 16000), "of numbers"),
        ((TONE * np.float32("nan"), 16000), "not numbers"),
        (wav(np.full(9, np.inf, np.float32), 16000, subtype="FLOAT"), "not numbers"),
    ],
)
def test_an_unusable_sound_is_one_line(decoder: Decoder, source: Any, message: str) -> None:
    with pytest.raises(MediaError, match=message) as caught:
        decoder.sound(source, 16000)
    assert "\n" not in str(caught.value)


def test_a_sound_longer_than_it_says_ends(decoder: Decoder) -> None:
    assert len(decoder.sound(HUGE_WAV, 16000)) < 1000


def test_limits(tmp_path: Path) -> None:
    with Decoder(MediaLimits(file_bytes=2000, pixels=599, seconds=0.5)) as decoder:
        path = tmp_path / "a.wav"
        path.write_bytes(wav(TONE, 16000))
        checks: list[tuple[Callable[[], Any], str]] = [
            (lambda: decoder.picture(saved(Image.fromarray(RGB), "JPEG")), "30 x 20 pixels, at most 599"),
            (lambda: decoder.picture(Image.fromarray(RGB)), "30 x 20 pixels, at most 599"),
            (lambda: decoder.picture(RGB), "30 x 20 pixels, at most 599"),
            (lambda: decoder.sound(path, 16000), "a.wav"),
            (lambda: decoder.sound(wav(TONE[:600], 1000), 16000), "longer than 0.5 s"),
            (lambda: decoder.sound((TONE, 16000), 16000), "longer than 0.5 s"),
        ]
        for call, message in checks:
            with pytest.raises(MediaError, match=message):
                call()


def test_the_child_outlives_a_file_that_needs_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture within the limit of pixels, whose decoder needs more memory than the child may take."""
    monkeypatch.setattr("localllm.media.decode._MEMORY", 48 << 20)
    data = saved(Image.new("RGBA", (2000, 2000)), "WEBP", method=0)
    with Decoder() as decoder:
        with pytest.raises(MediaError, match="more than 48 MB"):
            decoder.picture(data)
        np.testing.assert_array_equal(decoder.picture(saved(Image.fromarray(RGB), "PNG")), RGB)


def test_a_missing_package_is_named(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.media.decode.find_spec", lambda _: None)
    with pytest.raises(MediaError, match=r"need Pillow; run: pip install 'localllm\[media\]'"):
        decoder.picture(b"x")
    with pytest.raises(MediaError, match=r"needs soundfile; run: pip install 'localllm\[media\]'"):
        decoder.sound(b"x", 16000)


def test_a_pipe_is_not_read(decoder: Decoder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MediaError, match="pipe"):
        decoder.picture(tmp_path / "pipe")
