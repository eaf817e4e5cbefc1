"""The tools of a responses request: functions, functions in namespaces, and custom tools, whose input is a string.

The model sees a custom tool as a function with one string argument, `input`. Tools that OpenAI runs (web_search and
similar) are skipped, and the model does not see them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from localllm.server.fields import Fields
from localllm.server.openai.responses.items import flat_name
from localllm.server.openai.tools import (
    MAX_TOOLS,
    ToolUse,
    allowed_choice,
    forced_choice,
    function_tool,
    read_name,
    words_choice,
)
from localllm.server.turn import Json

INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
CHOSEN = ("function", "custom")


@dataclass(frozen=True, slots=True)
class Named:
    """A tool as the client defines it: its name and namespace."""

    name: str
    namespace: str = ""
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a request, and the client's tool for each name that the model sees."""

    use: ToolUse
    named: Mapping[str, Named]


def read_response_tools(fields: Fields) -> ResponseTools:
    """Read `tools`, the tools among the items of `input`, and `tool_choice`."""
    found: dict[str, tuple[Json, Named]] = {}
    more = (item.each("tools", MAX_TOOLS) for item in _added(fields))
    for tool in chain(fields.each("tools", MAX_TOOLS), chain.from_iterable(more)):
        for made, named in _read(tool, ""):
            found[made["function"]["name"]] = (made, named)
    if len(found) > MAX_TOOLS:
        raise fields.wrong("tools", f"has {len(found)} tools; the limit is {MAX_TOOLS}")
    tools = tuple(made for made, _ in found.values())
    return ResponseTools(_choice(fields, tools), {name: named for name, (_, named) in found.items()})


def _added(fields: Fields) -> Iterator[Fields]:
    if isinstance(fields.data.get("input"), list):
        yield from (item for item in fields.each("input") if item.data.get("type") == "additional_tools")


def _read(tool: Fields, namespace: str) -> Iterator[tuple[Json, Named]]:
    kind = tool.text("type")
    if kind == "namespace" and not namespace:
        name = read_name(tool)
        for inner in tool.each("tools", MAX_TOOLS):
            yield from _read(inner, name)
    elif kind == "function":
        nested = tool.inner("function") if tool.has("function") else tool
        name = read_name(nested)
        yield function_tool(nested, flat_name(namespace, name)), Named(name, namespace)
    elif kind == "custom":
        name = read_name(tool)
        yield _custom(tool, flat_name(namespace, name)), Named(name, namespace, True)


def _custom(tool: Fields, name: str) -> Json:
    description = tool.text("description", "")
    form = tool.inner("format")
    if form.text("type", "text") == "grammar":
        grammar = form.inner("grammar") if form.has("grammar") else form
        syntax, definition = grammar.text("syntax", "lark"), grammar.text("definition")
        description += f"\n\nThe input must match this {syntax} grammar:\n{definition}"
    return {"type": "function", "function": {"name": name, "description": description, "parameters": INPUT}}


def _choice(fields: Fields, tools: tuple[Json, ...]) -> ToolUse:
    value = fields.data.get("tool_choice")
    if value is None:
        return ToolUse(tools)
    if isinstance(value, str):
        return words_choice(fields, tools, "tool_choice")
    chosen = fields.inner("tool_choice")
    kind = chosen.text("type")
    if kind == "allowed_tools":
        return allowed_choice(chosen, tools, [_flat(each) for each in chosen.each("tools") if _is_ours(each)])
    if kind not in CHOSEN:
        raise chosen.wrong("type", f"only tools of these types can be chosen: {', '.join(CHOSEN)}")
    return forced_choice(chosen, tools, _flat(chosen))


def _is_ours(tool: Fields) -> bool:
    return tool.text("type", "function") in CHOSEN


def _flat(tool: Fields) -> str:
    return flat_name(tool.text("namespace", ""), tool.text("name"))
