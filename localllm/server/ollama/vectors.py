"""POST /api/embed and the older /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta
from starlette.requests import Request

from localllm.server.errors import BadRequest, PromptTooLong
from localllm.server.http import Handlers
from localllm.server.info import ModelInfo
from localllm.server.ollama.request import KeptBody
from localllm.server.openai.embeddings import shortened
from localllm.server.structs import listed
from localllm.server.turn import Json

MAX_INPUTS = 2048


class VectorBody(KeptBody):
    """The fields that /api/embed and /api/embeddings share. The options only affect loading."""

    options: Json = {}


class EmbedBody(VectorBody):
    """The body of /api/embed."""

    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] = []
    dimensions: Annotated[int, Meta(ge=0)] = 0
    truncate: bool = True


class EmbeddingsBody(VectorBody):
    """The body of /api/embeddings."""

    prompt: str = ""


class Vectors(Handlers):
    """HTTP handlers of embeddings."""

    async def embed(self, request: Request, body: EmbedBody) -> Json:
        started = time.monotonic()
        model = self._model(request, body)
        texts = listed(body.input or ())
        ids = [await self._tokens(model, text, body.truncate) for text in texts]
        loading = time.monotonic() - started
        if not texts:
            return {"model": body.shown(model), "embeddings": []}
        found = await self.service.embed(model.id, ids, self.settings.pooling)
        return {
            "model": body.shown(model),
            "embeddings": [shortened(vector, body.dimensions) for vector in found.vectors],
            "total_duration": int((time.monotonic() - started) * 1e9),
            "load_duration": int(loading * 1e9),
            "prompt_eval_count": found.tokens,
        }

    async def embeddings(self, request: Request, body: EmbeddingsBody) -> Json:
        model = self._model(request, body)
        if not body.prompt:
            return {"embedding": []}
        ids = await self._tokens(model, body.prompt, True)
        found = await self.service.embed(model.id, [ids], self.settings.pooling)
        return {"embedding": found.vectors[0]}

    def _model(self, request: Request, body: VectorBody) -> ModelInfo:
        model = body.find(self.service)
        if self.settings.pooling == "none":
            raise BadRequest("this server returns a vector per token (pooling none); use /embeddings")
        if not model.pools:
            raise BadRequest(f'"{model.id}" does not support embeddings', "model")
        body.keep(request, self.service, self.settings, model)
        return model

    async def _tokens(self, model: ModelInfo, text: str, truncate: bool) -> Sequence[int]:
        too_long = BadRequest("the input length exceeds the context length", "input")
        while True:
            try:
                ids = await self.service.tokenize(model.id, text, True, False)
                break
            except PromptTooLong as error:
                if not truncate:
                    raise too_long from None
                # Lengths are in bytes, so a text that begins with multi-byte characters is still too long after this
                # cut.
                text = text[: len(text) * error.context // error.prompt_tokens]
        if len(ids) > model.context and not truncate:
            raise too_long
        return ids[: model.context]
