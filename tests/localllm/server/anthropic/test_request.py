"""Anthropic's messages, tools and thinking, converted to the service's requests."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.server.anthropic.answers import MessageBody, read_message
from localllm.server.turn import Structure, Thinking, Turn
from tests.localllm.server.openai.support import USER, fields

TOOL = {"name": "add", "description": "d", "input_schema": {"type": "object", "properties": {"a": {}}}}
USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}


def turn(**body: Any) -> Turn:
    return read_message(fields(MessageBody, **{"messages": USER, "max_tokens": 9, **body}), "").turn


def test_the_conversation_of_an_agent() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    found = turn(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=a5145;"},
            {"type": "text", "text": "You are an agent."} | mark,
            {"type": "text", "text": "Be short."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "<hint>"}, {"type": "text", "text": "Add."} | mark]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Now"},
                    USE,
                    USE | {"id": "t2"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "2"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no"}],
                    },
                    {"type": "text", "text": "go on\n<total_tokens>99 tokens left</total_tokens>"},
                ],
            },
        ],
    )
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert found.messages == [
        {"role": "system", "content": "You are an agent.\nBe short."},
        {"role": "user", "content": "<hint>\nAdd."},
        {
            "role": "assistant",
            "content": "Now",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1"} | call, {"id": "t2"} | call],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": "go on\n"},
    ]
    assert not found.continued


def test_marks_for_the_cache_and_billing_headers_do_not_change_a_prompt() -> None:
    def messages(checksum: str, marked: int) -> Any:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in ("a", "b")]
        blocks[marked] |= {"cache_control": {"type": "ephemeral"}}
        system = f"x-anthropic-billing-header: cc_version=2; cch={checksum};\nRules"
        return turn(system=system, messages=[{"role": "user", "content": blocks}]).messages

    assert messages("a5145", 0) == messages("0fe31", 1)


def test_messages_of_one_role_are_joined() -> None:
    given = [
        *USER,
        {"role": "user", "content": "there"},
        {"role": "assistant", "content": "A"},
        {"role": "assistant", "content": [{"type": "text", "text": "B"}]},
    ]
    found = turn(messages=given)
    assert [message["content"] for message in found.messages] == ["Hi\nthere", "A\nB"]
    assert found.continued


def test_results_of_tools_without_content_and_search_results() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "t1"},
        {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "found"}]},
    ]
    found = turn(messages=[{"role": "user", "content": blocks}]).messages
    assert found == [
        {"role": "tool", "tool_call_id": "t1", "content": ""},
        {"role": "user", "content": "T\nS\nfound"},
    ]


# -- tools -----------------------------------------------------------------------------------------------------------


def test_tools_of_the_client_are_kept_and_anthropics_skipped() -> None:
    found = turn(tools=[TOOL | {"cache_control": {}}, {"type": "web_search_20250305", "name": "web_search"}])
    function = {"name": "add", "description": "d", "parameters": TOOL["input_schema"]}
    assert found.tools == ({"type": "function", "function": function},)


@pytest.mark.parametrize(
    ("choice", "wanted", "forced", "parallel"),
    [
        (None, "auto", "", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", "", False),
        ({"type": "any"}, "required", "", True),
        ({"type": "tool", "name": "add"}, "required", "add", True),
        ({"type": "none"}, "none", "", True),
    ],
)
def test_the_choice_of_tools(choice: Any, wanted: str, forced: str, parallel: bool) -> None:
    found = turn(tools=[TOOL], tool_choice=choice)
    assert (found.tool_choice, found.forced_tool, found.parallel_calls) == (wanted, forced, parallel)


# -- other fields ----------------------------------------------------------------------------------------------------


def test_generation() -> None:
    schema = {"type": "object"}
    found = turn(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["END"],
        metadata={"user_id": "u"},
        output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "max"},
        service_tier="auto",
        container=None,
    )
    assert found.generation.sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    assert (found.generation.max_tokens, found.generation.stops, found.generation.client) == (9, ("END",), "/u")
    assert found.generation.structure == Structure(schema=schema)
    assert found.thinking == Thinking(None, "high")


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, Thinking()),
        ({"type": "enabled", "budget_tokens": 2048}, Thinking(True, "", 2048)),
        ({"type": "adaptive"}, Thinking()),
        ({"type": "disabled"}, Thinking(False)),
    ],
)
def test_thinking(thinking: Any, expected: Thinking) -> None:
    assert turn(thinking=thinking).thinking == expected
