"""Options of an answer, except sampling options."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from localllm.base.files.regular import read_text
from localllm.base.notices import Notice, Written
from localllm.options.declare import Options, option
from localllm.options.kinds import JSON, Kind, OptionError, checked, integer

if TYPE_CHECKING:
    from localllm.options.structure import ConstraintSpec, Structure
    from localllm.options.thinking import Thinking


_MOST = 2**63 - 1  # maximum of a token limit; clients send their largest integer to mean "no limit"


def _limit(text: str) -> int | None:
    count: int = integer(-2, _MOST).read(text)
    return count if count >= 0 else None


def _allowed(value: Any) -> bool:
    return value is None or not integer(0, _MOST).problem(value)


def _stop(text: str) -> str:
    if not text:
        raise OptionError("a stop string is empty and would stop every answer at once; remove it")
    return text


def _stops(value: Any) -> bool:
    texts = (value,) if isinstance(value, str) else value
    return isinstance(texts, Sequence) and all(isinstance(text, str) and text for text in texts)


def content(name: str | os.PathLike[str], what: str) -> str:
    """Return the text of a file."""
    try:
        text = read_text(name, _MOST_FILE, "strict")
    except (OSError, ValueError) as error:
        raise OptionError(f"{name}: the {what} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not text.strip():
        raise OptionError(f"{name}: the {what} is empty")
    return text


def _read_schema(text: str) -> dict[str, Any]:
    """Parse a JSON schema, given as a file name or as JSON."""
    import json

    source = text if text.lstrip().startswith("{") else content(text, "JSON schema")
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{text}: the JSON schema is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise OptionError(f"{text}: the JSON schema is not a JSON object")
    return value


def _is_schema(value: Any) -> bool:
    named = isinstance(value, str | os.PathLike) and bool(os.fspath(value))
    return value is None or named or JSON.problem(value) == ""


def _is_source(text: str) -> bool:
    """Return whether a text is a grammar rather than a file name."""
    return "::=" in text or "\n" in text or text.lstrip().startswith("start:")


def _think(text: str) -> bool | int | str | None:
    if text == "auto":
        return None
    if text in ("on", "off"):
        return text == "on"
    try:
        value: bool | int | str = int(text)
    except ValueError:
        value = text
    if not _thinks(value) or value == "":
        raise OptionError(f"{text!r} is not one of on, off, {', '.join(EFFORTS)}, or a number of tokens")
    return value


def _thinks(value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return True
    return value in EFFORTS if isinstance(value, str) else isinstance(value, int) and value >= 0


_MOST_FILE = 1 << 20  # maximum characters of a schema or grammar file
EFFORTS = ("low", "medium", "high")
SCHEMA = Kind(str, checked(_is_schema, "a dict, or the name of a file with JSON"), "FILE")
THINK = Kind(_think, checked(_thinks, f"True, False, a number of tokens, or one of {', '.join(EFFORTS)}"), "HOW")
LIMIT = Kind(_limit, checked(_allowed, "a whole number from 0 up, or None for no limit"), "N")
STOP = Kind(_stop, checked(_stops, "a text, or several, none of them empty"))


@dataclass(frozen=True, slots=True)
class AnswerOptions(Options):
    """Options of an answer: the instructions or text before it, and the conditions that end it."""

    TITLE: ClassVar[str] = "Answer"
    max_tokens: int | None = option(
        None, "-n", "--predict", "--n-predict", kind=LIMIT, unit="tokens",
        shown=Notice(Written("no limit", "-1")), help=Notice("maximum answer length", Written("", " (-1: no limit)")),
    )  # fmt: skip
    system_prompt: str = option("", "-sys", "--system-prompt", "--system", help="instructions before the conversation")
    stop: str | Sequence[str] = option(
        (), "-r", "--reverse-prompt", "--stop", kind=STOP, repeat=True,
        help=Notice("stop the answer before this text (", Written("or the first of several", "repeatable"), ")"),
    )  # fmt: skip
    ignore_eos: bool = option(False, "--ignore-eos", help="continue past the end-of-text token")
    parse_special_in_content: bool = option(
        False, "--parse-special-in-content", help="interpret control tokens in messages (unsafe)"
    )
    chat_template_kwargs: Mapping[str, Any] = option(
        {}, "--chat-template-kwargs", kind=JSON,
        help=Notice(
            "variables of the chat template, such as ",
            Written('{"enable_thinking": False}', '{"enable_thinking": false}'),
        ),
    )  # fmt: skip

    think: bool | int | str | None = option(
        None, "--think", kind=THINK,
        help=Notice(
            "thinking before the answer: ",
            Written(
                'True, False, a maximum of tokens, or "low", "medium" or "high"',
                "on, off, a maximum of N tokens, low, medium or high",
            ),
            " (if the model supports it)",
        ),
    )  # fmt: skip
    json_schema: Mapping[str, Any] | str | os.PathLike[str] | None = option(
        None, "--json-schema", "-jf", "--json-schema-file", kind=SCHEMA, offers="files",
        help="constrain the answer to a JSON schema",
    )  # fmt: skip
    grammar: str = option(
        "", "--grammar", "--grammar-file", metavar="FILE", offers="files",
        help="constrain the answer to a grammar in GBNF or Lark",
    )  # fmt: skip

    @property
    def structure(self) -> Structure | None:
        """The required structure of the answer, or None. Raises OptionError if both a schema and a grammar are
        given."""
        from localllm.options.structure import Structure

        if self.json_schema is not None and self.grammar:
            raise OptionError("json_schema and grammar are both given; an answer can match one of them")
        if self.grammar:
            source = self.grammar if _is_source(self.grammar) else content(self.grammar, "grammar")
            return Structure(gbnf=source) if "::=" in source else Structure(lark=source)
        if self.json_schema is None or isinstance(self.json_schema, Mapping):
            return Structure(schema=self.json_schema) if self.json_schema is not None else None
        return Structure(schema=_read_schema(os.fspath(self.json_schema)))

    @property
    def asked(self) -> ConstraintSpec:
        """The constraints on an answer to messages. Raises OptionError under the same conditions as `structure`."""
        from localllm.options.structure import ConstraintSpec

        return ConstraintSpec(self.structure, reasoning_tokens=self.thinking.budget)

    @property
    def thinking(self) -> Thinking:
        """The reasoning options."""
        from localllm.options.thinking import Thinking

        return Thinking.of(self.think)

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template: from the reasoning options, and given by name."""
        return {**self.thinking.variables, **self.chat_template_kwargs}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
