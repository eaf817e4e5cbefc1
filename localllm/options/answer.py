"""Options of an answer, except sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from localllm.notice import Notice, Written
from localllm.options.declare import Options, option
from localllm.options.kinds import JSON, Kind, OptionError, checked, whole


def _limit(text: str) -> int | None:
    count: int = whole(-2).read(text)
    return count if count >= 0 else None


def _allowed(value: Any) -> bool:
    return value is None or not whole(0).problem(value)


def _stop(text: str) -> str:
    if not text:
        raise OptionError("a stop string is empty and would stop every answer at once; remove it")
    return text


def _stops(value: Any) -> bool:
    texts = (value,) if isinstance(value, str) else value
    return isinstance(texts, Sequence) and all(isinstance(text, str) and text for text in texts)


LIMIT = Kind(_limit, checked(_allowed, "a whole number from 0 up, or None for no limit"), "N")
STOP = Kind(_stop, checked(_stops, "a text, or several, none of them empty"))


@dataclass(frozen=True, slots=True)
class AnswerOptions(Options):
    """Options of an answer: the text before it, and the conditions that end it."""

    TITLE: ClassVar[str] = "Answer"
    max_tokens: int | None = option(
        None, "-n", "--predict", "--n-predict", kind=LIMIT, unit="tokens",
        shown=Notice(Written("no limit", "-1")), help=Notice("maximum answer length", Written("", " (-1: no limit)")),
    )  # fmt: skip
    system_prompt: str = option("", "-sys", "--system-prompt", help="instructions before the conversation")
    stop: str | Sequence[str] = option(
        (), "-r", "--reverse-prompt", kind=STOP, repeat=True,
        help=Notice("stop the answer before this text (", Written("or the first of several", "repeatable"), ")"),
    )  # fmt: skip
    ignore_eos: bool = option(False, "--ignore-eos", help="continue past the end-of-text token")
    parse_special_in_content: bool = option(
        False, "--parse-special-in-content", help="read control tokens in messages (unsafe)"
    )
    chat_template_kwargs: Mapping[str, Any] = option(
        {}, "--chat-template-kwargs", kind=JSON,
        help=Notice(
            "variables of the chat template, such as ",
            Written('{"enable_thinking": False}', '{"enable_thinking": false}'),
        ),
    )  # fmt: skip

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
