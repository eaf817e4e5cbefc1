"""Convert the messages of chat completions, in OpenAI's current and older formats and in similar formats, to the format
of `Turn`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from localllm.server.content import Parts, joined
from localllm.server.structs import MISSING, Body, Wrong
from localllm.server.turn import Json

ROLES = {"developer": "system", "function": "tool"}  # role in a request: role in templates
NAME_LENGTH = 256


class Function(Body):
    """A called function. Some clients send the arguments as an object."""

    name: str
    arguments: str | Json = "{}"


class Custom(Body):
    """A called custom tool."""

    name: str
    input: str


class Call(Body):
    """A tool call of the assistant."""

    id: str = ""
    type: Literal["function", "custom"] = "function"
    function: Function | None = None
    custom: Custom | None = None

    def __post_init__(self) -> None:
        if getattr(self, self.type) is None:
            raise Wrong(self.type, MISSING)

    def json(self, number: int) -> Json:
        """Return the call in `Turn`'s format."""
        id = self.id or f"call_{number}"
        if self.type == "custom" and self.custom:
            return tool_call(id, self.custom.name, custom_arguments(self.custom.input))
        assert self.function is not None
        return tool_call(id, self.function.name, arguments_text(self.function.arguments))


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Parts | None = None
    name: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[Call] = []
    function_call: Function | None = None
    tool_call_id: str = ""

    def __post_init__(self) -> None:
        if self.content is None and self.role != "assistant":
            raise Wrong("content", MISSING)
        thought = self.reasoning_content or self.reasoning
        if self.content is None and not (self.name or thought or self.tool_calls or self.function_call):
            raise Wrong("content", "an assistant message needs content, tool_calls or reasoning_content")

    def json(self) -> Json:
        """Return the message with a text as content, ids on all `tool_calls`, and the role that templates use."""
        found: Json = {"role": ROLES.get(self.role, self.role), "content": joined(self.content)}
        if self.name:
            found["name"] = self.name
        if self.role == "assistant":
            if thought := self.reasoning_content or self.reasoning:
                found["reasoning_content"] = thought
            calls = [call.json(number) for number, call in enumerate(self.tool_calls)]
            if called := self.function_call:
                calls.append(tool_call(_legacy_id(called.name), called.name, arguments_text(called.arguments)))
            return found | ({"tool_calls": calls} if calls else {})
        if found["role"] == "tool":
            found["tool_call_id"] = self.tool_call_id or _legacy_id(self.name)
        return found


Messages = Annotated[list[Message], Meta(min_length=1)]


def messages_json(messages: Sequence[Message]) -> list[Json]:
    """Return messages in `Turn`'s format."""
    return [message.json() for message in messages]


def tool_call(id: str, name: str, arguments: str) -> Json:
    """Return an entry of `tool_calls`."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _legacy_id(name: str) -> str:
    """Return an id for a tool call that lacks an id, as in messages with `function_call`."""
    return f"call_{name}"


def arguments_text(arguments: str | dict[str, Any]) -> str:
    """Return the arguments of a tool call as JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that represents a custom tool. The input of a custom tool is one string."""
    return json.dumps({"input": text}, ensure_ascii=False)
