"""`/v1/embeddings` and `/v1/rerank`: vectors of texts, and scores of documents for a query."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
from starlette.requests import Request

from localllm.server.content import read_text_field
from localllm.server.errors import BadRequest, NotSupported
from localllm.server.fields import Fields
from localllm.server.interface import Service
from localllm.server.openai.inputs import as_prompt, read_inputs
from localllm.server.settings import ServerSettings
from localllm.server.turn import Json

MAX_INPUTS = 2048
MAX_DOCUMENTS = 10_000
MAX_DIMENSIONS = 1 << 20
NOUNS = {"embedding": "embeddings", "rerank": "ranking"}


class Embeddings:
    """HTTP handlers of embeddings and reranking."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self._service, self._settings = service, settings

    async def embed(self, request: Request, fields: Fields) -> Json:
        """Return a vector for each input."""
        model = self._model(fields, "embedding")
        inputs = read_inputs(fields, "input", MAX_INPUTS)
        encoding = fields.choice("encoding_format", ("float", "base64"), "float")
        dimensions = fields.optional_integer("dimensions", 1, MAX_DIMENSIONS)
        texts = [await as_prompt(self._service, model, given) for given in inputs]
        if self._settings.pooling == "none":
            raise BadRequest("this server gives a vector for each token (pooling none); /embeddings has them")
        result = await self._service.embed(model, texts, self._settings.pooling)
        vectors = [_shortened(vector, dimensions) for vector in result.vectors]
        return {
            "object": "list",
            "model": model,
            "data": [
                {"object": "embedding", "index": number, "embedding": _encoded(vector, encoding)}
                for number, vector in enumerate(vectors)
            ],
            "usage": _usage(result.tokens),
        }

    async def rank(self, request: Request, fields: Fields) -> Json | list[Any]:
        """Return the documents sorted by score, in the format of Jina and Cohere or, if the request has `texts`, of
        TEI."""
        model = self._model(fields, "rerank")
        query = fields.text("query")
        tei = fields.has("texts") and not fields.has("documents")
        documents = _documents(fields, "texts" if tei else "documents")
        most = fields.integer("top_n", len(documents), 0)
        shown = fields.flag("return_text" if tei else "return_documents", False)
        result = await self._service.rank(model, query, documents)
        scores = [float(vector[0]) for vector in result.vectors]
        order = sorted(range(len(scores)), key=lambda number: -scores[number])[:most]
        if tei:
            return [
                {"index": each, "score": scores[each]} | ({"text": documents[each]} if shown else {}) for each in order
            ]
        results = [
            {"index": each, "relevance_score": scores[each]}
            | ({"document": {"text": documents[each]}} if shown else {})
            for each in order
        ]
        named = fields.text("model", "") or model  # the name in the request, as in the APIs of Jina, Cohere, llama.cpp
        return {"object": "list", "model": named, "results": results, "usage": _usage(result.tokens)}

    def _model(self, fields: Fields, capability: str) -> str:
        """Return the id of the requested model; raise NotSupported if the model lacks this capability."""
        found = self._service.find(fields.text("model", ""))
        if capability not in found.capabilities:
            raise NotSupported(f"model {found.id} cannot do this; it needs a model for {NOUNS[capability]}")
        return found.id


def _usage(tokens: int) -> Json:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _documents(fields: Fields, name: str) -> list[str]:
    """Return the documents: strings, or objects with a text."""
    items = fields.list(name, None, MAX_DOCUMENTS)
    if not items:
        raise fields.wrong(name, "expected at least one text")
    return [_document(fields, f"{name}[{number}]", item) for number, item in enumerate(items)]


def _document(fields: Fields, place: str, item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, dict):
        inner = Fields(item, fields.path(place))
        return read_text_field(inner, "text") or inner.text("text")
    raise fields.wrong(place, "expected a text or an object with one")


def _shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """Return the first `dimensions` values, scaled to length 1, for models trained for truncation (Matryoshka)."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise BadRequest(f"dimensions: the model's vectors have {len(vector)}", "dimensions")
    cut = vector[:dimensions]
    length = math.sqrt(math.fsum(number * number for number in cut))
    return [number / length for number in cut] if length > 0 else cut


def _encoded(vector: list[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return vector
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode("ascii")
