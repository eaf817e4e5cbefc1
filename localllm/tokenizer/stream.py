"""Text out of tokens, one by one: bytes are held back until they are whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """`push(id)` gives the text that the token completes, `finish()` what is left; joined they equal `decode(ids)`.

    Half a character waits for its other half; bytes that never become one are U+FFFD. With `drop_space` the first
    character of the text is dropped where it is the space that the vocabulary writes before a first word.
    """

    def __init__(self, piece: Callable[[int], bytes], drop_space: bool) -> None:
        self._piece = piece
        self._drop_space = drop_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text completed by `token`; may be empty. TokenizerError for an id outside the vocabulary."""
        piece = self._piece(token)
        if self._drop_space and piece:
            self._drop_space = False
            piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that stayed incomplete, else nothing."""
        return self._decoder.decode(b"", True)
