"""POST /tokenize, /detokenize, /apply-template and /embedding: convert text to tokens and back, render chats, and embed
texts. All formats of /rerank are in `openai`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.requests import Request

from localllm.server.errors import BadRequest, NotSupported
from localllm.server.http import Handlers
from localllm.server.llamacpp.prompts import split, tokens
from localllm.server.openai.chat import ChatBody, read_chat
from localllm.server.service import Service
from localllm.server.structs import ITEMS, MISSING, Body, Wrong, read
from localllm.server.turn import Json


class TokenizeBody(Body):
    """The body of /tokenize."""

    model: str = ""
    content: Any = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str = ""
    tokens: Annotated[list[int], Meta(max_length=10 * ITEMS)] = []


class Texts(Handlers):
    """HTTP handlers of /tokenize, /detokenize and /apply-template."""

    async def tokenize(self, request: Request, body: TokenizeBody) -> Json:
        model = self.service.find(body.model).id
        if body.content is None:
            return {"tokens": []}
        ids = await tokens(
            self.service,
            model,
            body.content,
            "content",
            add_special=body.add_special,
            parse_special=body.parse_special,
        )
        if not body.with_pieces:
            return {"tokens": ids}
        pieces = await self.service.pieces(model, ids)
        return {"tokens": [{"id": id, "piece": _piece(piece)} for id, piece in zip(ids, pieces, strict=True)]}

    async def detokenize(self, request: Request, body: DetokenizeBody) -> Json:
        model = self.service.find(body.model).id
        ids = await tokens(self.service, model, body.tokens, "tokens")
        return {"content": b"".join(await self.service.pieces(model, ids)).decode("utf-8", "replace")}

    async def apply_template(self, request: Request, body: ChatBody) -> Json:
        """Return the rendered prompt of a chat completion request with the same body."""
        model = self.service.find(body.model).id
        return {"prompt": (await self.service.prompt(model, read_chat(body, ""))).text}


def _piece(piece: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if they are not valid UTF-8."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


MAX_PARTS = 10_000


class EmbeddingBody(Body):
    """The body of an embedding request. Only /v1/embeddings supports base64."""

    model: str = ""
    input: Any = None
    content: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    embd_normalize: Annotated[int, Meta(ge=-1, le=1000)] = 2


class TextPart(Body):
    """A text part of an input."""

    type: str
    text: str | None = None

    def __post_init__(self) -> None:
        if self.type != "text":
            raise NotSupported("only parts of type text are supported")
        if self.text is None:
            raise Wrong("text", MISSING)


class TextParts(Body):
    """An input with OpenAI's text parts."""

    content: Annotated[list[TextPart], Meta(max_length=MAX_PARTS)] = []


class Vectors(Handlers):
    """HTTP handlers of embeddings."""

    async def embed(self, request: Request, body: EmbeddingBody) -> list[Any]:
        model = self.service.find(body.model)
        if not model.pools:
            raise NotSupported("this model does not make embeddings")
        name = "content" if body.input is None else "input"
        given, norm = getattr(body, name), body.embd_normalize
        if given is None:
            raise BadRequest('"input" or "content" must be provided', "input")
        texts = [await read_inputs(self.service, model.id, each, name) for each in split(given, name)]
        found = await self.service.embed(model.id, texts, self.settings.pooling, norm == 2)
        rows = found.rows or [[_normalized(vector, norm)] for vector in found.vectors]
        return [{"index": index, "embedding": each} for index, each in enumerate(rows)]


async def read_inputs(service: Service, model: str, value: Any, name: str) -> list[int]:
    """Return the tokens of one text to embed. The text may also be an object with OpenAI's text parts."""
    if isinstance(value, dict) and "content" in value:
        value = "".join(part.text or "" for part in read(value, TextParts, name).content)
    found = await tokens(service, model, value, name)
    if not found:
        raise BadRequest("Input content cannot be empty", name)
    return found


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
