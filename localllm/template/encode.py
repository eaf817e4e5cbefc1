"""Encode a rendered conversation: control tokens only count if the template itself wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from localllm.template.formats import find_format
from localllm.template.origin import MODEL, OWN, marked

if TYPE_CHECKING:
    from localllm.tokenizer.tokenizer import SpecialGuard


class ChatTokenizer(Protocol):
    """The part of a tokenizer's interface that is needed here."""

    @property
    def bos(self) -> int | None: ...
    @property
    def add_bos(self) -> bool: ...
    @property
    def special(self) -> Mapping[str, int]: ...
    def is_control(self, token: int) -> bool: ...
    def encode(
        self, text: str, add_special: bool = True, parse_special: bool = False, guard: SpecialGuard | None = None
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class _Origins:
    """The special tokens that count at each position of a text."""

    marks: bytes
    tokens: Set[int]  # control tokens, and user-defined tokens that the template writes
    answers: Set[int]  # markers of reasoning and calls among them

    def allows(self, token: int, start: int, stop: int) -> bool:
        """Return whether `token` at [start, stop) counts; the least trusted part of that text decides."""
        origin = min(self.marks[start:stop])
        return origin == OWN or token in (self.answers if origin == MODEL else ()) or token not in self.tokens


class ChatEncoder:
    """Encodes conversations rendered by the template with this source.

    A control token in the text of a user, system message, tool, name or schema is plain text. So are user-defined
    tokens that the template writes. In the assistant's messages, the markers of reasoning and calls count, such as
    `<tool_call>`; markers of turns and roles do not. Other user-defined tokens, such as runs of spaces or emoticons,
    count everywhere. With `parse_content` all special tokens count everywhere.
    """

    def __init__(self, tokenizer: ChatTokenizer, source: str, parse_content: bool = False) -> None:
        self._tokenizer, self._parse_content = tokenizer, parse_content
        special = tokenizer.special
        control = frozenset(token for token in special.values() if tokenizer.is_control(token))
        written = frozenset(
            token
            for text, token in special.items()
            if token not in control and text.strip(" \t\r\n\u2581") and text in source
        )
        self._tokens, self._answers = control | written, written & find_format(source).visible(special)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered conversation, with BOS if the file requires it. A plain string is user text.

        EOS is never added. If both the template writes BOS and the file adds it, there is still only one.
        """
        origins = _Origins(marked(text).marks, self._tokens, self._answers)
        guard = None if self._parse_content else origins
        tokenizer = self._tokenizer
        plain = str.__str__(text)  # slicing a marked text is slow
        ids = tokenizer.encode(plain, add_special=False, parse_special=True, guard=guard)
        if tokenizer.add_bos and tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
            ids.insert(0, tokenizer.bos)
        return ids


def encode_chat(tokenizer: ChatTokenizer, text: str, source: str = "") -> list[int]:
    """Return the ids of a conversation rendered by a template with this source."""
    return ChatEncoder(tokenizer, source).encode(text)
