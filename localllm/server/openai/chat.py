"""HTTP handlers for `/v1/chat/completions` and for counting the tokens of its prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from localllm.server.collected import closing
from localllm.server.fields import Fields
from localllm.server.http import client, sse
from localllm.server.interface import Service
from localllm.server.openai.chunks import ChatStream, WholeChat
from localllm.server.openai.generation import settled
from localllm.server.openai.head import DONE, new_head
from localllm.server.openai.request import ChatRequest, Show, read_chat
from localllm.server.settings import ServerSettings
from localllm.server.turn import Json, ModelInfo, Turn


class Chat:
    """HTTP handlers of chat completions."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self._service, self._settings = service, settings

    async def complete(self, request: Request, fields: Fields) -> Response | Json:
        """Create a chat completion."""
        info = self._service.find(fields.text("model", ""))
        model = info.id
        asked = read_chat(fields, client(request), self._settings.max_tokens)
        turn = await self._turn(info, asked)
        extra = await self._verbose(model, turn) if fields.flag("verbose", self._settings.verbose) else {}
        if asked.show.stream:
            events = self._stream(model, turn, asked.show, extra)
            return sse(events, self._settings.limits, asked.show.ping_seconds)
        return await self._whole(model, turn, asked.show) | extra

    async def count(self, request: Request, fields: Fields) -> Json:
        """Return the number of tokens in the prompt."""
        info = self._service.find(fields.text("model", ""))
        turn = await self._turn(info, read_chat(fields, client(request)))
        return {"object": "response.input_tokens", "input_tokens": await self._service.count(info.id, turn)}

    async def _verbose(self, model: str, turn: Turn) -> Json:
        """Return llama.cpp's `__verbose`: the prompt as the model reads it, token by token."""
        ids = await self._service.prompt_ids(model, turn)
        pieces = await self._service.pieces(model, ids)
        return {"__verbose": {"prompt": b"".join(pieces).decode("utf-8", "replace"), "prompt_tokens": len(ids)}}

    async def _turn(self, info: ModelInfo, asked: ChatRequest) -> Turn:
        return replace(asked.turn, generation=await settled(asked.asked, self._service, info.id, info.vocabulary))

    async def _stream(self, model: str, turn: Turn, show: Show, extra: Json) -> AsyncIterator[bytes | Json]:
        writer = ChatStream(new_head("chatcmpl-", model), turn.generation.n, show)
        async with closing(self._service.answer(model, turn)) as events:
            async for event in events:
                for chunk in writer.chunks(event):
                    yield chunk | extra
                    extra = {}
        for chunk in writer.last():
            yield chunk
        yield DONE

    async def _whole(self, model: str, turn: Turn, show: Show) -> Json:
        writer = WholeChat(new_head("chatcmpl-", model), turn.generation.n, show)
        async with closing(self._service.answer(model, turn)) as events:
            async for event in events:
                writer.add(event)
        return writer.body()
