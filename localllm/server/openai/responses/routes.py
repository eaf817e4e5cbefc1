"""HTTP handlers for `/v1/responses` and for counting the tokens of its prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from starlette.requests import Request
from starlette.responses import Response

from localllm.generation.request import Event
from localllm.server.collected import closing, drained, written
from localllm.server.http import Handlers, client, sse
from localllm.server.openai.head import new_head
from localllm.server.openai.responses.request import ResponseBody, read_response
from localllm.server.openai.responses.writer import ResponseWriter
from localllm.server.refusal import refusal_of
from localllm.server.turn import Json
from localllm.server.wire import frame


class Responses(Handlers):
    """HTTP handlers of responses."""

    async def create(self, request: Request, body: ResponseBody) -> Response | Json:
        """Create a response."""
        model = self.service.find(body.model).id
        asked = read_response(body, client(request), self.settings.max_tokens)
        writer = ResponseWriter(new_head("resp_", model), asked.repeated, asked.tools, body)
        given = _nothing() if asked.empty else self.service.answer(model, asked.turn)
        events = written(given, writer.events, writer.empty if asked.empty else tuple)
        if body.stream:
            return sse(_framed(events, writer), self.settings.limits, body.sse_ping_interval)
        await drained(events)
        return writer.response()

    async def count(self, request: Request, body: ResponseBody) -> Json:
        """Return the number of tokens in the prompt."""
        model = self.service.find(body.model).id
        asked = read_response(body, client(request))
        tokens = 0 if asked.empty else len((await self.service.prompt(model, asked.turn)).ids)
        return {"object": "response.input_tokens", "input_tokens": tokens}


async def _nothing() -> AsyncIterator[Event]:
    events: list[Event] = []
    for event in events:
        yield event


async def _framed(events: AsyncIterator[Json], writer: ResponseWriter) -> AsyncIterator[bytes]:
    """Yield events as bytes. An error after the first event ends the response with status failed."""
    begun = False
    try:
        async with closing(events):
            async for event in events:
                begun = True
                yield frame(event, event["type"])
    except Exception as error:
        if not begun:
            raise
        for data in _frames(writer.failed(refusal_of(error))):
            yield data


def _frames(events: Iterable[Json]) -> Iterable[bytes]:
    return (frame(event, event["type"]) for event in events)
