"""Anthropic's API: messages and token counting."""

from __future__ import annotations

from starlette.routing import Route

from localllm.server.anthropic.answers import Messages
from localllm.server.http import post
from localllm.server.service import Service
from localllm.server.settings import ServerSettings


def routes(service: Service, settings: ServerSettings) -> list[Route]:
    """Return the routes of Anthropic's API."""
    messages = Messages(service, settings)
    return [
        *post(("/v1/messages",), messages.create, settings.limits),
        *post(("/v1/messages/count_tokens",), messages.count, settings.limits),
    ]
