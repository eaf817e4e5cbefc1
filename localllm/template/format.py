"""Formats of reasoning and tool calls as data.

`formats.py` has an entry per model family. Three programs interpret it: `output/calls.py` reads calls,
`constrained/forced_calls.py` makes a grammar of them, and `call_writer.py` writes them. In a pattern, {name}, {key},
{id}, {n}, {count}, {type} and {string} are fields that differ between calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SPACES = " \t\r\n"
_FIELD = re.compile(r"\{(name|key|id|n|count|type|string)\}")


def pieces(pattern: str) -> list[str]:
    """Return alternating texts and field names of a pattern, starting and ending with a text."""
    return _FIELD.split(pattern)


def head(pattern: str) -> str:
    """Return the text before the first field."""
    return pieces(pattern)[0]


def tail(pattern: str) -> str:
    """Return the text after the last field."""
    return pieces(pattern)[-1]


def fields_in(pattern: str, middle: str) -> Mapping[str, str] | None:
    """Parse the text between `head` and `tail` into fields; None if it does not match."""
    inner = pieces(pattern)[1:-1]
    form = "".join(f"(?P<{part}>.+?)" if at % 2 == 0 else re.escape(part) for at, part in enumerate(inner))
    found = re.fullmatch(form, middle, re.DOTALL)
    return None if found is None else found.groupdict()


def filled(pattern: str, fields: Mapping[str, str]) -> list[str]:
    """Return `pieces` with these fields as text: only the names of other fields remain."""
    found = [""]
    for at, piece in enumerate(pieces(pattern)):
        if at % 2 and piece not in fields:
            found += [piece, ""]
        else:
            found[-1] += fields[piece] if at % 2 else piece
    return found


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers around reasoning."""

    start: str = ""
    end: str = ""
    ended_by: tuple[str, ...] = ()  # other markers that also end reasoning, and are then parsed themselves
    anywhere: bool = False  # whether the markers, which are control tokens and never prose, also count in content
    resume: str = ""  # text between the end marker and the answer
    spaces: tuple[str, str, str] = ("", "", "")  # spaces after the start, before the end, and after it


@dataclass(frozen=True, slots=True)
class Items:
    """How arguments are written one by one, each after a text with its key."""

    key: str
    close: str = ""  # text after a value; without it, values are JSON, else strings are bare text
    value: str = ""  # text between key and value, after white space
    lines: bool = False  # whether to strip one line break before and after each value
    gap: str = ""  # text written before the first item and after each one
    separator: str = ""  # text between items
    cdata: bool = False
    prefix: str = ""  # text before every tag, if objects and lists are written as nested tags


@dataclass(frozen=True, slots=True)
class Calls:
    """A format of calls: a section with one or more calls, each a text with the name, arguments, and an end."""

    begin: str  # text before the arguments; with a brace first, a call is a JSON object
    end: tuple[str, ...] = ()  # texts after the arguments; each is optional after a JSON object
    section: tuple[str, str] = ("", "")  # text before and after the calls
    items: Items | None = None  # how arguments are written; None: as a JSON object
    quote: str = ""  # marker around strings, which then have no escapes; keys are bare
    also: tuple[str, ...] = ()  # other texts that are read as `begin`, with the same head and tail
    prefix: str = ""  # text before every name, which is not part of the name
    whole_id: bool = False  # whether the whole text between the markers is the call's id
    listed: bool = False  # whether the calls of a section are written as a list
    again: bool = False  # whether each further call has a separate section

    @property
    def objects(self) -> bool:
        """Whether a call is a JSON object with a name and arguments."""
        return head(self.begin).startswith("{")

    @property
    def bare(self) -> bool:
        """Whether a JSON object for a known tool is a call even without markers."""
        return self.objects and not self.section[0]

    @property
    def opens(self) -> tuple[str, ...]:
        """The markers that begin calls."""
        return tuple(filter(None, (self.section[0], "" if self.objects or self.listed else head(self.begin))))

    @property
    def following(self) -> tuple[str, ...]:
        """The texts that can follow the start of a call or a closing tag."""
        items = self.items
        assert items is not None
        return (items.prefix,) if items.prefix else (head(items.key), *self.end, self.section[1] or self.end[0])

    @property
    def markers(self) -> tuple[str, ...]:
        """All literal texts of the format, for `AnswerFormat.visible`."""
        if self.objects or self.listed:
            return self.section
        heads = [piece for pattern in (self.begin, *self.also) for piece in pieces(pattern)[::2]]
        items = self.items
        tags: tuple[str, ...] = ()
        if items is not None:
            tags = (items.prefix,) if items.prefix else (*pieces(items.key)[::2], items.value, items.close)
        return (*self.section, *heads, *tags, *self.end, self.quote)


@dataclass(frozen=True, slots=True)
class Channels:
    """An answer as a sequence of messages with headers: OpenAI's harmony and similar formats."""

    kind: Literal["harmony", "recipients", "arrows"]
    start: str  # marker that begins another message
    header_end: str
    ends: tuple[str, ...]  # end markers of a message

    @property
    def heads_calls(self) -> bool:
        """Whether the header of a message is also the start of a call."""
        return self.kind != "recipients"

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.header_end, *self.ends)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The answer format of a model family."""

    name: str
    texts: tuple[str, ...]  # all templates with the format contain these
    calls: Calls
    thinking: ReasoningMarkers = ReasoningMarkers()
    channels: Channels | None = None
    dropped: tuple[str, ...] = ()  # markers around content, which are removed
    around: tuple[str, str] = ("", "")  # texts before and after content
    thinks: bool = False  # whether the template supports reasoning
    native: bool = True  # whether the template describes the tools to the model; otherwise `tool_messages` does
    calls_in_reasoning: bool = False  # whether to parse calls inside reasoning, instead of treating them as text

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
