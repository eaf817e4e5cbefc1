"""Pictures and sounds in messages: markers replace them while the chat template is rendered.

A marker has a random number that is made after the user's text, so no text can imitate it. As in llama.cpp, a template
sees one text per message and does not write its own tokens for pictures; the projector's texts come instead.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from localllm.base.errors import LocalLLMError
from localllm.base.files.media_kinds import START, kind_of
from localllm.base.files.regular import open_regular, read_regular
from localllm.base.notices import said
from localllm.base.printable import printable
from localllm.template.origin import Text, marked

Kind = Literal["image", "audio"]
KINDS: tuple[Kind, ...] = ("image", "audio")
WORDS = {"image": "picture", "audio": "sound"}
MARKER = "<__media__>"  # replaces a picture or a sound in prompts without messages, as in llama.cpp


@dataclass(frozen=True, slots=True, eq=False)
class Medium:
    """A picture or a sound of a prompt. `localllm.media.decode` reads `source`; two frames are a list."""

    kind: Kind
    source: Any
    name: str = ""  # in messages
    place: str = ""  # "picture 2 of the request", for errors about one without a name
    parts: tuple[Any, ...] | None = None  # marker texts and pieces, once `Multimodal.prepared` has made them
    _files: dict[int, tuple[bytes, ...]] = field(default_factory=dict, repr=False)  # of `files`, by rate

    def loaded(self) -> Medium:
        """Return the medium with the content of its file, which then identifies it, and may be gone later."""
        source = self.source
        if not isinstance(source, str | os.PathLike):
            return self
        from localllm.media.decode import MediaLimits  # prompts of text alone start faster without it

        try:
            data = read_regular(source, MediaLimits().file_bytes)
        except (OSError, ValueError):
            return self  # the decoder names what is wrong
        return replace(self, source=data, name=self.name or printable(Path(source).name, None))

    def files(self, rate: int) -> tuple[bytes, ...]:
        """Return the content as files; two frames are two. An array of a sound has `rate` samples per second.

        Pictures and sounds in memory become PNG and WAV, from which the decoder makes the same values. They are kept,
        because a chat is saved after every turn.
        """
        if rate not in self._files:
            self._files[rate] = self._made(rate)
        return self._files[rate]

    def _made(self, rate: int) -> tuple[bytes, ...]:
        several = self.kind == "image" and isinstance(self.source, list | tuple)
        frames = self.source if several else [self.source]
        return tuple(self._file(frame, rate) for frame in frames)

    def _file(self, source: Any, rate: int) -> bytes:
        from localllm.media.plain import picture_file, wav

        if isinstance(source, bytes | bytearray | memoryview):
            return bytes(source)
        if self.kind == "image":
            return picture_file(source, self.called)
        return wav((source, rate) if isinstance(source, np.ndarray) else source, self.called)

    @property
    def what(self) -> str:
        """The name in the text of a message."""
        return self.name or WORDS[self.kind]

    @property
    def called(self) -> str:
        """The name in an error."""
        return self.name or self.place or WORDS[self.kind]


class Absent(NamedTuple):
    """A source of a saved conversation that cannot be read now: the hashes of its contents, and the reason."""

    files: tuple[str, ...]
    reason: str


class Located(NamedTuple):
    """A picture or a sound in the text of a message, whose name in brackets begins at `start`."""

    message: int
    start: int
    medium: Medium

    @property
    def text(self) -> str:
        return f"[{self.medium.what}]"


class MediaParts:
    """The pictures and sounds of one conversation, and their markers."""

    def __init__(self) -> None:
        self._number = secrets.token_hex(16)
        self._marker = re.compile(rf"<__media_{self._number}_(\d+)__>")
        self._media: list[Medium] = []
        self._unread: set[int] = set()  # those that the model gets as names

    def __bool__(self) -> bool:
        return len(self._media) > len(self._unread)

    def mark(self, medium: Medium) -> str:
        """Add a picture or a sound; return its marker."""
        self._media.append(medium)
        return f"<__media_{self._number}_{len(self._media) - 1}__>"

    def flattened(
        self,
        messages: Sequence[Mapping[str, Any]],
        check: Callable[[Medium], object] = lambda medium: None,
        whole: str = "the messages",
    ) -> list[Mapping[str, Any]]:
        """Return the messages with a text as content wherever the content has a picture or a sound.

        `check` raises an error for a medium that cannot be used. `whole` completes the name of an unnamed medium in
        errors: picture 2 of the messages.
        """
        seen = Counter[str]()
        return [self._flat(message, check, whole, seen) for message in messages]

    def _flat(
        self, message: Mapping[str, Any], check: Callable[[Medium], object], whole: str, seen: Counter[str]
    ) -> Mapping[str, Any]:
        parts = message.get("content")
        if not isinstance(parts, list | tuple) or not any(_is_medium(part) for part in parts):
            return message
        texts = []
        for part in parts:
            if _is_medium(part):
                seen[part["type"]] += 1
                medium = medium_of(part, place_of(part["type"], seen[part["type"]], whole)).loaded()
                check(medium)
                texts.append((self.mark(medium), True))
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                texts.append((part["text"], False))
            else:
                raise LocalLLMError(f"content has parts of type text, image or audio, got {part!r:.60}")
        return {**message, "content": joined_texts(texts)}

    def split(self, text: str, messages: Sequence[Mapping[str, Any]]) -> list[Text | Medium]:
        """Return the rendered `messages` as texts and media in turn, beginning with a text.

        Raises LocalLLMError if the template leaves out a picture or a sound.
        """
        whole, at, found, seen = marked(text), 0, list[Text | Medium](), set[int]()
        for match in self._marker.finditer(str.__str__(text)):
            number = int(match[1])
            found += [whole[at : match.start()], self._media[number]]
            seen.add(number)
            at = match.end()
        for number in self._in(messages):
            if number not in seen:
                what = self._media[number].called
                raise LocalLLMError(f"the chat template leaves out a message with {what}; give another template")
        return [*found, whole[at:]]

    def _in(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[int]:
        for message in messages:
            if isinstance(content := message.get("content"), str):
                yield from (int(match[1]) for match in self._marker.finditer(content))

    def located(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Located]]:
        """Return the messages with names as `shown` writes them, and the place of each name."""
        told, found = [], list[Located]()
        for number, message in enumerate(messages):
            content, text, at = message["content"], "", 0
            for match in self._marker.finditer(content):
                text += content[at : match.start()]
                found.append(Located(number, len(text), self._media[int(match[1])]))
                text, at = text + found[-1].text, match.end()
            told.append({**message, "content": text + content[at:]})
        return told, found

    def put_back(
        self, told: Sequence[Mapping[str, Any]], located: Sequence[Located], check: Callable[[Medium], object]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return messages with markers in place of the names at `located`, which are in order.

        The model gets the name of each that is absent, or that `check` refuses. The second result has the reasons.
        """
        messages, problems = [dict(message) for message in told], []
        for each in reversed(located):
            content, stop = messages[each.message]["content"], each.start + len(each.text)
            messages[each.message]["content"] = content[: each.start] + self.mark(each.medium) + content[stop:]
            if problem := _problem(each.medium, check):
                problems.append(problem)
                self._unread.add(len(self._media) - 1)
        return messages, problems[::-1]

    def readable(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return the messages with names in place of unread pictures and sounds."""
        if not self._unread:
            return messages

        def name(match: re.Match[str]) -> str:
            return f"[{self._media[int(match[1])].what}]" if int(match[1]) in self._unread else match[0]

        return [{**message, "content": self._marker.sub(name, message["content"])} for message in messages]

    def shown(self, text: str) -> str:
        """Return a text with a name in brackets in place of each marker, for people and for files."""
        return self._marker.sub(lambda match: f"[{self._media[int(match[1])].what}]", text)


def _problem(medium: Medium, check: Callable[[Medium], object]) -> str:
    if isinstance(medium.source, Absent):
        return f"{printable(medium.what, 100)}: {medium.source.reason}"
    try:
        check(medium)
    except LocalLLMError as error:
        return said(error)
    return ""


def joined_texts(texts: Iterable[tuple[str, bool]]) -> str:
    """Join texts and markers. A line break precedes a text, unless it follows a marker."""
    whole, behind = "", False
    for text, is_marker in texts:
        whole += ("\n" if whole and not is_marker and not behind else "") + text
        behind = is_marker
    return whole


def place_of(kind: Kind, number: int, whole: str) -> str:
    """Return the place of a picture or a sound for errors, such as "picture 2 of the request"."""
    return f"{WORDS[kind]} {number} of {whole}"


def placed_media(sources: Iterable[Any], whole: str, kinds: Iterable[Kind] | None = None) -> list[Medium]:
    """Return unnamed pictures and sounds. Their contents decide the kinds if `kinds` is missing."""
    found, seen = list[Medium](), Counter[str]()
    sources = list(sources)
    for source, kind in zip(sources, map(source_kind, sources) if kinds is None else kinds, strict=True):
        seen[kind] += 1
        found.append(Medium(kind, source, place=place_of(kind, seen[kind], whole)))
    return found


def medium_of(part: Mapping[str, Any], place: str = "") -> Medium:
    """Return the picture or sound of {"type": "image", "image": SOURCE}, and the same with "audio".

    SOURCE is a path, the bytes of a file, an array, or for pictures a PIL image; a sound in memory is (samples, rate).
    `place` is the name in errors of an unnamed one.
    """
    kind: Kind = part["type"]
    given = [part[key] for key in (kind, "path", "data") if part.get(key) is not None]
    if len(given) != 1:
        raise LocalLLMError(f'expected {{"type": "{kind}", "{kind}": a path, bytes or an array}}, got {part!r:.80}')
    return given[0] if isinstance(given[0], Medium) else Medium(kind, given[0], str(part.get("name") or ""), place)


def part_of(each: str | Medium) -> dict[str, Any]:
    """Return a text, a picture or a sound as a part of a message."""
    if isinstance(each, str):
        return {"type": "text", "text": each}
    return {"type": each.kind, each.kind: each.source, "name": each.name}


def of_marked(text: str, media: Sequence[Medium]) -> Iterator[str | Medium]:
    """Yield the texts of a prompt with `media` in place of each MARKER."""
    texts = text.split(MARKER)
    if len(texts) - 1 != len(media):
        counts = f"{len(texts) - 1} of {MARKER} and {len(media)} pictures and sounds"
        raise LocalLLMError(f"the prompt has {counts}; write one marker for each")
    for number, each in enumerate(texts):
        yield each
        if number < len(media):
            yield media[number]


def source_kind(source: Any) -> Kind:
    """Return what a source is, from an array or the beginning of a file; "image" if that does not tell."""
    if isinstance(source, tuple):
        return "audio"
    if isinstance(source, np.ndarray):
        return "audio" if source.dtype.kind == "f" else "image"
    if isinstance(source, bytes | bytearray | memoryview):
        return kind_of(bytes(source[:START])) or "image"
    return file_kind(source) or "image" if isinstance(source, str | os.PathLike) else "image"


def file_kind(path: str | os.PathLike[str]) -> Kind | None:
    """Return whether a file has a picture or a sound; None if its first bytes do not tell, or it cannot be read."""
    try:
        if not Path(path).is_file():
            return None
        with open_regular(path) as file:
            return kind_of(file.read(START))
    except (OSError, ValueError):  # a name that no file can have
        return None


def _is_medium(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in KINDS


def has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has a picture or a sound."""
    contents = (message.get("content") for message in messages)
    return any(_is_medium(part) for parts in contents if isinstance(parts, list | tuple) for part in parts)
