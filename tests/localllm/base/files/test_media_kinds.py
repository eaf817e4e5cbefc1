"""What a file is, from its first bytes."""

from __future__ import annotations

import pytest

from localllm.base.files.media_kinds import START, kind_of


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (b"RIFF\x24\x00\x00\x00WAVEfmt ", "audio"),
        (b"RIFX\x00\x00\x00\x24WAVEfmt ", "audio"),
        (b"RF64\xff\xff\xff\xffWAVEds64", "audio"),
        (b"FORM\x00\x00\x00\x24AIFFCOMM", "audio"),
        (b"FORM\x00\x00\x00\x24AIFCFVER", "audio"),
        (b"RIFF\x24\x00\x00\x00WEBPVP8 ", "image"),
        (b"RIFF\x24\x00\x00\x00AVI LIST", None),
        (b"P6\n# by WAVE 1.0\n1 1\n255\n", "image"),  # the name of a container's content, in a comment
        (b"BM\x46\x00\x00\x00\x00\x00WAVE\x36\x00\x00\x00", "image"),
        (b"\x00\x01\x02\x03\x04\x05\x06\x07WAVEfmt ", None),
        (b"\xff\xfb\x90\x00", "audio"),
        (b"\xff\xd8\xff\xe0", "image"),
        (b"", None),
    ],
)
def test_kinds(start: bytes, expected: str | None) -> None:
    assert kind_of(start[:START]) == expected
