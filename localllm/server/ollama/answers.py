"""POST /api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Annotated, Any, cast

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localllm.generation.request import Event
from localllm.server.errors import BadRequest, NotSupported
from localllm.server.http import Handlers, client, ndjson
from localllm.server.info import ModelInfo
from localllm.server.ollama.reply import EventReader, ReplyPart, now
from localllm.server.ollama.request import (
    AnswerBody,
    ChatBody,
    generation_of,
    messages_json,
    refuse_images,
    thinking_of,
    tools_of,
)
from localllm.server.structs import ITEMS
from localllm.server.turn import Completion, Generation, Json, Turn

Wrap = Callable[[ReplyPart], Json]  # converts a part to the format of /api/chat or /api/generate


class GenerateBody(AnswerBody):
    """The body of /api/generate."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    raw: bool = False
    context: Annotated[list[int], Meta(max_length=10 * ITEMS)] = []
    images: list[Any] = []

    @property
    def only_loads(self) -> bool:
        return not self.prompt

    def __post_init__(self) -> None:
        AnswerBody.__post_init__(self)
        refuse_images(self.images)


class Answers(Handlers):
    """HTTP handlers of /api/chat and /api/generate."""

    # -- /api/chat --------------------------------------------------------------------------------------------------

    async def chat(self, request: Request, body: ChatBody) -> Response | Json:
        model, generation = self._common(request, body)
        messages = messages_json(body.messages)
        if not messages:
            return await self._only_load(body, model, {"message": {"role": "assistant", "content": ""}})
        turn = Turn(
            messages,
            generation,
            tools=tools_of(body.tools, model),
            thinking=thinking_of(body, model),
            continued=messages[-1]["role"] == "assistant",
        )
        reader = self._reader(body, model, generation)
        return await self._reply(body, self.service.answer(model.id, turn), reader, _chat_part, None)

    # -- /api/generate ----------------------------------------------------------------------------------------------

    async def generate(self, request: Request, body: GenerateBody) -> Response | Json:
        model, generation = self._common(request, body)
        prompt, suffix, context = body.prompt, body.suffix, body.context
        if body.template:
            raise NotSupported("template is not supported: the model's own is used; raw takes a whole prompt")
        if not prompt:
            return await self._only_load(body, model, {"response": ""})
        if body.raw and (body.system or context):
            raise BadRequest("raw mode does not support template, system, or context", "raw")
        if suffix and "insert" not in model.capabilities:
            raise BadRequest(f'"{model.id}" does not support insert', "suffix")
        reader = self._reader(body, model, generation)
        if body.raw or suffix:
            events = self.service.complete(model.id, Completion(prompt, generation, suffix or None))
            return await self._reply(body, events, reader, _generate_part, None)
        rules = [{"role": "system", "content": body.system}] if body.system else []
        turn = Turn([*rules, {"role": "user", "content": prompt}], generation, thinking=thinking_of(body, model))
        before = [*context, *await self._rendered(model, turn)]
        if context:
            events = self.service.complete(model.id, Completion(before, generation))
        else:
            events = self.service.answer(model.id, turn)
        return await self._reply(body, events, reader, _generate_part, before)

    async def _rendered(self, model: ModelInfo, turn: Turn) -> list[int]:
        """Return the prompt tokens of a turn, for the `context` that a client sends back in its next request."""
        return await self.service.tokenize(model.id, (await self.service.prompt(model.id, turn)).text, False, True)

    # -- both -------------------------------------------------------------------------------------------------------

    def _common(self, request: Request, body: AnswerBody) -> tuple[ModelInfo, Generation]:
        model = body.find(self.service)
        if "completion" not in model.capabilities:
            raise BadRequest(f'"{model.id}" does not support generate', "model")
        body.keep(request, self.service, self.settings, model)
        return model, generation_of(body, self.service, model, self.settings, client(request))

    def _reader(self, body: AnswerBody, model: ModelInfo, generation: Generation) -> EventReader:
        return EventReader(body.shown(model), generation.logprobs is not None)

    async def _only_load(self, body: AnswerBody, model: ModelInfo, empty: Json) -> Json:
        """Handle a request without a prompt, which only loads the model or, with `keep_alive` 0, unloads it."""
        if body.kept == 0:
            self.service.registry.unload(model.id)
        else:
            await self.service.tokenize(model.id, "", False, False)
        return _head(body.shown(model)) | empty | {"done": True, "done_reason": "unload" if body.kept == 0 else "load"}

    async def _reply(
        self, body: AnswerBody, events: AsyncIterator[Event], reader: EventReader, wrap: Wrap, before: list[int] | None
    ) -> Response | Json:
        """Stream the reply, unless `stream` is false. `before` are the prompt tokens, if the reply has a `context`."""
        if body.stream:
            return ndjson(_lines(events, reader, wrap, before), self.settings.limits)
        whole = ReplyPart()
        async with aclosing(cast("AsyncGenerator[Event, None]", events)) as parts:
            async for event in parts:
                for part in reader.take(event):
                    whole.add(part)
        return _head(reader.name) | _with_logprobs(wrap(whole), whole) | _end(reader, before)


async def _lines(
    events: AsyncIterator[Event], reader: EventReader, wrap: Wrap, before: list[int] | None
) -> AsyncGenerator[Json, None]:
    async with aclosing(cast("AsyncGenerator[Event, None]", events)) as parts:
        async for event in parts:
            for part in reader.take(event):
                yield _head(reader.name) | _with_logprobs(wrap(part), part) | {"done": False}
    yield _head(reader.name) | wrap(ReplyPart()) | _end(reader, before)


def _head(name: str) -> Json:
    return {"model": name, "created_at": now()}


def _end(reader: EventReader, before: list[int] | None) -> Json:
    context = {} if before is None else {"context": [*before, *reader.tokens]}
    return reader.end() | context


def _with_logprobs(wrapped: Json, part: ReplyPart) -> Json:
    return wrapped | ({"logprobs": part.logprobs} if part.logprobs else {})


def _chat_part(part: ReplyPart) -> Json:
    message: Json = {"role": "assistant", "content": part.content}
    if part.thinking:
        message["thinking"] = part.thinking
    if part.calls:
        message["tool_calls"] = part.calls
    return {"message": message}


def _generate_part(part: ReplyPart) -> Json:
    return {"response": part.content} | ({"thinking": part.thinking} if part.thinking else {})
