"""POST /tokenize, /detokenize, /apply-template: from texts to tokens and back."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from localllm.server.errors import NotSupported
from localllm.server.fields import Fields
from localllm.server.llamacpp.prompts import tokens
from localllm.server.turn import Json, Service, Thinking, Turn

MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Texts:
    """The handlers of texts."""

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
        model = self.service.find(fields.text("model", "")).id
        return {"prompt": await self.service.render(model, turn(fields))}


def _piece(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes if they are no characters."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def turn(fields: Fields) -> Turn:
    """Read the messages of a chat request, for its prompt alone."""
    messages = [_message(each) for each in fields.each("messages", MAX_MESSAGES)]
    if not messages:
        raise fields.wrong("messages", "required, but missing or empty")
    variables = dict(fields.object("chat_template_kwargs", {}))
    if fields.has("add_generation_prompt"):
        variables["add_generation_prompt"] = fields.flag("add_generation_prompt")
    thinking = variables.get("enable_thinking")
    return Turn(
        messages,
        tools=[each.data for each in fields.each("tools", MAX_TOOLS) if each.object("function")],
        tool_choice=fields.choice("tool_choice", ("auto", "none", "required"), "auto"),
        thinking=Thinking(enabled=thinking if isinstance(thinking, bool) else None),
        template_variables=variables,
    )


def _message(fields: Fields) -> Json:
    fields.choice("role", ROLES)
    content: Any = fields.data.get("content")
    if content is not None and not isinstance(content, str):
        for part in fields.each("content", MAX_MESSAGES):
            if part.text("type") != "text":
                raise NotSupported(f"{part.where}: only parts of type text are supported")
            part.text("text")
    for call in fields.each("tool_calls", MAX_TOOLS):
        call.inner("function").text("name")
    return fields.data
