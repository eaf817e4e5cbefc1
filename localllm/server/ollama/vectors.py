"""POST /api/embed and the older /api/embeddings."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from starlette.requests import Request

from localllm.server.errors import BadRequest, PromptTooLong
from localllm.server.fields import Fields
from localllm.server.interface import Service
from localllm.server.ollama.request import check_keep_alive, model_name, model_of
from localllm.server.settings import ServerSettings
from localllm.server.turn import Json, ModelInfo

MAX_INPUTS = 2048


class Vectors:
    """HTTP handlers of embeddings."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self.service = service
        self.settings = settings

    async def embed(self, request: Request, fields: Fields) -> Json:
        started = time.monotonic()
        model = self._model(fields)
        texts = [text for text in fields.texts("input", MAX_INPUTS) if text or isinstance(fields.data["input"], list)]
        size = fields.integer("dimensions", 0, 0)
        truncate = fields.flag("truncate", True)
        ids = [await self._tokens(model, text, truncate) for text in texts]
        loading = time.monotonic() - started
        if not texts:
            return {"model": model_name(fields, model), "embeddings": []}
        found = await self.service.embed(model.id, ids, self.settings.pooling)
        return {
            "model": model_name(fields, model),
            "embeddings": [_shortened(vector, size) for vector in found.vectors],
            "total_duration": int((time.monotonic() - started) * 1e9),
            "load_duration": int(loading * 1e9),
            "prompt_eval_count": found.tokens,
        }

    async def embeddings(self, request: Request, fields: Fields) -> Json:
        model = self._model(fields)
        prompt = fields.text("prompt", "")
        if not prompt:
            return {"embedding": []}
        ids = await self._tokens(model, prompt, True)
        found = await self.service.embed(model.id, [ids], self.settings.pooling)
        return {"embedding": found.vectors[0]}

    def _model(self, fields: Fields) -> ModelInfo:
        model = model_of(fields, self.service)
        check_keep_alive(fields)
        fields.object("options", {})
        if self.settings.pooling == "none":
            raise BadRequest("this server gives a vector for each token (pooling none); /embeddings has them")
        if "embedding" not in model.capabilities:
            raise BadRequest(f'"{model.id}" does not support embeddings', "model")
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


def _shortened(vector: Sequence[float], size: int) -> list[float]:
    """Keep the first `size` values, scaled to length 1. With `size` 0, keep the vector unchanged."""
    if not 0 < size < len(vector):
        return list(vector)
    kept = vector[:size]
    length = math.sqrt(sum(value * value for value in kept))
    return [value / length for value in kept] if length > 0 else list(kept)
