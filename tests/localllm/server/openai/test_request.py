"""Messages, tools and thinking of chat completions, converted to the service's requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localllm.server.openai.chat import ChatBody, read_chat
from localllm.server.turn import Thinking, Turn
from tests.localllm.server.openai.support import USER, fields


def turn(**body: Any) -> Turn:
    return read_chat(fields(ChatBody, **{"messages": USER, **body}), "")


def weather(name: str = "weather") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


# -- messages --------------------------------------------------------------------------------------------------------


def test_messages_have_texts_and_the_roles_of_templates() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    given = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": parts, "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
        {"role": "assistant", "content": "it is 7", "reasoning_content": "hm", "refusal": None},
        {"role": "user", "content": ""},
    ]
    assert turn(messages=given).messages == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "assistant", "content": "it is 7", "reasoning_content": "hm"},
        {"role": "user", "content": ""},
    ]


def test_older_and_neighbouring_forms_of_calls() -> None:
    given = [
        *USER,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "reasoning": "so", "tool_calls": [{"function": {"name": "g", "arguments": {"x": "ü"}}}]},
        {"role": "tool", "content": "2", "tool_call_id": "call_0"},
    ]
    found = turn(messages=given).messages
    assert found[1]["tool_calls"][0]["id"] == found[2]["tool_call_id"]
    assert found[2]["role"] == "tool"
    assert found[3]["reasoning_content"] == "so"
    call = found[3]["tool_calls"][0]
    assert call["id"] == "call_0"
    assert json.loads(call["function"]["arguments"]) == {"x": "ü"}


# -- continuing the last message -------------------------------------------------------------------------------------

PREFILLED = [*USER, {"role": "assistant", "content": "Well"}]


@pytest.mark.parametrize(
    ("body", "continued"),
    [
        ({"messages": USER}, False),
        ({"messages": PREFILLED}, True),
        ({"messages": PREFILLED, "continue_final_message": True, "add_generation_prompt": False}, True),
        ({"messages": PREFILLED, "continue_final_message": "content"}, True),
        ({"messages": PREFILLED, "continue_final_message": False}, False),
        ({"messages": PREFILLED, "add_generation_prompt": True}, False),
    ],
)
def test_an_answer_continues_the_assistants_last_message(body: dict[str, Any], continued: bool) -> None:
    assert turn(**body).continued is continued


def test_add_generation_prompt_reaches_the_template() -> None:
    assert turn(add_generation_prompt=False).template_variables == {"add_generation_prompt": False}


# -- tools -----------------------------------------------------------------------------------------------------------


def test_tools_keep_what_templates_read() -> None:
    extra = weather() | {"cache_control": {}}
    bare = {"type": "function", "function": {"name": "now"}}
    found = turn(tools=[extra, bare])
    assert found.tools == (
        weather(),
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    )
    assert (found.tool_choice, found.forced_tool, found.parallel_calls) == ("auto", "", True)


@pytest.mark.parametrize(
    ("choice", "wanted", "forced", "names"),
    [
        ("none", "none", "", ["a", "b"]),
        ("required", "required", "", ["a", "b"]),
        ({"type": "function", "function": {"name": "b"}}, "required", "b", ["a", "b"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [weather("b")]}}, "auto", "", ["b"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [weather("a")]}},
            "required",
            "",
            ["a"],
        ),
    ],
)
def test_the_choice_of_tools(choice: Any, wanted: str, forced: str, names: list[str]) -> None:
    found = turn(tools=[weather("a"), weather("b")], tool_choice=choice, parallel_tool_calls=False)
    assert (found.tool_choice, found.forced_tool) == (wanted, forced)
    assert [tool["function"]["name"] for tool in found.tools] == names
    assert found.parallel_calls is False


def test_functions_are_tools_of_which_one_is_called() -> None:
    body = fields(ChatBody, messages=USER, functions=[weather()["function"]], function_call={"name": "weather"})
    found = read_chat(body, "")
    assert found.tools == (weather(),)
    assert (found.tool_choice, found.forced_tool) == ("required", "weather")
    assert found.parallel_calls is False
    assert body.legacy
    assert turn(functions=[weather()["function"]], function_call="none").tool_choice == "none"


# -- thinking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, Thinking()),
        ({"reasoning_effort": "none"}, Thinking(False)),
        ({"reasoning_effort": "minimal"}, Thinking(True, "low")),
        ({"reasoning_effort": "high"}, Thinking(True, "high")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Thinking(False)),
        ({"enable_thinking": True, "thinking_budget_tokens": 100}, Thinking(True, "", 100)),
        ({"thinking": {"type": "disabled"}}, Thinking(False)),
        ({"thinking": {"type": "auto"}, "thinking_budget_tokens": -1}, Thinking()),
        ({"reasoning_format": "deepseek", "reasoning_budget_tokens": 0}, Thinking(None, "", 0, False)),
        ({"reasoning_format": "auto"}, Thinking()),
        ({"reasoning_format": "none", "reasoning_effort": "low"}, Thinking(True, "low", None, True)),
    ],
)
def test_thinking(body: dict[str, Any], expected: Thinking) -> None:
    assert turn(**body).thinking == expected


def test_calls_may_stay_in_the_content() -> None:
    assert not turn().calls_inline
    assert turn(parse_tool_calls=False).calls_inline


def test_variables_of_the_template() -> None:
    assert turn(chat_template_kwargs={"date": "today"}).template_variables == {"date": "today"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"n_probs": 3}, 3),
        ({"n_probs": 0}, None),
    ],
)
def test_logprobs(body: dict[str, Any], expected: int | None) -> None:
    assert turn(**body).generation.logprobs == expected
