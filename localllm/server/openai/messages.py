"""Convert the messages and tools of chat completions, in OpenAI's current and older formats and in similar formats, to
the format of `Turn`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from localllm.server.content import Parts, contents
from localllm.server.openai.generation import ThinkingBody
from localllm.server.structs import MISSING, Body, Wrong, wrong
from localllm.server.turn import Json, ToolChoice

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
        """Return the message in the format of `Turn`: ids on all `tool_calls`, and the role that templates use."""
        found: Json = {"role": ROLES.get(self.role, self.role), "content": contents(self.content)}
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


MAX_TOOLS = 2048
NO_PARAMETERS = {"type": "object", "properties": {}}


class NamedTool(Body):
    """A tool with a name that a prompt can have."""

    name: str

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > NAME_LENGTH or not self.name.isprintable():
            raise Wrong("name", f"expected 1 to {NAME_LENGTH} printable characters")


class FunctionTool(NamedTool):
    """The definition of a function."""

    description: str = ""
    parameters: Json = {}
    strict: bool = False

    def json(self, name: str = "") -> Json:
        """Return the function in the format of `Turn`, with only the fields that templates read."""
        return function_json(name or self.name, self.description, self.parameters, self.strict)


class Tool(Body):
    """A tool of a chat completion."""

    type: str = "function"
    function: FunctionTool | None = None

    def __post_init__(self) -> None:
        if self.type != "function":
            raise Wrong("type", "only tools of type function are supported here; /v1/responses has custom tools")
        if self.function is None:
            raise Wrong("function", MISSING)


class Named(Body):
    """A reference to a function."""

    name: str


class AllowedTool(Body):
    """A reference to a tool."""

    function: Named


class AllowedTools(Body):
    """A choice between some of the tools."""

    mode: ToolChoice
    tools: list[AllowedTool] = []


class Choice(Body):
    """`tool_choice` as an object."""

    type: Literal["function", "allowed_tools"]
    function: Named | None = None
    allowed_tools: AllowedTools | None = None

    def __post_init__(self) -> None:
        if getattr(self, self.type) is None:
            raise Wrong(self.type, MISSING)


class ToolsBody(ThinkingBody):
    """The tools of a request, in OpenAI's current and older formats."""

    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | Choice = "auto"
    functions: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | Named = "auto"

    @property
    def legacy(self) -> bool:
        """Whether the request has `functions`, and expects `function_call` in the response."""
        return self.functions is not None and self.tools is None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a turn."""

    tools: tuple[Json, ...] = ()
    choice: ToolChoice = "auto"
    forced: str = ""


def function_json(name: str, description: str = "", parameters: Json | None = None, strict: bool = False) -> Json:
    """Return a function in the format of `Turn`."""
    function: Json = {"name": name} | ({"description": description} if description else {})
    function["parameters"] = parameters or NO_PARAMETERS
    return {"type": "function", "function": function | ({"strict": True} if strict else {})}


def read_tools(body: ToolsBody) -> ToolUse:
    """Read `tools` and `tool_choice`, or the older `functions` and `function_call`."""
    if body.legacy:
        tools = tuple(each.json() for each in body.functions or ())
        if isinstance(body.function_call, str):
            return ToolUse(tools, body.function_call)
        return forced_choice(tools, body.function_call.name, "function_call")
    tools = tuple(each.function.json() for each in body.tools or () if each.function)
    choice = body.tool_choice
    if isinstance(choice, str):
        return word_choice(tools, choice, "tool_choice")
    if choice.function is not None and choice.type == "function":
        return forced_choice(tools, choice.function.name, "tool_choice", "function")
    allowed = choice.allowed_tools
    assert allowed is not None
    names = [each.function.name for each in allowed.tools]
    return allowed_choice(tools, names, allowed.mode, "tool_choice", "allowed_tools")


def name_of(tool: Json) -> str:
    name: str = tool["function"]["name"]
    return name


def word_choice(tools: tuple[Json, ...], word: ToolChoice, *path: str) -> ToolUse:
    """Return the tool use for one of the keywords none, auto and required."""
    if word == "required" and not tools:
        raise wrong("required, but the request has no supported tool", *path)
    return ToolUse(tools, word)


def forced_choice(tools: tuple[Json, ...], name: str, *path: str) -> ToolUse:
    """Return the tool use that forces a call of one tool."""
    if name not in map(name_of, tools):
        raise wrong(f"the request has no tool {name!r}", *path, "name")
    return ToolUse(tools, "required", name)


def allowed_choice(tools: tuple[Json, ...], names: Sequence[str], mode: ToolChoice, *path: str) -> ToolUse:
    """Return the tool use restricted to some of the tools, so that the model sees only those."""
    known = set(map(name_of, tools))
    if missing := [name for name in names if name not in known]:
        raise wrong(f"the request has no tool {missing[0]!r}", *path, "tools")
    allowed = set(names)
    return word_choice(tuple(tool for tool in tools if name_of(tool) in allowed), mode, *path, "mode")
