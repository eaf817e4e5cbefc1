"""Encodes a rendered conversation: control tokens only count if the template itself wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from localllm.template.formats import find_format
from localllm.template.origin import MODEL, OWN, marked

if TYPE_CHECKING:
    from localllm.tokenizer.tokenizer import SpecialGuard


class ChatTokenizer(Protocol):
    """The tokenizer interface that this module needs."""

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
    """Decides which special tokens count at each position of a text."""

    marks: bytes
    tokens: Set[int]  # control tokens, and user-defined tokens that occur in the template
    answers: Set[int]  # the subset of `tokens` that are markers of reasoning and calls

    def allows(self, token: int, start: int, stop: int) -> bool:
        """Return whether `token` at [start, stop) counts; the least trusted character in the range decides."""
        origin = min(self.marks[start:stop])
        return origin == OWN or token in (self.answers if origin == MODEL else ()) or token not in self.tokens


class ChatEncoder:
    """Encodes conversations rendered by the template with this source.

    A control token in the text of a user, system message, tool, name or schema is encoded as plain text. The same
    applies to user-defined tokens that the template writes. In the assistant's messages, the markers of reasoning and
    calls count, such as `<tool_call>`, but not the markers of turns and roles. Other user-defined tokens, such as runs
    of spaces or emoticons, count everywhere. With `parse_content` all special tokens count everywhere.
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

    def encode(self, text: str, first: bool = True) -> list[int]:
        """Return the ids of a rendered conversation, with BOS if the GGUF requires it. A plain string is user text.

        EOS is never added. If the template writes BOS and the GGUF also adds it, it occurs only once. Without `first`,
        the text follows a picture or a sound, and BOS is not added.
        """
        origins = _Origins(marked(text).marks, self._tokens, self._answers)
        guard = None if self._parse_content else origins
        tokenizer = self._tokenizer
        plain = str.__str__(text)  # slicing a `Text` is slow
        ids = tokenizer.encode(plain, add_special=False, parse_special=True, guard=guard)
        if first and tokenizer.add_bos and tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
            ids.insert(0, tokenizer.bos)
        return ids


def encode_chat(tokenizer: ChatTokenizer, text: str, source: str = "") -> list[int]:
    """Return the ids of a conversation rendered by a template with this source."""
    return ChatEncoder(tokenizer, source).encode(text)
