"""HTTP handlers of Anthropic's API. With a single model loaded, any model name is accepted and refers to that model."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from localllm.server.anthropic.request import read_message
from localllm.server.anthropic.writer import MessageWriter
from localllm.server.collected import closing
from localllm.server.fields import Fields
from localllm.server.http import client, sse
from localllm.server.interface import Service
from localllm.server.openai.head import new_id
from localllm.server.settings import ServerSettings
from localllm.server.turn import Json, Turn
from localllm.server.wire import frame


class Messages:
    """HTTP handlers for messages and token counts."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self._service, self._settings = service, settings

    async def create(self, request: Request, fields: Fields) -> Response | Json:
        """Create a message."""
        model = self._service.find(fields.text("model", "")).id
        asked = read_message(fields, client(request), self._settings.max_tokens)
        writer = MessageWriter(new_id("msg_"), model, asked.turn.generation.stops, asked.shows_reasoning)
        events = self._events(model, asked.turn, writer)
        if asked.stream:
            return sse(_framed(events), self._settings.limits)
        async with closing(events):
            async for _ in events:
                pass
        return writer.message()

    async def count(self, request: Request, fields: Fields) -> Json:
        """Return the number of tokens in the prompt."""
        model = self._service.find(fields.text("model", "")).id
        asked = read_message(fields, client(request))
        return {"input_tokens": await self._service.count(model, asked.turn)}

    async def _events(self, model: str, turn: Turn, writer: MessageWriter) -> AsyncIterator[Json]:
        async with closing(self._service.answer(model, turn)) as events:
            async for event in events:
                for made in writer.events(event):
                    yield made


async def _framed(events: AsyncIterator[Json]) -> AsyncIterator[bytes]:
    async with closing(events):
        async for event in events:
            yield frame(event, event["type"])
