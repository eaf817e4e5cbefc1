"""POST /tokenize, /detokenize and /apply-template: convert text to tokens and back, and render chats."""

from __future__ import annotations

from starlette.requests import Request

from localllm.server.fields import Fields
from localllm.server.interface import Service
from localllm.server.llamacpp.prompts import tokens
from localllm.server.openai.request import read_chat
from localllm.server.turn import Json


class Texts:
    """HTTP handlers of /tokenize, /detokenize and /apply-template."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def tokenize(self, request: Request, fields: Fields) -> Json:
        model = self.service.find(fields.text("model", "")).id
        if not fields.has("content"):
            return {"tokens": []}
        ids = await tokens(
            self.service,
            model,
            fields.data["content"],
            "content",
            add_special=fields.flag("add_special", False),
            parse_special=fields.flag("parse_special", True),
        )
        if not fields.flag("with_pieces", False):
            return {"tokens": ids}
        pieces = await self.service.pieces(model, ids)
        return {"tokens": [{"id": id, "piece": _piece(piece)} for id, piece in zip(ids, pieces, strict=True)]}

    async def detokenize(self, request: Request, fields: Fields) -> Json:
        model = self.service.find(fields.text("model", "")).id
        ids = await tokens(self.service, model, list(fields.integers("tokens")), "tokens")
        return {"content": b"".join(await self.service.pieces(model, ids)).decode("utf-8", "replace")}

    async def apply_template(self, request: Request, fields: Fields) -> Json:
        """Return the rendered prompt of a chat completion request with the same body."""
        model = self.service.find(fields.text("model", "")).id
        return {"prompt": await self.service.render(model, read_chat(fields, "").turn)}


def _piece(piece: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if they are not valid UTF-8."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
