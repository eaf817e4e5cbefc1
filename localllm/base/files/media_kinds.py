"""What a file with a picture or a sound is, from its first bytes. Used before a decoder reads it."""

from __future__ import annotations

from typing import Literal

START = 16  # bytes to look at
_PICTURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", *(b"P%d" % n for n in range(1, 7)))
_SOUNDS = (b"fLaC", b"OggS", b"ID3")
_CONTAINERS = (b"RIFF", b"RIFX", b"RF64", b"FORM")


def kind_of(start: bytes) -> Literal["image", "audio"] | None:
    """Return what a file with these first bytes is; None for anything else."""
    content = start[8:12] if start.startswith(_CONTAINERS) else b""
    if start.startswith(_SOUNDS) or content in (b"WAVE", b"AIFF", b"AIFC"):
        return "audio"
    if start.startswith(_PICTURES) or content == b"WEBP":
        return "image"
    return "audio" if start[:1] == b"\xff" and start[1:2] >= b"\xe0" else None  # MPEG
