"""HTTP handlers for `/v1/chat/completions` and for counting the tokens of its prompt."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from localllm.server.collected import drained, written
from localllm.server.http import Handlers, client, sse
from localllm.server.info import ModelInfo
from localllm.server.openai.chunks import ChatWriter
from localllm.server.openai.generation import settled
from localllm.server.openai.head import new_head
from localllm.server.openai.request import ChatBody, ChatRequest, read_chat
from localllm.server.turn import Json, Turn


class Chat(Handlers):
    """HTTP handlers of chat completions."""

    async def complete(self, request: Request, body: ChatBody) -> Response | Json:
        """Create a chat completion."""
        info = self.service.find(body.model)
        model = info.id
        asked = read_chat(body, client(request), self.settings.max_tokens)
        turn = await self._turn(info, asked)
        verbose = self.settings.verbose if body.verbose is None else body.verbose
        extra = await self._verbose(model, turn) if verbose else {}
        writer = ChatWriter(new_head("chatcmpl-", model), turn.generation.n, body, asked.legacy, extra)
        events = self.service.answer(model, turn)
        if body.stream:
            chunks = written(events, writer.chunks, writer.last)
            return sse(chunks, self.settings.limits, body.sse_ping_interval)
        await drained(events, writer.add)
        return writer.body()

    async def count(self, request: Request, body: ChatBody) -> Json:
        """Return the number of tokens in the prompt."""
        info = self.service.find(body.model)
        turn = await self._turn(info, read_chat(body, client(request)))
        return {"object": "response.input_tokens", "input_tokens": len((await self.service.prompt(info.id, turn)).ids)}

    async def _verbose(self, model: str, turn: Turn) -> Json:
        """Return llama.cpp's `__verbose`: the prompt as the model reads it, token by token."""
        ids = (await self.service.prompt(model, turn)).ids
        pieces = await self.service.pieces(model, ids)
        return {"__verbose": {"prompt": b"".join(pieces).decode("utf-8", "replace"), "prompt_tokens": len(ids)}}

    async def _turn(self, info: ModelInfo, asked: ChatRequest) -> Turn:
        return replace(asked.turn, generation=await settled(asked.asked, self.service, info.id, info.vocabulary))
