"""Answer events carry the parsed parts of their text."""

from __future__ import annotations

import pytest

from localllm.generation.parts import CallArguments, CallStart, Content, Part, Reasoning
from localllm.generation.request import Finished, Prefilled, Reason, Started, Token
from localllm.generation.statistics import Usage
from localllm.output.reader import AnswerReader, with_parts
from localllm.template.formats import find_format
from tests.localllm.output.support import tool

HERMES = '{{ tools }}<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call> <think>'
TOOL = tool({"type": "object", "properties": {}}, "add")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def read(text: str, reason: Reason, held: str = "") -> tuple[list[Part], Finished]:
    """Return the parts of an answer with one token per character, and its final event."""
    reader = AnswerReader(find_format(HERMES), [TOOL], make_id=lambda: "id")
    events = [Token(number, letter, choice=2) for number, letter in enumerate(text)]
    read = [with_parts(event, reader) for event in [*events, Finished(reason, held, Usage(), choice=2)]]
    parts: list[Part] = []
    for event in read:
        assert isinstance(event, Token | Finished)
        assert event.choice == 2
        parts += event.parts
    last = read[-1]
    assert isinstance(last, Finished)
    return parts, last


def joined(parts: list[Part]) -> dict[str, str]:
    found = {"content": "", "reasoning": "", "arguments": "", "names": ""}
    for part in parts:
        match part:
            case Content(text):
                found["content"] += text
            case Reasoning(text):
                found["reasoning"] += text
            case CallArguments(_, text):
                found["arguments"] += text
            case CallStart(_, _, name):
                found["names"] += name
    return found


def test_parts_come_with_the_token_that_completes_them() -> None:
    parts, end = read("<think>so</think>ok", "length", held="!")
    assert joined(parts) == {"content": "ok!", "reasoning": "so", "arguments": "", "names": ""}
    assert (end.reason, end.text) == ("length", "!")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("end", "tool_calls"), ("stop", "tool_calls"), ("length", "length"), ("context", "context"),
     ("cancelled", "cancelled")],
)  # fmt: skip
def test_an_answer_that_called_tools_ends_for_that(reason: Reason, expected: str) -> None:
    parts, end = read(CALL, reason)
    assert joined(parts)["names"] == "add"
    assert end.reason == expected
    assert read("no call", reason)[1].reason == reason


def test_without_a_reader_all_text_is_content() -> None:
    token, end = Token(7, "<think>"), Finished("end", "x", Usage())
    assert with_parts(token, None) == Token(7, "<think>", parts=(Content("<think>"),))
    assert with_parts(end, None) == Finished("end", "x", Usage(), parts=(Content("x"),))


@pytest.mark.parametrize("event", [Started(5, 2), Prefilled(5), Token(7, ""), Finished("end", "", Usage())])
def test_what_has_no_text_stays_as_it_is(event: Started | Prefilled | Token | Finished) -> None:
    assert with_parts(event, None) is event
