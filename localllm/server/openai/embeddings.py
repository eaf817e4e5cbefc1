"""`/v1/embeddings` and `/v1/rerank`: vectors of texts, and scores of documents for a query."""

from __future__ import annotations

import base64
import math
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from starlette.requests import Request

from localllm.server.content import Parts, joined
from localllm.server.errors import BadRequest, NotSupported
from localllm.server.http import Handlers
from localllm.server.openai.inputs import as_prompt, read_inputs
from localllm.server.structs import MISSING, Body, wrong
from localllm.server.turn import Json

MAX_INPUTS = 2048
MAX_DOCUMENTS = 10_000
MAX_DIMENSIONS = 1 << 20
NOUNS = {"embedding": "embeddings", "rerank": "ranking"}


class EmbeddingsBody(Body):
    """The body of an embeddings request."""

    model: str = ""
    input: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None = None


class Document(Body):
    """A document as an object."""

    text: Parts


Documents = Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_DOCUMENTS)]


class RankBody(Body):
    """The body of a rerank request: Jina's and Cohere's `documents`, or TEI's `texts`."""

    query: str
    model: str = ""
    documents: Documents | None = None
    texts: Documents | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool = False
    return_text: bool = False


class Embeddings(Handlers):
    """HTTP handlers of embeddings and reranking."""

    async def embed(self, request: Request, body: EmbeddingsBody) -> Json:
        """Return a vector for each input."""
        model = self._model(body.model, "embedding")
        inputs = read_inputs(body.input, "input", MAX_INPUTS)
        texts = [await as_prompt(self.service, model, given) for given in inputs]
        if self.settings.pooling == "none":
            raise BadRequest("this server returns a vector per token (pooling none); use /embeddings")
        result = await self.service.embed(model, texts, self.settings.pooling)
        width = min(map(len, result.vectors))
        if body.dimensions is not None and body.dimensions > width:
            raise BadRequest(f"dimensions: the model's vectors have {width}", "dimensions")
        vectors = [shortened(vector, body.dimensions or 0) for vector in result.vectors]
        return {
            "object": "list",
            "model": model,
            "data": [
                {"object": "embedding", "index": number, "embedding": _encoded(vector, body.encoding_format)}
                for number, vector in enumerate(vectors)
            ],
            "usage": _usage(result.tokens),
        }

    async def rank(self, request: Request, body: RankBody) -> Json | list[Any]:
        """Return the documents sorted by score, in the format of Jina and Cohere or, if the request has `texts`, of
        TEI."""
        model = self._model(body.model, "rerank")
        tei = body.documents is None and body.texts is not None
        given = body.texts if tei else body.documents
        if given is None:
            raise wrong(MISSING, "documents")
        documents = [each if isinstance(each, str) else joined(each.text) for each in given]
        shown = body.return_text if tei else body.return_documents
        result = await self.service.rank(model, body.query, documents)
        scores = [float(vector[0]) for vector in result.vectors]
        order = sorted(range(len(scores)), key=lambda number: -scores[number])[: body.top_n]
        if tei:
            return [
                {"index": each, "score": scores[each]} | ({"text": documents[each]} if shown else {}) for each in order
            ]
        results = [
            {"index": each, "relevance_score": scores[each]}
            | ({"document": {"text": documents[each]}} if shown else {})
            for each in order
        ]
        named = body.model or model  # the name in the request, as in the APIs of Jina, Cohere, llama.cpp
        return {"object": "list", "model": named, "results": results, "usage": _usage(result.tokens)}

    def _model(self, name: str, capability: str) -> str:
        """Return the id of the requested model; raise NotSupported if the model lacks this capability."""
        found = self.service.find(name)
        if capability not in found.capabilities and not (capability == "embedding" and found.pools):
            raise NotSupported(f"model {found.id} cannot do this; it needs a model for {NOUNS[capability]}")
        return found.id


def _usage(tokens: int) -> Json:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def shortened(vector: list[float], size: int) -> list[float]:
    """Return the first `size` values, scaled to length 1, for models trained for truncation (Matryoshka). With `size` 0
    or more than there are, return the vector unchanged."""
    if not 0 < size < len(vector):
        return vector
    cut = vector[:size]
    length = math.sqrt(math.fsum(number * number for number in cut))
    return [number / length for number in cut] if length > 0 else cut


def _encoded(vector: list[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return vector
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode("ascii")
