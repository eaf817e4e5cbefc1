"""Decode tokens to text one by one: bytes are held back until they form complete characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """`push(id)` returns the text that the token completes, `finish()` the remainder; joined they equal `decode(ids)`.

    Incomplete characters wait for their remaining bytes; bytes that never form a character become U+FFFD. `drop_space`
    drops the space that the vocabulary puts before the first word.
    """

    def __init__(self, piece: Callable[[int], bytes], drop_space: bool) -> None:
        self._piece = piece
        self._drop_space = drop_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that `token` completes, or ""; raise TokenizerError for an id outside the vocabulary."""
        piece = self._piece(token)
        if self._drop_space and piece:
            self._drop_space = False
            piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Return the remainder at the end: U+FFFD for an incomplete character, otherwise nothing."""
        return self._decoder.decode(b"", True)
