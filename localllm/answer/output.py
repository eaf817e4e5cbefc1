"""`Output`: the parts of an answer as the reader finds them.

White space between a thought, the content and the calls is dropped, so it is held back until text follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from localllm.answer.incoming import MOST_SPACES, SPACES
from localllm.answer.parts import CallArguments, CallStart, Content, Part, Reasoning

Kind = Literal["reasoning", "content"]


class Output:
    """Collects parts. `blank`: no text was shown since the last thought or call, or since the start."""

    def __init__(self, make_id: Callable[[], str]) -> None:
        self._parts: list[Part] = []
        self._make_id = make_id
        self._calls = 0
        self._kind: Kind = "content"
        self._held = ""  # white space that may end the text
        self._flowing = False  # in white space that is too long to wait for its end
        self._stripping = False  # white space comes before the text
        self.blank = True
        self.called = False  # the last thing was a call

    def drain(self) -> tuple[Part, ...]:
        """Return the parts since the last time, parts of one kind joined."""
        joined: list[Part] = []
        for part in self._parts:
            last = joined[-1] if joined else None
            if isinstance(part, Content) and isinstance(last, Content):
                joined[-1] = Content(last.text + part.text)
            elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
                joined[-1] = Reasoning(last.text + part.text)
            elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and last.index == part.index:
                joined[-1] = CallArguments(part.index, last.json + part.json)
            else:
                joined.append(part)
        self._parts.clear()
        return tuple(joined)

    def enter(self, kind: Kind) -> None:
        """Begin a thought or content. White space before and after what was said until now is dropped."""
        self._kind, self._held, self._stripping, self._flowing, self.blank = kind, "", True, False, True
        self.called = False

    def skip(self) -> None:
        """Drop the white space before a marker that shows nothing, if it is the first thing."""
        if self.blank:
            self._held, self._stripping = "", True

    def text(self, text: str) -> None:
        """Show more of the thought or the content."""
        if self._stripping:
            text = text.lstrip(SPACES)
        body = text.rstrip(SPACES)
        if body:
            self._show(self._held + body)
            self._held, self._flowing, self._stripping = "", False, False
            self.blank = self.called = False
            text = text[len(body) :]
        if self._flowing:
            self._show(text)
            return
        self._held += text
        if len(self._held) > MOST_SPACES:
            self._show(self._held)
            self._held, self._flowing = "", True

    def start(self, name: str, id_: str = "") -> None:
        """Begin a call; the id of a model that writes long ones is kept."""
        self.enter("content")
        self.called = True
        self._parts.append(CallStart(self._calls, id_ if len(id_) > 7 else self._make_id(), name))
        self._calls += 1

    def arguments(self, json: str) -> None:
        """Show more of the arguments of the last call."""
        if json:
            self._parts.append(CallArguments(self._calls - 1, json))

    def finish(self) -> None:
        """The answer has ended: white space after content is a part of it, unless nothing else is."""
        if self._kind == "content" and self._held:
            self._show(self._held)
        self._held = ""

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(Content(text) if self._kind == "content" else Reasoning(text))
