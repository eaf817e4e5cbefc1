"""HTTP handlers for `/v1/chat/completions` and for counting the tokens of its prompt."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from localllm.server.collected import drained, written
from localllm.server.http import Handlers, client, sse
from localllm.server.openai.chunks import ChatWriter
from localllm.server.openai.head import new_head
from localllm.server.openai.request import ChatBody, read_chat
from localllm.server.turn import Json, Turn


class Chat(Handlers):
    """HTTP handlers of chat completions."""

    async def complete(self, request: Request, body: ChatBody) -> Response | Json:
        """Create a chat completion."""
        model = self.service.find(body.model).id
        turn = read_chat(body, client(request), self.settings.max_tokens)
        verbose = self.settings.verbose if body.verbose is None else body.verbose
        extra = await self._verbose(model, turn) if verbose else {}
        writer = ChatWriter(new_head("chatcmpl-", model), turn.generation.n, body, body.legacy, extra)
        events = self.service.answer(model, turn)
        if body.stream:
            chunks = written(events, writer.chunks, writer.last)
            return sse(chunks, self.settings.limits, body.sse_ping_interval)
        await drained(events, writer.add)
        return writer.body()

    async def count(self, request: Request, body: ChatBody) -> Json:
        """Return the number of tokens in the prompt."""
        model = self.service.find(body.model).id
        prompt = await self.service.prompt(model, read_chat(body, client(request)))
        return {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}

    async def _verbose(self, model: str, turn: Turn) -> Json:
        """Return llama.cpp's `__verbose`: the prompt as the model reads it, token by token."""
        ids = (await self.service.prompt(model, turn)).ids
        pieces = await self.service.pieces(model, ids)
        return {"__verbose": {"prompt": b"".join(pieces).decode("utf-8", "replace"), "prompt_tokens": len(ids)}}
