"""Converts answer tokens to text as soon as the text is final, and detects stop strings."""

from __future__ import annotations

from collections.abc import Collection

from localllm.base.errors import LocalLLMError
from localllm.tokenizer import Tokenizer


class AnswerText:
    """Converts tokens to text. Incomplete characters, and text that may become a stop string, are held back.

    Without a tokenizer, all text is empty. `resumed`: the answer continues a text, so its leading space is kept.
    `visible`: ids of control tokens whose text is included; other control tokens have no text.
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
        self.stopped = False  # whether a stop string was found

    def push(self, token: int) -> str:
        """Return the text that the token completes; empty once a stop string was found."""
        text = self._decoder.push(token) if self._decoder is not None else ""
        return text if self._stops is None else self._watched(text)

    def finish(self) -> str:
        """Return the text still held back at the end of the answer; empty after a stop string."""
        tail = self._watched(self._decoder.finish() if self._decoder is not None else "")
        return tail if self.stopped or self._stops is None else tail + self._stops.finish()

    @property
    def ended_by(self) -> str:
        """The stop string that was found, or ""."""
        return self._stops.ended_by if self._stops is not None else ""

    def _watched(self, text: str) -> str:
        if self._stops is not None:
            text, self.stopped = self._stops.push(text)
        return text


class StopStrings:
    """Finds the stop strings `stops` in an answer. The stop string that is completed first counts; on a tie, the
    longest.

    The result does not depend on how the text is split into pieces. Raises LocalLLMError for an empty stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise LocalLLMError("a stop string is empty and would stop every answer at once; remove it")
        self._stops = stops
        self._held = ""
        self.ended_by = ""  # the stop string that was found

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that can be released after `text`, and whether a stop string was found."""
        if self.ended_by:
            return "", True
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, at = min(found)
            self._held, self.ended_by = "", text[at:end]
            return text[:at], True
        shown = len(text) - self._unfinished(text)
        self._held = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """Return the text still held back, which a stop string did not complete."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        return max(
            (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
