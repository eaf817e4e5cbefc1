"""Parse a messages request to a `Turn` and the options of the response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.server.anthropic.messages import read_messages
from localllm.server.errors import NoThreads
from localllm.server.fields import Fields
from localllm.server.openai.generation import (
    MAX_INT,
    PRIORITIES,
    read_client,
    read_max_tokens,
    read_sampling,
    read_stops,
)
from localllm.server.openai.structure import schema_structure
from localllm.server.openai.thinking import EFFORTS
from localllm.server.openai.tools import MAX_TOOLS, function_tool, name_of
from localllm.server.turn import Generation, Json, Structure, Thinking, ToolChoice, Turn

CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
SWITCHES = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None}  # values of `thinking`
DISPLAYS = ("full", "summarized", "omitted")


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A parsed messages request. `shows_reasoning` tells whether the response includes the reasoning."""

    turn: Turn
    stream: bool
    shows_reasoning: bool


def read_message(fields: Fields, client: str, most: int | None = None) -> MessageRequest:
    """Parse the body of a request; raise BadRequest that names the invalid field."""
    if fields.has("thread"):
        raise NoThreads("thread: not supported: nothing is stored; send the whole conversation as messages", "thread")
    if fields.has("compaction"):
        raise fields.wrong("compaction", "not supported: ask for a summary in a message")
    messages = read_messages(fields)
    tools = tuple(_tool(each) for each in fields.each("tools", MAX_TOOLS) if _is_ours(each))
    choice = fields.inner("tool_choice")
    wanted = CHOICES[choice.choice("type", tuple(CHOICES), "auto")]
    forced = choice.text("name") if choice.data.get("type") == "tool" else ""
    if wanted == "required" and not tools:
        raise choice.wrong("type", "a tool is required, but the request has none that is supported")
    if forced and forced not in map(name_of, tools):
        raise choice.wrong("name", f"the request has no tool {forced!r}")
    turn = Turn(
        messages=messages,
        generation=_generation(fields, client, most),
        tools=tools,
        tool_choice=wanted,
        forced_tool=forced,
        parallel_calls=not choice.flag("disable_parallel_tool_use", False),
        thinking=_thinking(fields),
        template_variables=fields.object("chat_template_kwargs", {}),
        continued=_continued(fields, messages),
    )
    shown = fields.inner("thinking").choice("display", DISPLAYS, "full") != "omitted"
    return MessageRequest(turn, fields.flag("stream", False), shown)


def _generation(fields: Fields, client: str, most: int | None) -> Generation:
    sampling = read_sampling(fields)
    return Generation(
        sampling=sampling,
        max_tokens=read_max_tokens(fields, ("max_tokens",), most),
        stops=read_stops(fields, "stop_sequences"),
        structure=_structure(fields),
        priority=PRIORITIES.get(fields.text("service_tier", ""), 0),
        client=read_client(fields.inner("metadata"), client, "user_id"),
    )


def _structure(fields: Fields) -> Structure | None:
    """Return the required structure of the output: `output_config.format`, formerly `output_format`."""
    config = fields.inner("output_config")
    holder, name = (config, "format") if config.has("format") else (fields, "output_format")
    if not holder.has(name):
        return None
    inner = holder.inner(name)
    inner.choice("type", ("json_schema",))
    return schema_structure(inner.object("schema"), lambda message: inner.wrong("schema", message))


def _thinking(fields: Fields) -> Thinking:
    inner = fields.inner("thinking")
    enabled = SWITCHES[inner.choice("type", tuple(SWITCHES), "adaptive")]
    budget = inner.optional_integer("budget_tokens", 0, MAX_INT) if enabled else None
    config = fields.inner("output_config")
    effort = EFFORTS[config.choice("effort", tuple(EFFORTS))] if config.has("effort") else ""
    return Thinking(enabled, effort, budget)


def _is_ours(tool: Fields) -> bool:
    """Return whether the client runs a tool. Tools with a type defined by Anthropic are hidden from the model."""
    return tool.text("type", "custom") == "custom"


def _tool(tool: Fields) -> Json:
    return function_tool(tool, schema="input_schema")


def _continued(fields: Fields, messages: list[Json]) -> bool:
    """Return whether the model continues the last message, which is the case if its role is assistant."""
    last: Mapping[str, Any] = messages[-1]
    if last.get("tool_calls"):
        raise fields.wrong("messages", "the last message has tool_use; send its tool_result as the user's message")
    return last["role"] == "assistant" and bool(last["content"] or last.get("reasoning_content"))
