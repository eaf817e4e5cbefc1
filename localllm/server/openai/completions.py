"""`/v1/completions`: continue texts or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localllm.server.http import Handlers, client
from localllm.server.merge import AT_ONCE, merged
from localllm.server.openai.completed import CompletionWriter, Echo
from localllm.server.openai.generation import (
    Alternatives,
    GenerationBody,
    read_generation,
)
from localllm.server.openai.head import new_head
from localllm.server.openai.inputs import Input, as_prompt, read_inputs
from localllm.server.structs import wrong
from localllm.server.turn import Completion, Generation, Json

MAX_PROMPTS = 2048
MAX_CHOICES = 8192


class CompletionBody(GenerationBody):
    """The body of a completions request."""

    prompt: Any = None
    logprobs: Alternatives | None = None
    n_probs: Alternatives | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: str | None = None
    echo: bool = False


def read_completion(body: CompletionBody, client: str, most: int | None = None) -> tuple[list[Input], Generation]:
    """Return the prompts of a completions request and its options; raise BadRequest that names the invalid field."""
    prompts = read_inputs(body.prompt, "prompt", MAX_PROMPTS)
    logprobs = body.logprobs if body.n_probs is None else body.n_probs
    generation = replace(read_generation(body, client, most), logprobs=logprobs)
    n = generation.n
    if body.best_of not in (None, n):
        raise wrong("only the same number as n is supported", "best_of")
    if n * len(prompts) > MAX_CHOICES:
        raise wrong(f"{n} answers to each of {len(prompts)} prompts are more than {MAX_CHOICES}", "n")
    return prompts, generation


class Completions(Handlers):
    """HTTP handler of completions."""

    async def complete(self, request: Request, body: CompletionBody) -> Response | Json:
        """Complete one or more prompts."""
        model = self.service.find(body.model).id
        given, generation = read_completion(body, client(request), self.settings.max_tokens)
        prompts = [await self._prepared(model, each, body, generation) for each in given]
        writer = CompletionWriter(new_head("cmpl-", model), [echo for _, echo in prompts], generation.n, body)
        streams = [self.service.complete(model, completion) for completion, _ in prompts]
        events = merged(streams, max(AT_ONCE // generation.n, 1))
        return await self.answer(events, writer, body.stream, body.sse_ping_interval)

    async def _prepared(
        self, model: str, given: Input, asked: CompletionBody, generation: Generation
    ) -> tuple[Completion, Echo | None]:
        """Return the completion for one prompt, and its echo."""
        prompt = await as_prompt(self.service, model, given)
        counted = asked.echo and generation.logprobs is not None
        echo: Echo | None = None
        if asked.echo and isinstance(prompt, str):
            prompt, echo = await self._echoed(model, prompt) if counted else (prompt, Echo(prompt))
        elif asked.echo and not isinstance(prompt, str):
            pieces = await self.service.pieces(model, prompt)
            echo = Echo(_text(pieces), _text(pieces[:1]) if counted else None)
        return Completion(prompt, generation, asked.suffix, echo_logprobs=counted), echo

    async def _echoed(self, model: str, text: str) -> tuple[list[int], Echo]:
        """Return the tokens of a text, and its echo without an added BOS."""
        ids = await self.service.tokenize(model, text, True, True)
        plain = await self.service.tokenize(model, text, False, True)
        added = ids != plain and ids[len(ids) - len(plain) :] == plain
        first = None if added or not ids else _text(await self.service.pieces(model, ids[:1]))
        return ids, Echo(text, first)


def _text(pieces: Sequence[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace")
