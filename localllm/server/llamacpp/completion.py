"""POST /completion and /infill: continue prompts, or fill in the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localllm.generation.request import Event, Finished
from localllm.server.errors import BadRequest, NotSupported
from localllm.server.http import Handlers, client, sse
from localllm.server.llamacpp.answer import Answer
from localllm.server.llamacpp.prompts import split, tokens, with_media
from localllm.server.llamacpp.request import CompletionBody, wanted
from localllm.server.merge import AT_ONCE, merged
from localllm.server.structs import Body
from localllm.server.turn import Completion, Json

MAX_ANSWERS = 1024  # maximum choices per request: number of prompts times n
MAX_EXTRA = 4096  # maximum number of files for infilling


class ExtraFile(Body, kw_only=True):
    """A file for infilling."""

    filename: str = "tmp"
    text: str


class InfillBody(CompletionBody):
    """The body of an infill request."""

    prompt: str = ""
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_EXTRA)] = []


class Completions(Handlers):
    """HTTP handlers of completions."""

    async def complete(self, request: Request, body: CompletionBody) -> Response | Json | list[Any]:
        model = self.service.find(body.model).id
        if body.prompt is None:
            raise BadRequest('"prompt" is required', "prompt")
        prompts = split(body.prompt, "prompt")
        asked, texts = [], []
        for prompt in prompts:
            if (found := with_media(prompt, "prompt")) is not None:
                asked.append(found)
                texts.append(str(found.prompt))
                continue
            ids = await tokens(self.service, model, prompt, "prompt")
            asked.append(Completion(ids))
            texts.append(await self._text(model, ids))
        return await self._run(request, body, model, asked, texts)

    async def infill(self, request: Request, body: InfillBody) -> Response | Json | list[Any]:
        found = self.service.find(body.model)
        if "insert" not in found.capabilities:
            raise NotSupported("Infill is not supported by this model: it has no tokens for it")
        for name in ("input_prefix", "input_suffix"):
            if getattr(body, name) is None:
                raise BadRequest(f'"{name}" is required', name)
        prefix = f"{body.input_prefix}{body.prompt}"
        extra = tuple((each.filename, each.text) for each in body.input_extra)
        return await self._run(
            request, body, found.id, [Completion(prefix, suffix=body.input_suffix, extra=extra)], [prefix]
        )

    async def _run(
        self, request: Request, body: CompletionBody, model: str, asked: Sequence[Completion], texts: Sequence[str]
    ) -> Response | Json | list[Any]:
        want = await wanted(body, self.service, model, self.settings, client(request))
        n = want.generation.n
        if len(asked) * n > MAX_ANSWERS:
            raise BadRequest(f"{len(asked)} prompts with {n} answers each; the limit is {MAX_ANSWERS}", "prompt")
        info = self.service.find(model)
        answers = [Answer(want, info, index, texts[index // n]) for index in range(len(asked) * n)]
        streams = [self.service.complete(model, replace(each, generation=want.generation)) for each in asked]
        events = self._events(answers, streams, n)
        if body.stream:
            return sse(events, self.settings.limits, body.sse_ping_interval)
        async with aclosing(events):
            async for _ in events:
                pass
        finals = [each.final() for each in answers]
        return finals[0] if len(finals) == 1 else finals

    async def _events(
        self, answers: Sequence[Answer], streams: Sequence[AsyncGenerator[Event, None]], n: int
    ) -> AsyncGenerator[Json, None]:
        """Yield the chunks of all choices. Each of `streams` has n choices."""
        left = len(answers)
        async with aclosing(merged(streams, max(AT_ONCE // n, 1))) as events:
            async for number, event in events:
                answer = answers[number * n + event.choice]
                if answer.done is not None:
                    continue  # this choice was ended early; the others continue
                if (
                    isinstance(event, Finished)
                    and event.stop
                    and answer.wanted.generation.logprobs
                    and not answer.wanted.body.stream
                ):
                    stop = await self.service.tokenize(answer.model.id, event.stop, False, False)
                    answer.stop_tokens = len(stop)
                for chunk in answer.take(event):
                    yield chunk
                left -= answer.done is not None
                if not left:
                    return

    async def _text(self, model: str, ids: Sequence[int]) -> str:
        return b"".join(await self.service.pieces(model, ids)).decode("utf-8", "replace")
