"""The formats of reasoning and tool calls, as data: a few kinds, each with its markers.

`formats.py` has a row for each model family, `output/calls.py` and `output/channels.py` parse these formats, and
`constrained/forced_calls.py` converts them to grammars. In a pattern, {name}, {key}, {id}, {n}, {type} and {string} are
fields that differ between calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SPACES = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Style:
    """How values are written, besides JSON."""

    quote: str = ""  # a marker before and after strings without escapes
    bare_keys: bool = False


LOOSE = Style()
GEMMA = Style(quote='<|"|>', bare_keys=True)


_FIELD = re.compile(r"\{(name|key|id|n|type|string)\}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text with fields, such as `<function={name}>`."""

    source: str

    @property
    def start(self) -> str:
        """The text before the first field."""
        return _FIELD.split(self.source)[0]

    @property
    def end(self) -> str:
        """The text after the last field."""
        return _FIELD.split(self.source)[-1]

    @property
    def pieces(self) -> list[str]:
        """Alternating literal texts and field names, starting and ending with a literal."""
        return _FIELD.split(self.source)

    def read(self, middle: str) -> Mapping[str, str] | None:
        """Parse the text between `start` and `end` into fields; None if it does not match."""
        pieces = self.pieces[1:-1]
        form = "".join(f"(?P<{part}>.+?)" if at % 2 == 0 else re.escape(part) for at, part in enumerate(pieces))
        found = re.fullmatch(form, middle, re.DOTALL)
        return None if found is None else found.groupdict()


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers around reasoning."""

    start: str
    end: str
    ended_by: tuple[str, ...] = ()  # markers that also end it, and are then parsed themselves
    anywhere: bool = False  # the markers are control tokens, which prose cannot contain: they also count in content
    resume: str = ""  # text between the end marker and the answer
    spaces: tuple[str, str, str] = ("", "", "")  # written by the template after the start, before the end, and after it


@dataclass(frozen=True, slots=True)
class Calls:
    """Base class of call formats: a section with one or more calls."""

    section: tuple[str, str] = ("", "")  # text before and after the calls

    def opens(self) -> tuple[str, ...]:
        """Return the markers that begin a call."""
        raise NotImplementedError

    @property
    def markers(self) -> tuple[str, ...]:
        """All literal texts of the format, for `AnswerFormat.visible`."""
        return (*self.section, *self.opens())


@dataclass(frozen=True, slots=True)
class JsonCalls(Calls):
    """Calls as JSON objects with a name and arguments. A section contains an object, several objects, or a list."""

    name: str = "name"  # keys to write; all known ones are read
    arguments: str = "arguments"
    listed: bool = False  # [{...}, {...}]
    keyed: bool = False  # {"the name": {the arguments}}
    bare: bool = False  # an answer that is such an object for a known tool is a call, without markers
    id_key: str = ""  # key of the call's number, written before its name
    again: bool = False  # each further call has its own section

    def opens(self) -> tuple[str, ...]:
        return (self.section[0],) if self.section[0] else ()


@dataclass(frozen=True, slots=True)
class NamedCalls(Calls):
    """A name between markers, then an object of arguments."""

    begin: tuple[Pattern, ...] = ()  # the first one is written; all have the same start and end
    end: tuple[str, ...] = ()  # texts after the arguments, in order, each optional
    style: Style = LOOSE
    prefix: str = ""  # before every name, but not part of it
    whole_id: bool = False  # the text between the markers is the call's id

    def opens(self) -> tuple[str, ...]:
        return (self.begin[0].start,)

    @property
    def markers(self) -> tuple[str, ...]:
        inner = [piece for pattern in self.begin for piece in pattern.pieces[::2]]
        return (*self.section, *inner, *self.end, self.style.quote)


@dataclass(frozen=True, slots=True)
class TaggedCalls(Calls):
    """A tag with the name, then a tag for each argument, as in XML."""

    begin: Pattern = Pattern("")
    key: Pattern = Pattern("")
    value: str = ""  # between key and value, after white space
    close: str = ""  # after the value
    end: str = ""  # after the last argument
    lines: bool = False  # a line break before and after each value is not part of it
    gap: str = "\n"  # written between tags
    cdata: bool = False

    def opens(self) -> tuple[str, ...]:
        return (self.begin.start,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.section, *self.begin.pieces[::2], *self.key.pieces[::2], self.value, self.close, self.end)


@dataclass(frozen=True, slots=True)
class NestedCalls(Calls):
    """A tag with the name, then an element for each argument, named by its key, with nested elements."""

    prefix: str = ""  # before every tag
    begin: Pattern = Pattern("")
    end: str = ""

    def opens(self) -> tuple[str, ...]:
        return (self.begin.start,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.section, *self.begin.pieces[::2], self.prefix, self.end)


@dataclass(frozen=True, slots=True)
class PythonCalls(Calls):
    """A list of calls in Python syntax: [name(key=value, ...), ...]."""

    def opens(self) -> tuple[str, ...]:
        return (self.section[0],)


@dataclass(frozen=True, slots=True)
class Channels:
    """An answer as a sequence of messages with headers: OpenAI's harmony and similar formats."""

    kind: Literal["harmony", "recipients", "arrows"]
    start: str  # begins another message
    header_end: str
    ends: tuple[str, ...]  # end markers of a message

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.header_end, *self.ends)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The answer format of a model family."""

    name: str
    thinking: ReasoningMarkers
    calls: Calls
    channels: Channels | None = None
    dropped: tuple[str, ...] = ()  # markers around content that are not part of it
    around: tuple[str, str] = ("", "")  # before and after content
    thinks: bool = False  # the template supports reasoning
    native: bool = True  # the template describes the tools to the model; otherwise `with_tools` does
    calls_in_reasoning: bool = False  # the model calls tools inside its reasoning

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts with a meaning in an answer, including control tokens."""
        thinking = (self.thinking.start, self.thinking.end, *self.thinking.ended_by)
        channels = self.channels.markers if self.channels is not None else ()
        found = (*thinking, *self.calls.markers, *self.dropped, *channels)
        return tuple(dict.fromkeys(marker for marker in found if marker.strip()))

    def visible(self, special: Mapping[str, int]) -> frozenset[int]:
        """Return the special tokens that the reader must see as text.

        `special` is `Tokenizer.special`. When decoding an answer, show their text although they are control tokens, and
        hide all other control tokens. A token that ends the answer is never shown.
        """
        texts = self.markers
        return frozenset(token for text, token in special.items() if text and any(text in marker for marker in texts))
