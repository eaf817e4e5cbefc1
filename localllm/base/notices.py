"""Notices and errors that name options. The Python API and the command line spell the same option differently.

    raise LocalLLMError(Notice("no card was found; use ", Setting("backend", "cpu")))

As a string, a notice uses Python's spelling, `backend="cpu"`. The command line writes `--backend cpu` instead. Every
package may import this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Placeholder(str):
    """A value that the reader chooses, such as N or FILE. It is written without quotes."""


N, FILE = Placeholder("N"), Placeholder("FILE")


class Setting(NamedTuple):
    """An option by its field name, with a value. None names only the option."""

    name: str
    value: Any = None

    def __str__(self) -> str:
        if self.value is None:
            return self.name
        quoted = isinstance(self.value, str) and not isinstance(self.value, Placeholder)
        return f'{self.name}="{self.value}"' if quoted else f"{self.name}={self.value}"


class Together(tuple[Setting, ...]):
    """Several options that must be given together."""


class Written(NamedTuple):
    """A value as written in Python and on a command line."""

    python: str
    typed: str


Span = str | Setting | Together | Written


class NotUsed(UserWarning):
    """A requested option has no effect. The message, a `Notice`, gives the reason."""


class BeyondTraining(UserWarning):
    """The requested context is longer than the model's training context."""


class Notice(str):
    """A text composed of strings, options (`Setting`, `Together`), values (`Written`), and other messages."""

    parts: tuple[Span, ...]

    def __new__(cls, *parts: Span) -> Notice:
        flat: list[Span] = []
        for part in parts:
            flat += part.parts if isinstance(part, Notice) else [part]
        made = super().__new__(cls, _joined(flat, str, ", ", 0))
        made.parts = tuple(flat)
        return made

    def typed(self, spell: Callable[[Setting], str]) -> str:
        """Return the text for a command line, with every option formatted by `spell`."""
        return _joined(self.parts, spell, " ", 1)


def said(error: BaseException) -> str:
    """Return the text of an error, for use in another message. It stays a `Notice` if it names options."""
    first = error.args[0] if error.args else None
    return first if isinstance(first, Notice) else str(error)


def _joined(parts: Iterable[Span], spell: Callable[[Setting], str], between: str, written: int) -> str:
    texts = []
    for part in parts:
        match part:
            case Together():
                texts.append(between.join(spell(each) for each in part))
            case Setting():
                texts.append(spell(part))
            case Written():
                texts.append(part[written])
            case _:
                texts.append(part)
    return "".join(texts)
