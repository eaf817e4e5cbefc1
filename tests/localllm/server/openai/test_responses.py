"""The input of /v1/responses: items that become messages, tools, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localllm.generation.request import Started
from localllm.server.openai.responses.routes import ResponseBody, ResponseRequest, read_response
from localllm.server.turn import Structure, Thinking
from tests.localllm.server.openai.support import fields, ok
from tests.localllm.server.scripted import ScriptedService, called, done

ADD = {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
FILES = {
    "type": "namespace",
    "name": "files",
    "description": "d",
    "tools": [{"type": "function", "name": "read", "parameters": None}, {"type": "custom", "name": "write"}],
}


def asked(**body: Any) -> ResponseRequest:
    return read_response(fields(ResponseBody, **{"input": "Hi", **body}), "")


def text(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


# -- input -----------------------------------------------------------------------------------------------------------


def test_a_text_and_instructions() -> None:
    turn = asked(instructions="Be short.").turn
    assert turn.messages == [text("system", "Be short."), text("user", "Hi")]


def test_the_items_of_an_agent() -> None:
    """Codex sends one turn as separate items: reasoning, text and two calls. These items become one assistant
    message.
    """
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"role": "user", "content": "fix it"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "first"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Looking", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "x\n"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "then"}]},
        {"type": "function_call", "call_id": "c3", "namespace": "files", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
    ]
    assert asked(input=items).turn.messages == [
        text("system", "rules"),
        text("user", "fix it"),
        text("assistant", "Looking")
        | {
            "reasoning_content": "first",
            "tool_calls": [call("c1", "add", '{"a":1}'), call("c2", "apply_patch", '{"input": "x\\n"}')],
        },
        text("tool", "2") | {"tool_call_id": "c1"},
        text("tool", "ok") | {"tool_call_id": "c2"},
        text("assistant", "") | {"reasoning_content": "then", "tool_calls": [call("c3", "files__read", "{}")]},
        text("tool", "") | {"tool_call_id": "c3"},
    ]


def test_calls_of_built_in_tools_that_the_client_ran_are_kept() -> None:
    items = [
        text("user", "ls"),
        {"type": "local_shell_call", "id": "l1", "call_id": "c1", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c1", "output": "a b"},
        {"type": "web_search_call", "id": "w1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "shell_call_output", "call_id": "c2", "output": [{"stdout": "a", "outcome": {}}]},
    ]
    found = asked(input=items).turn.messages
    assert found[1]["tool_calls"] == [call("c1", "local_shell", '{"action": {"command": ["ls"]}}')]
    assert found[2] == text("tool", "a b") | {"tool_call_id": "c1"}
    assert json.loads(found[3]["content"]) == [{"stdout": "a", "outcome": {}}]
    assert len(found) == 4


def test_new_thoughts_start_a_new_message() -> None:
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}
    found = asked(input=[text("user", "a"), text("assistant", "b"), thoughts, text("assistant", "c")]).turn.messages
    assert found[1:] == [text("assistant", "b"), text("assistant", "c") | {"reasoning_content": "t"}]


def test_the_assistants_last_text_is_continued() -> None:
    assert asked(input=[text("user", "a"), text("assistant", "b")]).turn.continued
    assert not asked(input=[text("user", "a")]).turn.continued


def test_the_other_fields() -> None:
    schema = {"type": "object"}
    turn = asked(
        max_output_tokens=9,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
        temperature=0.5,
        parallel_tool_calls=False,
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        top_logprobs=3,
        prompt_cache_key="k",
        store=True,
        n=4,
    ).turn
    assert turn.generation.max_tokens == 9
    assert turn.generation.structure == Structure(schema=schema)
    assert turn.generation.sampling == {"temperature": 0.5}
    assert (turn.generation.logprobs, turn.generation.n, turn.generation.client) == (3, 1, "/k")
    assert turn.thinking == Thinking(True, "low")
    assert turn.parallel_calls is False


# -- tools -----------------------------------------------------------------------------------------------------------


def test_functions_custom_tools_and_namespaces_are_kept_and_others_skipped() -> None:
    tools = [ADD, {"type": "web_search"}, PATCH, FILES, {"type": "local_shell"}, {"type": "mcp", "server_label": "x"}]
    found = asked(tools=tools)
    functions = [tool["function"] for tool in found.turn.tools]
    assert [function["name"] for function in functions] == ["add", "apply_patch", "files__read", "files__write"]
    assert functions[0]["parameters"] == ADD["parameters"]
    assert functions[1]["parameters"]["required"] == ["input"]
    assert 'start: "x"' in functions[1]["description"]
    assert found.tools["files__write"].custom
    assert (found.tools["files__read"].namespace, found.tools["files__read"].name) == ("files", "read")


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    (tool,) = asked(tools=[{"type": "custom", "name": "run", "description": "Run.", "format": regex}]).turn.tools
    assert tool == {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run.\n\nThe input must match this regex grammar:\na+",
            "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
        },
    }


def test_tools_among_the_items() -> None:
    items = [text("user", "x"), {"type": "additional_tools", "role": "developer", "tools": [ADD]}]
    found = asked(input=items, tool_choice={"type": "function", "name": "add"}).turn
    assert found.forced_tool == "add"
    assert found.messages == [text("user", "x")]


@pytest.mark.parametrize(
    ("choice", "wanted", "forced", "names"),
    [
        ("none", "none", "", ["add", "apply_patch"]),
        ("required", "required", "", ["add", "apply_patch"]),
        ({"type": "custom", "name": "apply_patch"}, "required", "apply_patch", ["add", "apply_patch"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "add"}, {"type": "web_search"}],
            },
            "required",
            "",
            ["add"],
        ),
    ],
)
def test_the_choice_of_tools(choice: Any, wanted: str, forced: str, names: list[str]) -> None:
    found = asked(tools=[ADD, PATCH], tool_choice=choice).turn
    assert (found.tool_choice, found.forced_tool) == (wanted, forced)
    assert [tool["function"]["name"] for tool in found.tools] == names


@pytest.mark.parametrize("written", ["[1]", '{"input": 5}', '{"other": 1}', "{", ""])
def test_a_custom_tool_gets_what_the_model_wrote(written: str) -> None:
    steps = [Started(5, 0), *called("apply_patch", written), done("tool_calls")]
    (item,) = ok(ScriptedService(steps), "/v1/responses", input="Hi", tools=[PATCH])["output"]
    assert item["input"] == {'{"input": 5}': "5"}.get(written, written)
