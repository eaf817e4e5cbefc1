"""`PartsWriter` collects the parts of the output that the reader finds.

White space before and after reasoning, content and tool calls is dropped, so it is held back until text follows.
Content that continues after a call or reasoning keeps the white space between its parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Literal

from localllm.generation.parts import CallArguments, CallStart, Content, Part, Reasoning
from localllm.output.incoming import MOST_SPACES
from localllm.template.format import SPACES

Kind = Literal["reasoning", "content"]


class PartsWriter:
    """Collects parts. `blank` is true until text is shown after the start, after reasoning or after a call."""

    def __init__(self, make_id: Callable[[], str]) -> None:
        self._parts: list[Part] = []
        self._make_id = make_id
        self.count = 0  # number of calls so far
        self._kind: Kind = "content"
        self._held = ""  # trailing white space, which may be at the end of the text
        self._flowing = False  # whether in a run of white space that is too long to hold back
        self._stripping = False  # whether white space before the text is dropped
        self._spoke = False  # whether content was shown
        self._gap = ""  # white space at the end of the last content, before reasoning or a call
        self._skipped = ""  # white space dropped at the start of the current text
        self.blank = True
        self.called = False  # whether the last part was a call
        self.within_text = False  # whether all text so far was shown, and more may follow

    def drain(self) -> tuple[Part, ...]:
        """Return the parts since the last call, with adjacent parts of one kind joined."""
        joined = tuple(_joined(list(run)) for _, run in groupby(self._parts, _kind_of))
        self._parts.clear()
        return joined

    def enter(self, kind: Kind, resumed: bool = False) -> None:
        """Begin reasoning or content. White space at the end of the previous text is dropped, or kept as a gap.

        If `resumed`, the text began in the prompt, so white space at its start is kept.
        """
        self.within_text = False
        if self._kind == "content":
            self._gap = self._gap if self.blank else self._held
        self._skipped = ""
        self._kind, self._held, self._stripping, self._flowing, self.blank = kind, "", not resumed, False, True
        self.called = False

    def skip(self) -> None:
        """Drop the white space before a hidden marker if no text was shown before it."""
        if self.blank:
            self._held, self._stripping = "", True
            self.within_text = False

    def text(self, text: str) -> None:
        """Append text to the reasoning or the content."""
        if self._stripping:
            stripped = text.lstrip(SPACES)
            self._skipped = (self._skipped + text[: len(text) - len(stripped)])[:MOST_SPACES]
            text = stripped
        body = text.rstrip(SPACES)
        if body:
            self._show(self._between() + self._held + body)
            self._held, self._flowing, self._stripping = "", False, False
            self.blank = self.called = False
            text = text[len(body) :]
        self.within_text = bool(body) and not text
        if self._flowing:
            self._show(text)
            return
        self._held += text
        if len(self._held) > MOST_SPACES:
            self._show(self._between() + self._held)
            self._held, self._flowing, self._stripping = "", True, False

    def _between(self) -> str:
        """Return the white space to show first if content continues here after a call or reasoning."""
        if self._kind != "content":
            return ""
        gap = (self._gap or self._skipped) if self._spoke and self.blank else ""
        self._spoke, self._gap, self._skipped = True, "", ""
        return gap

    @property
    def kind(self) -> type[Content | Reasoning]:
        """The kind of the current text."""
        return Content if self._kind == "content" else Reasoning

    def trial(self) -> PartsWriter:
        """Return a separate output for text that may turn out not to be calls."""
        return PartsWriter(self._make_id)

    def calls(self, parts: Iterable[Part]) -> None:
        """Add the calls that a trial output collected."""
        for part in parts:
            if isinstance(part, CallStart):
                self.start(part.name, part.id)
            elif isinstance(part, CallArguments):
                self.arguments(part.json)

    def start(self, name: str, id_: str = "") -> None:
        """Begin a call. If the model wrote an id of more than 7 characters, keep it."""
        self.enter("content")
        self.called = True
        self._parts.append(CallStart(self.count, id_ if len(id_) > 7 else self._make_id(), name))
        self.count += 1

    def arguments(self, json: str) -> None:
        """Append to the arguments of the last call."""
        if json:
            self._parts.append(CallArguments(self.count - 1, json))

    def finish(self) -> None:
        """End the output. White space after content is kept; white space without other content is dropped."""
        if self._kind == "content" and self._held:
            self._show(self._held)
        self._held = ""

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(Content(text) if self._kind == "content" else Reasoning(text))


def whole_calls(parts: Sequence[Part]) -> bool:
    """Return whether `parts`, as `drain` returns them, contain calls, and the arguments of all calls are complete
    JSON."""
    texts = {part.index: "" for part in parts if isinstance(part, CallStart)}
    texts |= {part.index: part.json for part in parts if isinstance(part, CallArguments)}
    try:
        return bool([json.loads(text) for text in texts.values()])
    except (ValueError, RecursionError):
        return False


def _kind_of(part: Part) -> object:
    """Return a key that is equal for parts that can be joined."""
    return type(part), getattr(part, "index", None)


def _joined(parts: Sequence[Part]) -> Part:
    """Join parts of one kind."""
    first = parts[0]
    if len(parts) == 1 or isinstance(first, CallStart):
        return first
    if isinstance(first, CallArguments):
        return CallArguments(first.index, "".join(part.json for part in parts if isinstance(part, CallArguments)))
    return type(first)("".join(part.text for part in parts if isinstance(part, Content | Reasoning)))
