"""HTTP handlers of Anthropic's API. With a single model loaded, any model name is accepted and refers to that model."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from localllm.server.anthropic.request import MessageBody, read_message
from localllm.server.anthropic.writer import MessageWriter
from localllm.server.collected import closing, drained, written
from localllm.server.http import Handlers, client, sse
from localllm.server.openai.head import new_id
from localllm.server.turn import Json
from localllm.server.wire import frame


class Messages(Handlers):
    """HTTP handlers for messages and token counts."""

    async def create(self, request: Request, body: MessageBody) -> Response | Json:
        """Create a message."""
        model = self.service.find(body.model).id
        asked = read_message(body, client(request), self.settings.max_tokens)
        writer = MessageWriter(new_id("msg_"), model, asked.turn.generation.stops, asked.shows_reasoning)
        events = written(self.service.answer(model, asked.turn), writer.events)
        if asked.stream:
            return sse(_framed(events), self.settings.limits)
        await drained(events)
        return writer.message()

    async def count(self, request: Request, body: MessageBody) -> Json:
        """Return the number of tokens in the prompt."""
        model = self.service.find(body.model).id
        asked = read_message(body, client(request))
        return {"input_tokens": len((await self.service.prompt(model, asked.turn)).ids)}


async def _framed(events: AsyncIterator[Json]) -> AsyncIterator[bytes]:
    async with closing(events):
        async for event in events:
            yield frame(event, event["type"])
