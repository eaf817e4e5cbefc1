"""Scripted management of models: the routes that download, delete, load and unload, over the models of a scripted
service.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from localllm.server.info import ModelInfo, State
from localllm.server.web.known import short_names
from tests.localllm.server.scripted import ScriptedService

Line = dict[str, Any] | bytes | float  # a float is a pause in seconds


def part(total: int, completed: int, digest: str = "sha256:a") -> dict[str, Any]:
    """Return a stream's progress line for one file."""
    return {"status": "pulling a.gguf", "digest": digest, "total": total, "completed": completed}


class Management:
    """Answers the requests that manage models.

    `pulls` has the streams of the next downloads in order, and `made` is the model that exists after a successful one.
    """

    def __init__(
        self, service: ScriptedService, pulls: Sequence[Sequence[Line]] = (), made: ModelInfo | None = None
    ) -> None:
        self.service, self.pulls, self.made = service, list(pulls), made
        self.asked: list[tuple[str, str]] = []  # (path, name of the model)
        self.names: dict[str, str] = {}  # the user's short names
        self.refusal = ""  # text of the error that deleting gives
        self.left = 0  # number of downloads whose client has left

    def routes(self) -> list[Route]:
        return [
            Route("/api/known", self.known),
            Route("/api/pull", self.pull, methods=["POST"]),
            Route("/api/delete", self.delete, methods=["DELETE"]),
            Route("/models/load", self.change, methods=["POST"]),
            Route("/models/unload", self.change, methods=["POST"]),
        ]

    async def known(self, request: Request) -> Response:
        return JSONResponse({"models": short_names(self.names), "load": True, "download": True, "reason": ""})

    async def _name(self, request: Request) -> str:
        name = str((await request.json())["model"])
        self.asked.append((request.url.path, name))
        return name

    async def pull(self, request: Request) -> Response:
        await self._name(request)
        return StreamingResponse(self._lines(self.pulls.pop(0)), media_type="application/x-ndjson")

    async def _lines(self, lines: Sequence[Line]) -> AsyncIterator[bytes]:
        try:
            for line in lines:
                if isinstance(line, float):
                    await asyncio.sleep(line)
                else:
                    if line == {"status": "success"} and self.made is not None:
                        self.service.infos = [*self.service.infos, self.made]
                    yield line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise

    async def delete(self, request: Request) -> Response:
        name = await self._name(request)
        if self.refusal:
            return JSONResponse({"error": self.refusal}, 400)
        self.service.infos = [model for model in self.service.infos if model.id != name]
        return JSONResponse({})

    async def change(self, request: Request) -> Response:
        name = await self._name(request)
        state: State = "unloaded" if request.url.path.endswith("/unload") else "loaded"
        infos = self.service.infos
        self.service.infos = [replace(model, state=state) if model.id == name else model for model in infos]
        return JSONResponse({"success": True})
