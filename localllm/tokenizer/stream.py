"""Text from tokens, one by one: bytes are held back until they form whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """`push(id)` returns the text that the token completes, `finish()` the rest; joined they equal `decode(ids)`.

    Half a character waits for its other half; bytes that never form one become U+FFFD. With `drop_space`, the space
    that the vocabulary writes before a first word is dropped.
    """

    def __init__(self, piece: Callable[[int], bytes], drop_space: bool) -> None:
        self._piece = piece
        self._drop_space = drop_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that `token` completes, possibly empty. TokenizerError for an id outside the vocabulary."""
        piece = self._piece(token)
        if self._drop_space and piece:
            self._drop_space = False
            piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Return the rest at the end: U+FFFD for an incomplete character, else nothing."""
        return self._decoder.decode(b"", True)
