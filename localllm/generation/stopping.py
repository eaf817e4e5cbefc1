"""Stop strings in streamed text: show text up to the first stop string, and hold back only a possible start of one."""

from __future__ import annotations

from localllm.errors import LocalLLMError


class StopStrings:
    """Watches an answer for `stops`. The first to complete wins; of several that complete at once, the longest.

    The result does not depend on how the text is cut into pieces. Raises LocalLLMError for an empty stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise LocalLLMError("a stop string is empty and would stop every answer at once; remove it")
        self._stops = stops
        self._held = ""
        self.ended_by = ""  # the stop string that arrived

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown after `text` arrived (none after a stop string), and whether one
        arrived."""
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
        """Return the text that is still held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self, text: str) -> int:
        """Return the length of the longest end of `text` that starts a stop string."""
        return max(
            (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
