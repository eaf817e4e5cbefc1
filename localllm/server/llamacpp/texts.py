"""POST /tokenize, /detokenize and /apply-template: convert text to tokens and back, and render chats."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request

from localllm.server.http import Handlers
from localllm.server.llamacpp.prompts import tokens
from localllm.server.openai.chat import ChatBody, read_chat
from localllm.server.structs import ITEMS, Body
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
