"""The ways in which models write thoughts and calls of tools, as data: a few kinds, each with its markers.

`formats.py` has a row for each family of models, `calls.py` and `channels.py` read these, and `forced.py` makes
grammars of them. In a pattern, {name}, {key}, {id}, {n}, {type} and {string} stand for what differs from call to call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from localllm.answer.literal import LOOSE, Style

_FIELD = re.compile(r"\{(name|key|id|n|type|string)\}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text with fields, such as `<function={name}>`."""

    source: str

    @property
    def start(self) -> str:
        """What stands before the first field."""
        return _FIELD.split(self.source)[0]

    @property
    def end(self) -> str:
        """What stands after the last field."""
        return _FIELD.split(self.source)[-1]

    @property
    def pieces(self) -> list[str]:
        """Literal texts and field names, in turn, a literal first and last."""
        return _FIELD.split(self.source)

    def read(self, middle: str) -> Mapping[str, str] | None:
        """Return the fields in what stood between `start` and `end`; None if it has another form."""
        pieces = self.pieces[1:-1]
        form = "".join(f"(?P<{part}>.+?)" if at % 2 == 0 else re.escape(part) for at, part in enumerate(pieces))
        found = re.fullmatch(form, middle, re.DOTALL)
        return None if found is None else found.groupdict()


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Where a thought begins and ends."""

    start: str
    end: str
    ended_by: tuple[str, ...] = ()  # markers that also end it, and count
    anywhere: bool = False  # the markers are control tokens, which no prose has: they count within content, too
    resume: str = ""  # between the end and what follows
    spaces: tuple[str, str, str] = ("", "", "")  # what the template writes after the start, before and after the end


@dataclass(frozen=True, slots=True)
class Calls:
    """Base of all call formats: a section that holds one or more calls."""

    section: tuple[str, str] = ("", "")  # before and after the calls

    def opens(self) -> tuple[str, ...]:
        """Markers that begin a call."""
        raise NotImplementedError

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that the format is made of, for `Format.visible`."""
        return (*self.section, *self.opens())


@dataclass(frozen=True, slots=True)
class JsonCalls(Calls):
    """Calls as JSON objects with a name and arguments. A section holds one object, several, or a list."""

    name: str = "name"  # keys to write; all known ones are read
    arguments: str = "arguments"
    listed: bool = False  # [{...}, {...}]
    keyed: bool = False  # {"the name": {the arguments}}
    bare: bool = False  # an answer that is such an object of a known tool is a call, without markers
    id_key: str = ""  # key of the call's number, written before its name
    again: bool = False  # every further call is in a section of its own

    def opens(self) -> tuple[str, ...]:
        return (self.section[0],) if self.section[0] else ()


@dataclass(frozen=True, slots=True)
class NamedCalls(Calls):
    """A name between markers, then an object of arguments."""

    begin: tuple[Pattern, ...] = ()  # the first one is written; all have the same start and end
    end: tuple[str, ...] = ()  # texts after the arguments, in order, each optional
    style: Style = LOOSE
    prefix: str = ""  # before every name; it does not belong to it
    whole_id: bool = False  # what stands between the markers is the call's id

    def opens(self) -> tuple[str, ...]:
        return (self.begin[0].start,)

    @property
    def markers(self) -> tuple[str, ...]:
        inner = [piece for pattern in self.begin for piece in pattern.pieces[::2]]
        return (*self.section, *inner, *self.end, self.style.quote)


@dataclass(frozen=True, slots=True)
class TaggedCalls(Calls):
    """A tag with the name, then one for each argument, as in XML."""

    begin: Pattern = Pattern("")
    key: Pattern = Pattern("")
    value: str = ""  # between key and value, after white space
    close: str = ""  # after the value
    end: str = ""  # after the last argument
    lines: bool = False  # a line break before and after each value does not belong to it
    gap: str = "\n"  # what is written between tags
    cdata: bool = False

    def opens(self) -> tuple[str, ...]:
        return (self.begin.start,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.section, *self.begin.pieces[::2], *self.key.pieces[::2], self.value, self.close, self.end)


@dataclass(frozen=True, slots=True)
class NestedCalls(Calls):
    """A tag with the name, then an element for each argument, named by its key, with further ones inside."""

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
    """A list of calls in Python: [name(key=value, ...), ...]."""

    def opens(self) -> tuple[str, ...]:
        return (self.section[0],)


@dataclass(frozen=True, slots=True)
class Channels:
    """An answer in messages, each with a header that says what it is: OpenAI's harmony, and formats like it."""

    kind: Literal["harmony", "recipients", "arrows"]
    start: str  # begins a further message
    header_end: str
    ends: tuple[str, ...]  # after a message

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.header_end, *self.ends)


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes its answers."""

    name: str
    thinking: ThoughtMarks
    calls: Calls
    channels: Channels | None = None
    dropped: tuple[str, ...] = ()  # markers around content that do not belong to it
    around: tuple[str, str] = ("", "")  # what stands before and after content
    thinks: bool = False  # the template knows of thoughts
    native: bool = True  # the template describes the tools to the model; else `with_tools` does
    calls_in_thought: bool = False  # the model calls tools without ending its thought first

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that have a meaning in an answer, those of control tokens included."""
        thinking = (self.thinking.start, self.thinking.end, *self.thinking.ended_by)
        channels = self.channels.markers if self.channels is not None else ()
        found = (*thinking, *self.calls.markers, *self.dropped, *channels)
        return tuple(dict.fromkeys(marker for marker in found if marker.strip()))

    def visible(self, special: Mapping[str, int]) -> frozenset[int]:
        """Return which of the special tokens the reader has to see as text.

        `special` is `Tokenizer.special`. Whoever decodes an answer shows the text of these tokens, though they are
        control tokens, and hides all others. A token that ends the answer is never shown.
        """
        texts = self.markers
        return frozenset(token for text, token in special.items() if text and any(text in marker for marker in texts))
