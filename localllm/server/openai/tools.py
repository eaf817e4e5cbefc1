"""Convert `tools` and `tool_choice` of chat completions to the format of `Turn`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.server.fields import Fields
from localllm.server.openai.messages import NAME_LENGTH
from localllm.server.turn import Json, ToolChoice

MAX_TOOLS = 2048
WORDS: dict[str, ToolChoice] = {"none": "none", "auto": "auto", "required": "required"}
NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a turn. `legacy` is set if the request has `functions` and expects `function_call` in the
    response."""

    tools: tuple[Json, ...] = ()
    choice: ToolChoice = "auto"
    forced: str = ""
    legacy: bool = False


def read_tools(fields: Fields) -> ToolUse:
    """Read `tools` and `tool_choice`, or the older `functions` and `function_call`."""
    if fields.has("functions") and not fields.has("tools"):
        tools = tuple(function_tool(each) for each in fields.each("functions", MAX_TOOLS))
        return _legacy_choice(fields, tools)
    tools = tuple(_tool(each) for each in fields.each("tools", MAX_TOOLS))
    return _choice(fields, tools)


def _tool(fields: Fields) -> Json:
    kind = fields.text("type", "function")
    if kind != "function":
        raise fields.wrong("type", "only tools of type function are supported here; /v1/responses has custom tools")
    return function_tool(Fields(fields.object("function"), fields.path("function")))


def function_tool(fields: Fields, name: str = "", schema: str = "parameters") -> Json:
    """Return a function in the format of `Turn`, with only the fields that templates read."""
    function: Json = {"name": name or read_name(fields)}
    if description := fields.text("description", ""):
        function["description"] = description
    function["parameters"] = fields.object(schema, {}) or NO_PARAMETERS
    if fields.flag("strict", False):
        function["strict"] = True
    return {"type": "function", "function": function}


def read_name(fields: Fields) -> str:
    """Return the name of a tool."""
    name = fields.text("name")
    if not name or len(name) > NAME_LENGTH or not name.isprintable():
        raise fields.wrong("name", f"expected 1 to {NAME_LENGTH} printable characters")
    return name


def name_of(tool: Json) -> str:
    name: str = tool["function"]["name"]
    return name


def _choice(fields: Fields, tools: tuple[Json, ...]) -> ToolUse:
    value = fields.data.get("tool_choice")
    if value is None:
        return ToolUse(tools)
    if isinstance(value, str):
        return words_choice(fields, tools, "tool_choice")
    chosen = fields.inner("tool_choice")
    if chosen.choice("type", ("function", "allowed_tools")) == "function":
        function = Fields(chosen.object("function"), chosen.path("function"))
        return forced_choice(function, tools, function.text("name"))
    allowed = Fields(chosen.object("allowed_tools"), chosen.path("allowed_tools"))
    names = [Fields(each.object("function"), each.path("function")).text("name") for each in allowed.each("tools")]
    return allowed_choice(allowed, tools, names)


def words_choice(fields: Fields, tools: tuple[Json, ...], field: str) -> ToolUse:
    """Return the tool use for one of the keywords none, auto and required."""
    word = WORDS[fields.choice(field, tuple(WORDS))]
    if word == "required" and not tools:
        raise fields.wrong(field, "required, but the request has no tool that is supported")
    return ToolUse(tools, word)


def forced_choice(fields: Fields, tools: tuple[Json, ...], name: str) -> ToolUse:
    """Return the tool use that forces a call of one tool."""
    if name not in map(name_of, tools):
        raise fields.wrong("name", f"the request has no tool {name!r}")
    return ToolUse(tools, "required", name)


def allowed_choice(fields: Fields, tools: tuple[Json, ...], names: Sequence[str]) -> ToolUse:
    """Return the tool use restricted to some of the tools, so that the model sees only those."""
    known = set(map(name_of, tools))
    if missing := [name for name in names if name not in known]:
        raise fields.wrong("tools", f"the request has no tool {missing[0]!r}")
    allowed = set(names)
    return words_choice(fields, tuple(tool for tool in tools if name_of(tool) in allowed), "mode")


def _legacy_choice(fields: Fields, tools: tuple[Json, ...]) -> ToolUse:
    value = fields.data.get("function_call")
    if value is None or isinstance(value, str):
        word = WORDS[fields.choice("function_call", ("none", "auto"), "auto")]
        return ToolUse(tools, word, legacy=True)
    chosen = fields.inner("function_call")
    forced = forced_choice(chosen, tools, chosen.text("name"))
    return ToolUse(tools, forced.choice, forced.forced, legacy=True)
