"""`/v1/messages`, and counting the tokens of its prompt. With a single model loaded, any model name is accepted and
refers to that model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, field
from starlette.requests import Request
from starlette.responses import Response

from localllm.server.anthropic.messages import Blocks, MessageList, messages_json
from localllm.server.anthropic.writer import MessageWriter
from localllm.server.content import type_of
from localllm.server.errors import NoThreads
from localllm.server.http import Handlers, client
from localllm.server.openai.generation import (
    EFFORTS,
    PRIORITIES,
    SWITCHES,
    Effort,
    Limit,
    named_client,
    read_stops,
    schema_structure,
    token_limit,
)
from localllm.server.openai.head import new_id
from localllm.server.openai.messages import MAX_TOOLS, NamedTool, function_json, name_of
from localllm.server.sampling import SamplingBody, Stops, read_sampling
from localllm.server.structs import MISSING, Body, Count, read, wrong
from localllm.server.turn import Generation, Json, Structure, Thinking, ToolChoice, Turn

CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class Tool(NamedTool):
    """A tool that the client runs."""

    description: str = ""
    input_schema: Json = {}
    strict: bool = False


class Choice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Body):
    """Whether the model reasons, how long, and whether the client sees it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = "adaptive"
    budget_tokens: Count | None = None
    display: Literal["full", "summarized", "omitted"] = "full"


class OutputFormat(Body):
    """The format of the output."""

    type: Literal["json_schema"]
    schema: Json


class OutputConfig(Body):
    """Options of the output."""

    format: OutputFormat | None = None
    effort: Effort | None = None


class Metadata(Body):
    """The user of the client."""

    user_id: str = ""


class MessageBody(SamplingBody, kw_only=True):
    """The body of a messages request."""

    messages: MessageList
    system: Blocks = None
    model: str = ""
    max_tokens: Limit | None = None
    stop_sequences: Stops = ()  # type: ignore[assignment]
    tools: Annotated[list[Json], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: Choice = field(default_factory=Choice)
    thinking: ThinkingConfig = field(default_factory=ThinkingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    output_format: OutputFormat | None = None
    metadata: Metadata = field(default_factory=Metadata)
    service_tier: str = ""
    chat_template_kwargs: Json = {}
    stream: bool = False
    thread: Any = None
    compaction: Any = None


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A parsed messages request. `shows_reasoning` tells whether the response includes the reasoning."""

    turn: Turn
    stream: bool
    shows_reasoning: bool


def read_message(body: MessageBody, client: str, most: int | None = None) -> MessageRequest:
    """Convert the body of a request; raise BadRequest that names the invalid field."""
    if body.thread is not None:
        raise NoThreads("thread: not supported: nothing is stored; send the whole conversation as messages", "thread")
    if body.compaction is not None:
        raise wrong("not supported: ask for a summary in a message", "compaction")
    messages = messages_json(body.messages, body.system)
    tools = tuple(_tools(body.tools))
    turn = Turn(
        messages=messages,
        generation=_generation(body, client, most),
        tools=tools,
        tool_choice=CHOICES[body.tool_choice.type],
        forced_tool=_forced(body.tool_choice, tools),
        parallel_calls=not body.tool_choice.disable_parallel_tool_use,
        thinking=_thinking(body),
        template_variables=body.chat_template_kwargs,
        continued=_continued(messages),
    )
    return MessageRequest(turn, body.stream, body.thinking.display != "omitted")


def _tools(tools: list[Json]) -> Iterator[Json]:
    """Yield the tools that the client runs. Tools with a type defined by Anthropic are hidden from the model."""
    for number, each in enumerate(tools):
        if type_of(each, f"tools[{number}]", "custom") == "custom":
            tool = read(each, Tool, f"tools[{number}]")
            yield function_json(tool.name, tool.description, tool.input_schema, tool.strict)


def _forced(choice: Choice, tools: Sequence[Json]) -> str:
    """Return the name of the tool that must be called, or "". Raise BadRequest if the choice is impossible."""
    if CHOICES[choice.type] == "required" and not tools:
        raise wrong("a tool is required, but the request has no supported tool", "tool_choice", "type")
    if choice.type != "tool":
        return ""
    if choice.name is None:
        raise wrong(MISSING, "tool_choice", "name")
    if choice.name not in map(name_of, tools):
        raise wrong(f"the request has no tool {choice.name!r}", "tool_choice", "name")
    return choice.name


def _generation(body: MessageBody, client: str, most: int | None) -> Generation:
    return Generation(
        sampling=read_sampling(body),
        max_tokens=token_limit(most, body.max_tokens),
        stops=read_stops(body.stop_sequences),
        structure=_structure(body),
        priority=PRIORITIES.get(body.service_tier, 0),
        client=named_client(client, body.metadata.user_id),
    )


def _structure(body: MessageBody) -> Structure | None:
    """Return the required structure of the output: `output_config.format`, formerly `output_format`."""
    wanted = body.output_config.format or body.output_format
    return None if wanted is None else schema_structure(wanted.schema)


def _thinking(body: MessageBody) -> Thinking:
    enabled, effort = SWITCHES.get(body.thinking.type), body.output_config.effort
    level = "" if effort is None else EFFORTS.get(effort, effort)
    return Thinking(enabled, level, body.thinking.budget_tokens if enabled else None)


def _continued(messages: list[Json]) -> bool:
    """Return whether the model continues the last message, which is the case if its role is assistant."""
    last: Mapping[str, Any] = messages[-1]
    if last.get("tool_calls"):
        raise wrong("the last message has tool_use; send its tool_result as the user's message", "messages")
    return last["role"] == "assistant" and bool(last["content"] or last.get("reasoning_content"))


class Messages(Handlers):
    """HTTP handlers for messages and token counts."""

    async def create(self, request: Request, body: MessageBody) -> Response | Json:
        """Create a message."""
        model = self.service.find(body.model).id
        asked = read_message(body, client(request), self.settings.max_tokens)
        writer = MessageWriter(new_id("msg_"), model, asked.turn.generation.stops, asked.shows_reasoning)
        return await self.answer(self.service.answer(model, asked.turn), writer, asked.stream)

    async def count(self, request: Request, body: MessageBody) -> Json:
        """Return the number of tokens in the prompt."""
        model = self.service.find(body.model).id
        asked = read_message(body, client(request))
        return {"input_tokens": (await self.service.prompt(model, asked.turn)).count}
