"""POST /api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localllm.generation.request import Event
from localllm.loading.media_parts import MARKER
from localllm.server.errors import BadRequest, NotSupported
from localllm.server.http import Handlers, client, ndjson
from localllm.server.info import ModelInfo
from localllm.server.ollama.reply import ReplyPart, ReplyWriter, Wrap, head
from localllm.server.ollama.request import (
    AnswerBody,
    ChatBody,
    Images,
    generation_of,
    messages_json,
    thinking_of,
    tools_of,
    with_images,
)
from localllm.server.structs import ITEMS
from localllm.server.turn import Completion, Generation, Json, Turn
from localllm.server.uploads import Upload


class GenerateBody(AnswerBody):
    """The body of /api/generate."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    raw: bool = False
    context: Annotated[list[int], Meta(max_length=10 * ITEMS)] = []
    images: Images = []

    @property
    def only_loads(self) -> bool:
        return not self.prompt


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
        return await self._reply(body, self.service.answer(model.id, turn), model, _chat_part)

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
        if body.images and (suffix or context):
            raise NotSupported("images go with a prompt or with messages, not with suffix or context")
        if body.raw or suffix:
            media = [Upload("image", image) for image in body.images]
            marked = MARKER * (len(media) - prompt.count(MARKER)) + prompt if media else prompt
            events = self.service.complete(model.id, Completion(marked, generation, suffix or None, media=media))
            return await self._reply(body, events, model, _generate_part)
        rules = [{"role": "system", "content": body.system}] if body.system else []
        turn = Turn(
            [*rules, {"role": "user", "content": with_images(body.images, prompt)}],
            generation,
            thinking=thinking_of(body, model),
        )
        before = None if body.images else [*context, *await self._rendered(model, turn)]  # ids cannot hold a picture
        if context and before is not None:
            events = self.service.complete(model.id, Completion(before, generation))
        else:
            events = self.service.answer(model.id, turn)
        return await self._reply(body, events, model, _generate_part, before)

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

    async def _only_load(self, body: AnswerBody, model: ModelInfo, empty: Json) -> Json:
        """Handle a request without a prompt, which only loads the model or, with `keep_alive` 0, unloads it."""
        if body.kept == 0:
            self.service.registry.unload(model.id)
        else:
            await self.service.tokenize(model.id, "", False, False)
        return head(body.shown(model)) | empty | {"done": True, "done_reason": "unload" if body.kept == 0 else "load"}

    async def _reply(
        self,
        body: AnswerBody,
        events: AsyncGenerator[Event, None],
        model: ModelInfo,
        wrap: Wrap,
        before: list[int] | None = None,
    ) -> Response | Json:
        """Stream the reply, unless `stream` is false. `before` are the prompt tokens, if the reply has a `context`."""
        writer = ReplyWriter(body.shown(model), body.logprobs, wrap, before)
        if body.stream:
            return ndjson(writer.stream(events), self.settings.limits)
        return await writer.collect(events)


def _chat_part(part: ReplyPart) -> Json:
    message: Json = {"role": "assistant", "content": part.content}
    if part.thinking:
        message["thinking"] = part.thinking
    if part.calls:
        message["tool_calls"] = part.calls
    return {"message": message}


def _generate_part(part: ReplyPart) -> Json:
    return {"response": part.content} | ({"thinking": part.thinking} if part.thinking else {})
