"""The text of an answer: tokens go in, and out comes what is certain; a stop string ends it."""

from __future__ import annotations

from localllm.generation.stopping import StopStrings
from localllm.tokenizer import Tokenizer


class AnswerText:
    """Half characters and what may become a stop string are held back. Without a tokenizer there is no text.

    `resumed`: the answer goes on in the middle of a text, so a first space is the text's own.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...] = (), resumed: bool = False) -> None:
        self._decoder = tokenizer.stream(drop_space=not resumed) if tokenizer is not None else None
        self._stops = StopStrings(stop) if stop else None
        self.stopped = False  # a stop string has come

    def push(self, token: int) -> str:
        """What became certain with a token; nothing from the stop string on."""
        return self._watched(self._decoder.push(token) if self._decoder is not None else "")

    def finish(self) -> str:
        """What was still held back when the tokens ended; nothing after a stop string."""
        tail = self._watched(self._decoder.finish() if self._decoder is not None else "")
        return tail if self.stopped or self._stops is None else tail + self._stops.finish()

    def _watched(self, text: str) -> str:
        if self._stops is not None:
            text, self.stopped = self._stops.push(text)
        return text
