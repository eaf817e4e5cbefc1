"""Parse a chat completions request to a `Turn` and the options of the response."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localllm.server.fields import Fields
from localllm.server.openai.generation import MAX_ALTERNATIVES, GenerationRequest, read_generation
from localllm.server.openai.messages import read_messages
from localllm.server.openai.thinking import read_thinking
from localllm.server.openai.tools import read_tools
from localllm.server.turn import Continued, Json, Turn

CONTINUATIONS: tuple[Continued, ...] = ("content", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Show:
    """The optional parts of a response, and whether it is a stream."""

    stream: bool = False
    usage: bool = False  # a stream ends with a chunk that has the usage
    timings: bool = False  # every chunk of a stream has timings
    progress: bool = False  # a stream has chunks during prefill
    legacy: bool = False  # `function_call` instead of `tool_calls`
    ping_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed chat completions request. `turn` lacks the biases that must still be tokenized; `asked` has them."""

    turn: Turn
    asked: GenerationRequest
    show: Show


def read_chat(fields: Fields, client: str, most: int | None = None) -> ChatRequest:
    """Parse the body of a chat completions request; raise BadRequest that names the invalid field."""
    messages = read_messages(fields)
    variables = dict(fields.object("chat_template_kwargs", {}))
    tools = read_tools(fields)
    asked = read_generation(fields, client, most)
    asked = replace(asked, generation=replace(asked.generation, logprobs=read_chat_logprobs(fields)))
    turn = Turn(
        messages=messages,
        generation=asked.generation,
        tools=tools.tools,
        tool_choice=tools.choice,
        forced_tool=tools.forced,
        parallel_calls=fields.flag("parallel_tool_calls", True) and not tools.legacy,
        calls_inline=not fields.flag("parse_tool_calls", True),
        thinking=read_thinking(fields, variables),
        continued=_continued(fields, messages),
        continues=_continues(fields),
        template_variables=_variables(fields, variables),
    )
    return ChatRequest(turn, asked, read_show(fields, tools.legacy))


def read_show(fields: Fields, legacy: bool = False) -> Show:
    """Read the options of the response."""
    ping = fields.optional_integer("sse_ping_interval", -1, 3600)
    return Show(
        stream=fields.flag("stream", False),
        usage=fields.inner("stream_options").flag("include_usage", False),
        timings=fields.flag("timings_per_token", False),
        progress=fields.flag("return_progress", False),
        legacy=legacy,
        ping_seconds=None if ping is None else float(ping),
    )


def read_chat_logprobs(fields: Fields) -> int | None:
    """Return the number of top log probabilities per token, or None if the request wants no log probabilities."""
    if fields.has("n_probs"):
        return fields.integer("n_probs", None, 0, MAX_ALTERNATIVES) or None
    if not fields.flag("logprobs", False):
        if fields.integer("top_logprobs", 0):
            raise fields.wrong("top_logprobs", "needs logprobs to be true")
        return None
    return fields.integer("top_logprobs", 0, 0, MAX_ALTERNATIVES)


def _continued(fields: Fields, messages: list[Json]) -> bool:
    """Return whether the model continues the last message. By default it does if that message is the assistant's."""
    value: Any = fields.data.get("continue_final_message")
    if isinstance(value, str) and value not in CONTINUATIONS:
        raise fields.wrong("continue_final_message", f"expected true, false or one of {', '.join(CONTINUATIONS)}")
    wanted = True if isinstance(value, str) else fields.optional_flag("continue_final_message")
    prompted = fields.optional_flag("add_generation_prompt")
    if wanted and prompted:
        raise fields.wrong("continue_final_message", "cannot be true together with add_generation_prompt")
    last = messages[-1]
    if wanted and last["role"] != "assistant":
        raise fields.wrong("continue_final_message", "the last message is not the assistant's")
    if last["role"] != "assistant" or wanted is False or prompted:
        return False
    if "tool_calls" in last:
        raise fields.wrong("messages", "the last message has tool_calls; send their results as messages of role tool")
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise fields.wrong("messages", "the last two messages are both the assistant's; join them")
    return True


def _continues(fields: Fields) -> Continued:
    """Return the part of the last message that the model continues. "" means that the message's content decides."""
    value = fields.data.get("continue_final_message")
    return next((part for part in CONTINUATIONS if part == value), "")


def _variables(fields: Fields, variables: Json) -> Json:
    """Return the template variables, including `add_generation_prompt`."""
    prompted = fields.optional_flag("add_generation_prompt")
    return variables if prompted is None else variables | {"add_generation_prompt": prompted}
