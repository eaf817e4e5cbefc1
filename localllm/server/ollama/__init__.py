"""Ollama's API: the paths under /api, as described in docs/api.md of 2026-08."""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from localllm.server.http import get, post
from localllm.server.ollama.answers import Answers
from localllm.server.ollama.models import OllamaModels
from localllm.server.ollama.vectors import Vectors
from localllm.server.permission import may_change
from localllm.server.service import Service
from localllm.server.settings import ServerSettings


def routes(service: Service, settings: ServerSettings) -> list[Route]:
    """Return the routes of Ollama's API."""
    answers, models, vectors = Answers(service, settings), OllamaModels(service, settings), Vectors(service, settings)
    posts = (
        ("/api/chat", answers.chat),
        ("/api/generate", answers.generate),
        ("/api/embed", vectors.embed),
        ("/api/embeddings", vectors.embeddings),
        ("/api/show", models.show),
        ("/api/pull", models.pull),
    )
    bodiless = (
        ("/", "GET", models.running),
        ("/api/tags", "GET", models.tags),
        ("/api/ps", "GET", models.ps),
        ("/api/version", "GET", models.version),
        ("/api/push", "POST", models.unsupported),
        ("/api/blobs/{digest}", "HEAD", models.blob),
        ("/api/blobs/{digest}", "POST", models.unsupported),
    )
    made = [route for path, handler in posts for route in post((path,), handler, settings.limits)]
    changes = (
        ("/api/create", models.create, "POST"),
        ("/api/copy", models.copy, "POST"),
        ("/api/delete", models.delete, "DELETE"),
    )
    check = partial(may_change, settings)
    for path, handler, method in changes:
        made += post((path,), handler, settings.limits, method, check)
    return made + [route for path, method, handler in bodiless for route in get((path,), handler, method)]
