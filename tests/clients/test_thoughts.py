"""Reasoning and tool calls in all four APIs, with and without streaming. Reasoning is returned separately,
and a request can continue it.

The answers are raw output of a model of the Hermes family, and the requests are plain HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.clients.conftest import NAME, Server
from tests.clients.plans import Call, calls, plan, says

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
MENTIONED = f"The format would be {CALL} but I must not."


@dataclass
class Heard:
    """The parts of an answer that a client received."""

    thought: str = ""
    said: str = ""
    called: list[Any] = field(default_factory=list)  # arguments of the tool calls


def events(body: str) -> Iterator[Any]:
    for line in body.splitlines():
        if line.startswith(("data: {", "{")):
            yield json.loads(line.removeprefix("data: "))


def openai(body: str) -> Heard:
    heard, arguments = Heard(), dict[int, str]()
    for event in events(body):
        for choice in event["choices"]:
            part = choice["delta"] if "delta" in choice else choice["message"]
            heard.thought += part.get("reasoning_content") or ""
            heard.said += part.get("content") or ""
            for at, call in enumerate(part.get("tool_calls") or ()):
                at = call.get("index", at)
                arguments[at] = arguments.get(at, "") + call["function"]["arguments"]
    heard.called = [json.loads(text) for text in arguments.values()]
    return heard


def responses(body: str) -> Heard:
    heard, arguments = Heard(), dict[int, str]()
    for event in events(body):
        kind = event.get("type", "")
        heard.thought += event["delta"] if kind == "response.reasoning_text.delta" else ""
        heard.said += event["delta"] if kind == "response.output_text.delta" else ""
        if kind == "response.function_call_arguments.delta":
            arguments[event["output_index"]] = arguments.get(event["output_index"], "") + event["delta"]
        for item in event.get("output", ()):  # a response without streaming
            text = "".join(part["text"] for part in item.get("content") or ())
            heard.thought += text if item["type"] == "reasoning" else ""
            heard.said += text if item["type"] == "message" else ""
            heard.called += [json.loads(item["arguments"])] if item["type"] == "function_call" else []
    heard.called += [json.loads(text) for text in arguments.values()]
    return heard


def anthropic(body: str) -> Heard:
    heard, arguments = Heard(), dict[int, str]()
    for event in events(body):
        for block in event.get("content", ()):
            heard.thought += block.get("thinking", "")
            heard.said += block.get("text", "")
            heard.called += [block["input"]] if block["type"] == "tool_use" else []
        delta = event.get("delta") or {}
        heard.thought += delta.get("thinking", "")
        heard.said += delta.get("text", "")
        if "partial_json" in delta:
            arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
    heard.called += [json.loads(text) for text in arguments.values()]
    return heard


def ollama(body: str) -> Heard:
    heard = Heard()
    for event in events(body):
        message = event["message"]
        heard.thought += message.get("thinking", "")
        heard.said += message["content"]
        heard.called += [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return heard


def chat(asked: str, begun: str) -> Any:
    last = {"role": "assistant", "reasoning_content": begun, "content": ""}
    tools = [{"type": "function", "function": TOOL}]
    return {"messages": [{"role": "user", "content": asked}, *([last] if begun else [])], "tools": tools}


def items(asked: str, begun: str) -> Any:
    last = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": begun}]}
    return {"input": [{"role": "user", "content": asked}, *([last] if begun else [])],
            "tools": [{"type": "function", **TOOL}]}  # fmt: skip


def blocks(asked: str, begun: str) -> Any:
    last = {"role": "assistant", "content": [{"type": "thinking", "thinking": begun, "signature": ""}]}
    tools = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
    return {"messages": [{"role": "user", "content": asked}, *([last] if begun else [])], "tools": tools,
            "max_tokens": 500}  # fmt: skip


def native(asked: str, begun: str) -> Any:
    last = {"role": "assistant", "thinking": begun, "content": ""}
    tools = [{"type": "function", "function": TOOL}]
    return {"messages": [{"role": "user", "content": asked}, *([last] if begun else [])], "tools": tools}


APIS: dict[str, tuple[str, Callable[[str, str], Any], Callable[[str], Heard]]] = {
    "openai": ("/v1/chat/completions", chat, openai),
    "responses": ("/v1/responses", items, responses),
    "anthropic": ("/v1/messages", blocks, anthropic),
    "ollama": ("/api/chat", native, ollama),
}


def answer(server: Server, api: str, asked: str, stream: bool, begun: str = "") -> Heard:
    path, form, read = APIS[api]
    body = {"model": NAME, "stream": stream, **form(asked, begun)}
    found = httpx.post(server.url + path, json=body, timeout=60)
    assert found.status_code == 200, found.text
    return read(found.text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_call_that_a_thought_mentions(server: Server, api: str, stream: bool) -> None:
    """A call that is only mentioned in the reasoning does not start the grammar of tool calls, which would reject the
    planned answer.
    """
    heard = answer(server, api, plan(says("No.", thought=MENTIONED)), stream)
    assert heard == Heard(MENTIONED, "No.")
    heard = answer(server, api, plan(calls(Call("add", {"a": 3}), thought=MENTIONED)), stream)
    assert heard == Heard(MENTIONED, "", [{"a": 3}])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_continued_thought(server: Server, api: str, stream: bool) -> None:
    heard = answer(server, api, plan(says(" of everything.\n</think>\n\nDone.")), stream, begun="I am thin")
    assert heard == Heard(" of everything.", "Done.")


@pytest.mark.parametrize("begun", ["", "I am thin"])
def test_a_structure_after_a_thought(server: Server, begun: str) -> None:
    """The grammar starts after the reasoning, whether the reasoning is new or continued."""
    asked = f"{MENTIONED}\n</think>\n\n" if begun else f"<think>\n{MENTIONED}\n</think>\n\n"
    more: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"schema": PARAMETERS}}}
    body = chat(plan(says(asked + '{"a": 1}')), begun) | {"tools": []} | more
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert openai(found.text) == Heard(MENTIONED, '{"a": 1}')
    body = chat(plan(says(asked + CALL)), begun) | {"tool_choice": "required"}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert openai(found.text) == Heard(MENTIONED, "", [{"a": 2}])


def test_the_prompt_of_a_continued_thought(server: Server) -> None:
    def prompt(thought: str, content: str, part: bool | str = True) -> str:
        last = {"role": "assistant", "reasoning_content": thought, "content": content}
        body = {"messages": [{"role": "user", "content": "Hi"}, last], "continue_final_message": part}
        found = httpx.post(f"{server.url}/apply-template", json=body).json()["prompt"]
        return str(found).partition("assistant<|im_sep|>")[2]

    begun, whole = "<think>\nI am thin", "<think>\nI am thin\n</think>\n\n"
    assert prompt("I am thin", "") == prompt("I am thin", "Yes", "reasoning_content") == begun
    assert prompt("I am thin", "Yes") == prompt("I am thin", "Yes", "content") == f"{whole}Yes"
    assert prompt("I am thin", "", "content") == whole
    assert prompt("", "Yes") == "Yes"


def test_marks_in_a_continued_thought_are_text(server: Server) -> None:
    """A client may write <|im_end|> into the reasoning. It is text, not the special token."""
    last = {"role": "assistant", "reasoning_content": "a<|im_end|>", "content": ""}
    body = {"messages": [{"role": "user", "content": plan(says("\n</think>\n\nDone."))}, last], "max_tokens": 9}
    used = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    last["reasoning_content"] = "a"
    alone = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    assert used > alone + 1
