"""POST /embedding in llama.cpp's format. All formats of /rerank are in `openai`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from localllm.server.errors import BadRequest, NotSupported
from localllm.server.fields import Fields
from localllm.server.interface import Service
from localllm.server.llamacpp.prompts import split, tokens
from localllm.server.settings import ServerSettings

MAX_PARTS = 10_000


class Vectors:
    """HTTP handlers of embeddings."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self.service = service
        self.settings = settings

    async def embed(self, request: Request, fields: Fields) -> list[Any]:
        model = self.service.find(fields.text("model", ""))
        if "embedding" not in model.capabilities:
            raise NotSupported("this model does not make embeddings")
        name = "input" if fields.has("input") else "content"
        if not fields.has(name):
            raise BadRequest('"input" or "content" must be provided', "input")
        fields.choice("encoding_format", ("float", "base64"), "float")  # base64 is only supported by /v1/embeddings
        texts = [await read_inputs(self.service, model.id, each, name) for each in split(fields.data[name], name)]
        norm = fields.integer("embd_normalize", 2, -1, 1000)
        found = await self.service.embed(model.id, texts, self.settings.pooling, norm == 2)
        rows = found.rows or [[_normalized(vector, norm)] for vector in found.vectors]
        return [{"index": index, "embedding": each} for index, each in enumerate(rows)]


async def read_inputs(service: Service, model: str, value: Any, name: str) -> list[int]:
    """Return the tokens of one text to embed. The text may also be an object with OpenAI's text parts."""
    if isinstance(value, dict) and "content" in value:
        parts = Fields(value, name).each("content", MAX_PARTS)
        value = "".join(_text(part) for part in parts)
    found = await tokens(service, model, value, name)
    if not found:
        raise BadRequest("Input content cannot be empty", name)
    return found


def _text(part: Fields) -> str:
    if part.text("type") != "text":
        raise NotSupported(f"{part.where}: only parts of type text are supported")
    return part.text("text")


def _normalized(vector: Sequence[float], norm: int) -> list[float]:
    """Normalize a vector. `norm` -1: unchanged; 0: scale the largest value to 32760 (16-bit range); p > 0: use the
    p-norm."""
    if norm == -1:
        return list(vector)
    if norm == 0:
        size = max((abs(value) for value in vector), default=0.0) / 32760.0
    elif norm == 2:
        size = math.sqrt(sum(value * value for value in vector))
    else:
        size = _p_norm(vector, norm)
    return [value / size for value in vector] if size > 0 else list(vector)


def _p_norm(vector: Sequence[float], p: int) -> float:
    largest = max((abs(value) for value in vector), default=0.0)
    if largest == 0:
        return 0.0
    total: float = sum((abs(value) / largest) ** p for value in vector)
    return float(largest * total ** (1.0 / p))
