"""The tools of a responses request: functions, functions in namespaces, and custom tools, whose input is a string.

The model sees a custom tool as a function with one string argument, `input`. Tools that OpenAI runs (web_search and
similar) are skipped, and the model does not see them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from localllm.server.content import type_of
from localllm.server.openai.messages import (
    MAX_TOOLS,
    FunctionTool,
    NamedTool,
    ToolUse,
    allowed_choice,
    forced_choice,
    word_choice,
)
from localllm.server.openai.responses.items import flat_name
from localllm.server.structs import MISSING, Body, Wrong, read, wrong
from localllm.server.turn import Json, ToolChoice

INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
CHOSEN = ("function", "custom")
Tools = Annotated[list[Json], Meta(max_length=MAX_TOOLS)]


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


class _Grammar(Body):
    syntax: str = "lark"
    definition: str | None = None


class _Format(_Grammar):
    type: str = "text"
    grammar: _Grammar | None = None

    def __post_init__(self) -> None:
        if self.type == "grammar" and (self.grammar or self).definition is None:
            raise Wrong("grammar.definition" if self.grammar else "definition", MISSING)


class _CustomTool(NamedTool):
    description: str = ""
    format: _Format | None = None

    def json(self, name: str) -> Json:
        description = self.description
        if self.format is not None and self.format.type == "grammar":
            grammar = self.format.grammar or self.format
            description += f"\n\nThe input must match this {grammar.syntax} grammar:\n{grammar.definition}"
        return {"type": "function", "function": {"name": name, "description": description, "parameters": INPUT}}


class _Namespace(NamedTool):
    tools: Tools = []


class _Nested(Body):
    function: FunctionTool | None = None


class _Chosen(Body):
    name: str
    namespace: str = ""


class _Allowed(Body):
    mode: ToolChoice
    tools: list[Json] = []


class _Choice(Body):
    type: Literal["function", "custom", "allowed_tools"]


def read_response_tools(tools: Sequence[Json], items: Any, choice: ToolChoice | Json) -> ResponseTools:
    """Read `tools`, the tools among the items of `input`, and `tool_choice`."""
    found: dict[str, tuple[Json, Named]] = {}
    for place, each in _all(tools, items):
        for made, named in _read(each, place, ""):
            found[made["function"]["name"]] = (made, named)
    if len(found) > MAX_TOOLS:
        raise wrong(f"has {len(found)} tools; the limit is {MAX_TOOLS}", "tools")
    use = _choice(choice, tuple(made for made, _ in found.values()))
    return ResponseTools(use, {name: named for name, (_, named) in found.items()})


def _all(tools: Sequence[Json], items: Any) -> Iterator[tuple[str, Json]]:
    """Yield the place and the definition of each tool."""
    yield from ((f"tools[{number}]", each) for number, each in enumerate(tools))
    for number, item in enumerate(items if isinstance(items, list) else ()):
        if item.get("type") == "additional_tools":
            yield from _inner(item, f"input[{number}]")


def _inner(holder: Json, where: str) -> Iterator[tuple[str, Json]]:
    tools = read({"name": "tools"} | holder, _Namespace, where).tools
    yield from ((f"{where}.tools[{number}]", each) for number, each in enumerate(tools))


def _read(tool: Json, where: str, namespace: str) -> Iterator[tuple[Json, Named]]:
    kind = type_of(tool, where)
    if kind == "namespace" and not namespace:
        name = read(tool, _Namespace, where).name
        for place, inner in _inner(tool, where):
            yield from _read(inner, place, name)
    elif kind == "function":
        function = read(tool, _Nested, where).function or read(tool, FunctionTool, where)
        yield function.json(flat_name(namespace, function.name)), Named(function.name, namespace)
    elif kind == "custom":
        custom = read(tool, _CustomTool, where)
        yield custom.json(flat_name(namespace, custom.name)), Named(custom.name, namespace, True)


def _choice(choice: ToolChoice | Json, tools: tuple[Json, ...]) -> ToolUse:
    if isinstance(choice, str):
        return word_choice(tools, choice, "tool_choice")
    if read(choice, _Choice, "tool_choice").type != "allowed_tools":
        return forced_choice(tools, _flat(choice, "tool_choice"), "tool_choice")
    allowed = read(choice, _Allowed, "tool_choice")
    names = [
        _flat(each, place)
        for number, each in enumerate(allowed.tools)
        if type_of(each, place := f"tool_choice.tools[{number}]", "function") in CHOSEN
    ]
    return allowed_choice(tools, names, allowed.mode, "tool_choice")


def _flat(tool: Json, where: str) -> str:
    chosen = read(tool, _Chosen, where)
    return flat_name(chosen.namespace, chosen.name)
