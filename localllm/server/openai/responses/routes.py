"""`/v1/responses`, and counting the tokens of its prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from msgspec import field
from starlette.requests import Request
from starlette.responses import Response

from localllm.generation.request import Event
from localllm.server.http import Handlers, client
from localllm.server.openai.generation import (
    Alternatives,
    Effort,
    GenerationBody,
    Limit,
    ResponseFormat,
    read_generation,
    token_limit,
    with_effort,
)
from localllm.server.openai.head import new_head
from localllm.server.openai.responses.items import read_input
from localllm.server.openai.responses.tools import Named, Tools, read_response_tools
from localllm.server.openai.responses.writer import ResponseWriter
from localllm.server.structs import Body, Strings, listed, read, wrong
from localllm.server.turn import Generation, Json, ToolChoice, Turn

STORED = {  # fields that need stored responses, with an alternative
    "previous_response_id": "nothing is stored; send the whole conversation as input",
    "conversation": "nothing is stored; send the whole conversation as input",
    "prompt": "stored prompts are not supported; send instructions and input",
}
LOGPROBS = "message.output_text.logprobs"


class Text(Body):
    """The format of the output."""

    format: Json | None = None


class Reasoning(Body):
    """The reasoning effort."""

    effort: Effort | None = None


class ResponseBody(GenerationBody, kw_only=True):
    """The body of a responses request."""

    input: str | list[Json]
    instructions: str | None = None
    tools: Tools = []
    tool_choice: ToolChoice | Json = "auto"
    text: Text = field(default_factory=Text)
    reasoning: Reasoning = field(default_factory=Reasoning)
    include: str | Strings = []
    metadata: Json = {}
    max_output_tokens: Limit | None = None
    top_logprobs: Alternatives = 0
    parallel_tool_calls: bool = True
    chat_template_kwargs: Json = {}
    background: bool = False
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A parsed request."""

    turn: Turn
    tools: Mapping[str, Named]
    repeated: Json  # request fields that the response repeats
    empty: bool  # the input is empty, since the client only probes whether this API exists


def read_response(body: ResponseBody, client: str, most: int | None = None) -> ResponseRequest:
    """Convert the body of a request; raise BadRequest that names the invalid field."""
    for name, instead in STORED.items():
        if getattr(body, name) is not None:
            raise wrong(f"not supported: {instead}", name)
    if body.background:
        raise wrong("not supported: the response contains the answer; set it to false", "background")
    messages = read_input(body.input)
    tools = read_response_tools(body.tools, body.input, body.tool_choice)
    first = [{"role": "system", "content": body.instructions}] if body.instructions else []
    turn = Turn(
        messages=first + messages,
        generation=_generation(body, client, most),
        tools=tools.use.tools,
        tool_choice=tools.use.choice,
        forced_tool=tools.use.forced,
        parallel_calls=body.parallel_tool_calls,
        thinking=with_effort(body.reasoning.effort),
        template_variables=body.chat_template_kwargs,
        continued=_continued(messages),
    )
    return ResponseRequest(turn, tools.named, _repeated(body, turn), not messages)


def _generation(body: ResponseBody, client: str, most: int | None) -> Generation:
    generation, format = read_generation(body, client), body.text.format
    structure = None if format is None else read(format, ResponseFormat, "text.format").structure
    return replace(
        generation,
        n=1,
        max_tokens=token_limit(most, body.max_output_tokens, body.max_tokens, body.n_predict),
        logprobs=body.top_logprobs if LOGPROBS in listed(body.include) else None,
        structure=structure or generation.structure,
    )


def _continued(messages: list[Json]) -> bool:
    """Return whether the model continues the last message, which must be text of the assistant."""
    last: Mapping[str, Any] = messages[-1] if messages else {}
    if last.get("tool_calls"):
        raise wrong("the last item is a call; send its output as an item of type function_call_output", "input")
    return last.get("role") == "assistant" and bool(last["content"] or last.get("reasoning_content"))


def _repeated(body: ResponseBody, turn: Turn) -> Json:
    """Return the request fields that a response repeats, with OpenAI's defaults."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": turn.generation.max_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": turn.parallel_calls,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "temperature": turn.generation.sampling.get("temperature"),
        "text": {"format": body.text.format or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools,
        "top_logprobs": turn.generation.logprobs or 0,
        "top_p": turn.generation.sampling.get("top_p"),
        "user": body.user,
    }


class Responses(Handlers):
    """HTTP handlers of responses."""

    async def create(self, request: Request, body: ResponseBody) -> Response | Json:
        """Create a response."""
        model = self.service.find(body.model).id
        asked = read_response(body, client(request), self.settings.max_tokens)
        writer = ResponseWriter(new_head("resp_", model), asked.repeated, asked.tools, body, asked.empty)
        given = _nothing() if asked.empty else self.service.answer(model, asked.turn)
        return await self.answer(given, writer, body.stream, body.sse_ping_interval)

    async def count(self, request: Request, body: ResponseBody) -> Json:
        """Return the number of tokens in the prompt."""
        model = self.service.find(body.model).id
        asked = read_response(body, client(request))
        tokens = 0 if asked.empty else (await self.service.prompt(model, asked.turn)).count
        return {"object": "response.input_tokens", "input_tokens": tokens}


async def _nothing() -> AsyncGenerator[Event, None]:
    events: list[Event] = []
    for event in events:
        yield event
