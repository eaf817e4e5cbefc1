"""`/v1/completions`: continue texts or token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response

from localllm.generation.request import Event
from localllm.server.collected import closing
from localllm.server.fields import Fields
from localllm.server.http import client, sse
from localllm.server.interface import Service
from localllm.server.merge import AT_ONCE, merged
from localllm.server.openai.completed import CompletionWriter, Echo
from localllm.server.openai.generation import MAX_ALTERNATIVES, GenerationRequest, read_generation, settled
from localllm.server.openai.head import DONE, new_head
from localllm.server.openai.inputs import Input, as_prompt, read_inputs
from localllm.server.openai.request import Show, read_show
from localllm.server.settings import ServerSettings
from localllm.server.turn import Completion, Generation, Json

MAX_PROMPTS = 2048
MAX_CHOICES = 8192
Events = AsyncIterator[tuple[int, Event]]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A parsed completions request."""

    prompts: list[Input]
    asked: GenerationRequest
    suffix: str | None
    echo: bool
    show: Show


def read_completion(fields: Fields, client: str, most: int | None = None) -> CompletionRequest:
    """Parse the body of a completions request; raise BadRequest that names the invalid field."""
    prompts = read_inputs(fields, "prompt", MAX_PROMPTS)
    asked = read_generation(fields, client, most)
    name = "n_probs" if fields.has("n_probs") else "logprobs"
    logprobs = fields.optional_integer(name, 0, MAX_ALTERNATIVES)
    asked = replace(asked, generation=replace(asked.generation, logprobs=logprobs))
    n, echo = asked.generation.n, fields.flag("echo", False)
    if fields.integer("best_of", n, 1) != n:
        raise fields.wrong("best_of", "only the same number as n is supported")
    if n * len(prompts) > MAX_CHOICES:
        raise fields.wrong("n", f"{n} answers to each of {len(prompts)} prompts are more than {MAX_CHOICES}")
    return CompletionRequest(prompts, asked, fields.optional_text("suffix"), echo, read_show(fields))


class Completions:
    """HTTP handler of completions."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self._service, self._settings = service, settings

    async def complete(self, request: Request, fields: Fields) -> Response | Json:
        """Complete one or more prompts."""
        info = self._service.find(fields.text("model", ""))
        asked = read_completion(fields, client(request), self._settings.max_tokens)
        generation = await settled(asked.asked, self._service, info.id, info.vocabulary)
        prompts = [await self._prepared(info.id, given, asked, generation) for given in asked.prompts]
        writer = CompletionWriter(
            new_head("cmpl-", info.id),
            [echo for _, echo in prompts] if asked.echo else [None] * len(prompts),
            generation.n,
            asked.show,
        )
        events = self._events(info.id, [completion for completion, _ in prompts])
        if asked.show.stream:
            return sse(_stream(events, writer), self._settings.limits, asked.show.ping_seconds)
        async with closing(events):
            async for number, event in events:
                writer.add(number, event)
        return writer.body()

    async def _prepared(
        self, model: str, given: Input, asked: CompletionRequest, generation: Generation
    ) -> tuple[Completion, Echo | None]:
        """Return the completion for one prompt, and its echo."""
        prompt = await as_prompt(self._service, model, given)
        counted = asked.echo and generation.logprobs is not None
        echo: Echo | None = None
        if asked.echo and isinstance(prompt, str):
            prompt, echo = await self._echoed(model, prompt) if counted else (prompt, Echo(prompt))
        elif asked.echo and not isinstance(prompt, str):
            pieces = await self._service.pieces(model, prompt)
            echo = Echo(_text(pieces), _text(pieces[:1]) if counted else None)
        return Completion(prompt, generation, asked.suffix, echo_logprobs=counted), echo

    async def _echoed(self, model: str, text: str) -> tuple[list[int], Echo]:
        """Return the tokens of a text, and its echo without an added BOS."""
        ids = await self._service.tokenize(model, text, True, True)
        plain = await self._service.tokenize(model, text, False, True)
        added = ids != plain and ids[len(ids) - len(plain) :] == plain
        first = None if added or not ids else _text(await self._service.pieces(model, ids[:1]))
        return ids, Echo(text, first)

    def _events(self, model: str, completions: list[Completion]) -> Events:
        streams = [self._service.complete(model, completion) for completion in completions]
        return merged(streams, max(AT_ONCE // completions[0].generation.n, 1))


def _text(pieces: Sequence[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace")


async def _stream(events: Events, writer: CompletionWriter) -> AsyncIterator[bytes | Json]:
    async with closing(events):
        async for number, event in events:
            for chunk in writer.chunks(number, event):
                yield chunk
    for chunk in writer.last():
        yield chunk
    yield DONE
