"""The text of an answer: convert tokens to text as soon as it is certain; a stop string ends it."""

from __future__ import annotations

from collections.abc import Collection

from localllm.generation.stopping import StopStrings
from localllm.tokenizer import Tokenizer


class AnswerText:
    """Holds back half characters and text that may become a stop string. Without a tokenizer every text is empty.

    `resumed`: the answer continues in the middle of a text, so a first space belongs to the text. `visible` are control
    tokens whose text is shown; that of others is not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: tuple[str, ...] = (),
        resumed: bool = False,
        visible: Collection[int] = (),
    ) -> None:
        self._decoder = tokenizer.stream(drop_space=not resumed, visible=visible) if tokenizer is not None else None
        self._stops = StopStrings(stop) if stop else None
        self.stopped = False  # a stop string has arrived

    def push(self, token: int) -> str:
        """Return the text that a token completed; nothing from the stop string on."""
        return self._watched(self._decoder.push(token) if self._decoder is not None else "")

    def finish(self) -> str:
        """Return the text that was held back when the tokens ended; nothing after a stop string."""
        tail = self._watched(self._decoder.finish() if self._decoder is not None else "")
        return tail if self.stopped or self._stops is None else tail + self._stops.finish()

    @property
    def ended_by(self) -> str:
        """The stop string that has arrived, or ""."""
        return self._stops.ended_by if self._stops is not None else ""

    def _watched(self, text: str) -> str:
        if self._stops is not None:
            text, self.stopped = self._stops.push(text)
        return text
