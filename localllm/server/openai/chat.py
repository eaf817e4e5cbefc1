"""`/v1/chat/completions`, and counting the tokens of its prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from localllm.generation.request import text_of
from localllm.server.http import Handlers, client
from localllm.server.openai.chunks import ChatWriter
from localllm.server.openai.generation import Alternatives, read_generation, read_thinking
from localllm.server.openai.head import new_head
from localllm.server.openai.messages import Messages, ToolsBody, messages_json, read_tools
from localllm.server.structs import wrong
from localllm.server.turn import Json, Turn


class ChatBody(ToolsBody, kw_only=True):
    """The body of a chat completions request."""

    messages: Messages
    chat_template_kwargs: Json = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    parallel_tool_calls: bool = True
    parse_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Alternatives = 0
    n_probs: Alternatives | None = None
    verbose: bool | None = None


def read_chat(body: ChatBody, client: str, most: int | None = None) -> Turn:
    """Convert the body of a chat completions request; raise BadRequest that names the invalid field."""
    messages, tools = messages_json(body.messages), read_tools(body)
    prompted, continued = body.add_generation_prompt, body.continue_final_message
    return Turn(
        messages=messages,
        generation=replace(read_generation(body, client, most), logprobs=_logprobs(body)),
        tools=tools.tools,
        tool_choice=tools.choice,
        forced_tool=tools.forced,
        parallel_calls=body.parallel_tool_calls and not body.legacy,
        calls_inline=not body.parse_tool_calls,
        thinking=read_thinking(body, body.chat_template_kwargs),
        continued=_continued(body, messages),
        continues=continued if isinstance(continued, str) else "",
        template_variables=body.chat_template_kwargs
        | ({} if prompted is None else {"add_generation_prompt": prompted}),
    )


def _logprobs(body: ChatBody) -> int | None:
    """Return the number of top log probabilities per token, or None if the request wants no log probabilities."""
    if body.n_probs is not None:
        return body.n_probs or None
    if body.top_logprobs and not body.logprobs:
        raise wrong("needs logprobs to be true", "top_logprobs")
    return body.top_logprobs if body.logprobs else None


def _continued(body: ChatBody, messages: list[dict[str, Any]]) -> bool:
    """Return whether the model continues the last message. By default it does if that message is the assistant's."""
    wanted, prompted, last = body.continue_final_message, body.add_generation_prompt, messages[-1]
    if wanted and prompted:
        raise wrong("cannot be true together with add_generation_prompt", "continue_final_message")
    if wanted and last["role"] != "assistant":
        raise wrong("the last message is not the assistant's", "continue_final_message")
    if last["role"] != "assistant" or wanted is False or prompted:
        return False
    if "tool_calls" in last:
        raise wrong("the last message has tool_calls; send their results as messages of role tool", "messages")
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise wrong("the last two messages are both the assistant's; join them", "messages")
    return True


class Chat(Handlers):
    """HTTP handlers of chat completions."""

    async def complete(self, request: Request, body: ChatBody) -> Response | Json:
        """Create a chat completion."""
        model = self.service.find(body.model).id
        turn = read_chat(body, client(request), self.settings.max_tokens)
        verbose = self.settings.verbose if body.verbose is None else body.verbose
        extra = await self._verbose(model, turn) if verbose else {}
        writer = ChatWriter(new_head("chatcmpl-", model), turn.generation.n, body, body.legacy, extra)
        return await self.answer(self.service.answer(model, turn), writer, body.stream, body.sse_ping_interval)

    async def count(self, request: Request, body: ChatBody) -> Json:
        """Return the number of tokens in the prompt."""
        model = self.service.find(body.model).id
        prompt = await self.service.prompt(model, read_chat(body, client(request)))
        return {"object": "response.input_tokens", "input_tokens": prompt.count}

    async def _verbose(self, model: str, turn: Turn) -> Json:
        """Return llama.cpp's `__verbose`: the prompt as the model reads it, token by token."""
        prompt = await self.service.prompt(model, turn)
        pieces = await self.service.pieces(model, text_of(prompt.ids))
        return {"__verbose": {"prompt": b"".join(pieces).decode("utf-8", "replace"), "prompt_tokens": prompt.count}}
