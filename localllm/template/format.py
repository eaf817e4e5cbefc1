"""Formats of reasoning and tool calls as data: a few kinds, each with its markers.

`formats.py` has an entry per model family, `output/calls.py` and `output/channels.py` parse these formats, and
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
    """How values are written if not as JSON."""

    quote: str = ""  # marker before and after strings, which have no escapes
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
    ended_by: tuple[str, ...] = ()  # other markers that also end reasoning, and are then parsed themselves
    anywhere: bool = False  # whether the markers, which are control tokens and never prose, also count in content
    resume: str = ""  # text between the end marker and the answer
    spaces: tuple[str, str, str] = ("", "", "")  # spaces after the start, before the end, and after it


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

    name: str = "name"  # keys to write; all known keys are read
    arguments: str = "arguments"
    listed: bool = False  # whether calls are written as a list: [{...}, {...}]
    keyed: bool = False  # whether a call is written as {"NAME": {ARGUMENTS}}
    bare: bool = False  # whether a JSON object for a known tool is a call even without markers
    id_key: str = ""  # key of the call's index, written before its name
    again: bool = False  # whether each further call has a separate section

    def opens(self) -> tuple[str, ...]:
        return (self.section[0],) if self.section[0] else ()


@dataclass(frozen=True, slots=True)
class NamedCalls(Calls):
    """The name between markers, then a JSON object of arguments."""

    begin: tuple[Pattern, ...] = ()  # the first pattern is written; all have the same start and end
    end: tuple[str, ...] = ()  # texts after the arguments, in order, each optional
    style: Style = LOOSE
    prefix: str = ""  # text before every name, which is not part of the name
    whole_id: bool = False  # whether the whole text between the markers is the call's id

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
    value: str = ""  # text between key and value, after white space
    close: str = ""  # text after the value
    end: str = ""  # text after the last argument
    lines: bool = False  # whether to strip one line break before and after each value
    gap: str = "\n"  # text written between tags
    cdata: bool = False

    def opens(self) -> tuple[str, ...]:
        return (self.begin.start,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.section, *self.begin.pieces[::2], *self.key.pieces[::2], self.value, self.close, self.end)


@dataclass(frozen=True, slots=True)
class NestedCalls(Calls):
    """A tag with the name, then an element for each argument, named by its key, which may have nested elements."""

    prefix: str = ""  # text before every tag
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
    start: str  # marker that begins another message
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
    dropped: tuple[str, ...] = ()  # markers around content, which are removed
    around: tuple[str, str] = ("", "")  # texts before and after content
    thinks: bool = False  # whether the template supports reasoning
    native: bool = True  # whether the template describes the tools to the model; otherwise `with_tools` does
    calls_in_reasoning: bool = False  # whether the model calls tools inside its reasoning

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts with a meaning in an answer, including control tokens."""
        thinking = (self.thinking.start, self.thinking.end, *self.thinking.ended_by)
        channels = self.channels.markers if self.channels is not None else ()
        found = (*thinking, *self.calls.markers, *self.dropped, *channels)
        return tuple(dict.fromkeys(marker for marker in found if marker.strip()))

    def visible(self, special: Mapping[str, int]) -> frozenset[int]:
        """Return the special tokens whose text the reader needs.

        `special` is `Tokenizer.special`. When decoding an answer, show their text although they are control tokens, and
        hide all other control tokens. A token that ends the answer is never shown.
        """
        texts = self.markers
        return frozenset(token for text, token in special.items() if text and any(text in marker for marker in texts))
