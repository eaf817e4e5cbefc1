"""Parse a responses request to a `Turn` and the fields that the response repeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.server.fields import Fields
from localllm.server.openai.generation import MAX_ALTERNATIVES, GenerationRequest, read_generation, read_max_tokens
from localllm.server.openai.request import Show, read_show
from localllm.server.openai.responses.items import read_input
from localllm.server.openai.responses.tools import Named, read_response_tools
from localllm.server.openai.structure import format_structure
from localllm.server.openai.thinking import with_effort
from localllm.server.turn import Json, Structure, Turn

STORED = {  # fields that need stored responses, with an alternative
    "previous_response_id": "nothing is stored; send the whole conversation as input",
    "conversation": "nothing is stored; send the whole conversation as input",
    "prompt": "stored prompts do not exist here; send instructions and input",
}
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A parsed request. `turn` lacks the biases that must still be tokenized; `asked` has them."""

    turn: Turn
    asked: GenerationRequest
    show: Show
    tools: Mapping[str, Named]
    repeated: Json  # request fields that the response repeats
    empty: bool  # the input is empty, since the client only probes whether this API exists


def read_response(fields: Fields, client: str, most: int | None = None) -> ResponseRequest:
    """Parse the body of a request; raise BadRequest that names the invalid field."""
    for name, instead in STORED.items():
        if fields.has(name):
            raise fields.wrong(name, f"not supported: {instead}")
    if fields.flag("background", False):
        raise fields.wrong("background", "not supported: the answer comes with the response; leave it false")
    messages = read_input(fields)
    tools = read_response_tools(fields)
    asked = _asked(fields, client, most)
    turn = Turn(
        messages=_instructed(fields, messages),
        generation=asked.generation,
        tools=tools.use.tools,
        tool_choice=tools.use.choice,
        forced_tool=tools.use.forced,
        parallel_calls=fields.flag("parallel_tool_calls", True),
        thinking=with_effort(fields.inner("reasoning"), "effort"),
        template_variables=fields.object("chat_template_kwargs", {}),
        continued=_continued(fields, messages),
    )
    return ResponseRequest(turn, asked, read_show(fields), tools.named, _repeated(fields, turn), not messages)


def _asked(fields: Fields, client: str, most: int | None) -> GenerationRequest:
    asked = read_generation(fields, client)
    wanted = LOGPROBS in fields.texts("include")
    top = fields.integer("top_logprobs", 0, 0, MAX_ALTERNATIVES)
    made = replace(
        asked.generation,
        n=1,
        max_tokens=read_max_tokens(fields, ("max_output_tokens", "max_tokens", "n_predict"), most),
        logprobs=top if wanted else None,
        structure=_structure(fields) or asked.generation.structure,
    )
    return replace(asked, generation=made)


def _structure(fields: Fields) -> Structure | None:
    text = fields.inner("text")
    if not text.has("format"):
        return None
    inner = text.inner("format")
    return format_structure(inner, inner)


def _instructed(fields: Fields, messages: list[Json]) -> list[Json]:
    instructions = fields.text("instructions", "")
    return [{"role": "system", "content": instructions}, *messages] if instructions else messages


def _continued(fields: Fields, messages: list[Json]) -> bool:
    """Return whether the model continues the last message, which must be text of the assistant."""
    last: Mapping[str, Any] = messages[-1] if messages else {}
    if last.get("tool_calls"):
        raise fields.wrong("input", "the last item is a call; send its output as an item of type function_call_output")
    return last.get("role") == "assistant" and bool(last["content"] or last.get("reasoning_content"))


def _repeated(fields: Fields, turn: Turn) -> Json:
    """Return the request fields that a response repeats, with OpenAI's defaults."""
    reasoning = fields.inner("reasoning")
    return {
        "instructions": fields.optional_text("instructions"),
        "max_output_tokens": turn.generation.max_tokens,
        "metadata": fields.object("metadata", {}),
        "parallel_tool_calls": turn.parallel_calls,
        "prompt_cache_key": fields.optional_text("prompt_cache_key"),
        "reasoning": {"effort": reasoning.optional_text("effort"), "summary": None},
        "safety_identifier": fields.optional_text("safety_identifier"),
        "temperature": fields.optional_number("temperature"),
        "text": {"format": fields.inner("text").object("format", {}) or {"type": "text"}},
        "tool_choice": fields.data.get("tool_choice") or "auto",
        "tools": list(fields.list("tools", ())),
        "top_logprobs": turn.generation.logprobs or 0,
        "top_p": fields.optional_number("top_p"),
        "user": fields.optional_text("user"),
    }
