"""Stop strings in streamed text: all is shown up to the first stop string; only what may become one is held back."""

from __future__ import annotations

from localllm.errors import LocalLLMError


class StopStrings:
    """Watches one answer for `stops`. The first to be complete counts; of those complete at once, the longest.

    How the text is cut into pieces makes no difference. Raises LocalLLMError for an empty stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise LocalLLMError(
                "a stop string is empty, which would stop every answer before its first word: remove it"
            )
        self._stops = stops
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown now that `text` has come, and whether a stop string has. Nothing is shown after a stop."""
        if self._stopped:
            return "", True
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held, self._stopped = "", True
            return text[: min(found)[1]], True
        shown = len(text) - self._unfinished(text)
        self._held = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """What is still held back: it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        return max(
            (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
