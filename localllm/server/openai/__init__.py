"""OpenAI's API: chat completions, completions, responses, embeddings and models. Also the rerank API of Jina and
Cohere.

Each request becomes a `Turn` or a `Completion`, whose events become OpenAI's objects. Extensions by llama.cpp and vLLM
are supported.
"""

from __future__ import annotations

from starlette.routing import Route

from localllm.server.http import get, post, post_form
from localllm.server.openai.chat import Chat
from localllm.server.openai.completions import Completions
from localllm.server.openai.embeddings import Embeddings
from localllm.server.openai.models import OpenAIModels
from localllm.server.openai.responses.routes import Responses
from localllm.server.openai.studio import Studio
from localllm.server.openai.transcriptions import Transcriptions
from localllm.server.service import Service
from localllm.server.settings import ServerSettings


def routes(service: Service, settings: ServerSettings) -> list[Route]:
    """Return the routes of OpenAI's API."""
    chat, completions = Chat(service, settings), Completions(service, settings)
    sounds = Transcriptions(service, settings)
    responses, embeddings, models = (
        Responses(service, settings),
        Embeddings(service, settings),
        OpenAIModels(service, settings),
    )
    studio, limits = Studio(service, settings), settings.limits
    return [
        *post(("/v1/chat/completions", "/chat/completions"), chat.complete, limits),
        *post(("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"), chat.count, limits),
        *post(("/v1/completions",), completions.complete, limits),
        *post(("/v1/responses", "/responses"), responses.create, limits),
        *post(("/v1/responses/input_tokens", "/responses/input_tokens"), responses.count, limits),
        *post(("/v1/embeddings",), embeddings.embed, limits),
        *post(("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"), embeddings.rank, limits),
        *post_form(("/v1/audio/transcriptions", "/audio/transcriptions"), sounds.create, limits),
        *get(("/v1/models", "/models"), models.every),
        *get(("/v1/models/{model:path}", "/models/{model:path}"), models.one),
        *get(("/api/v0/models",), studio.every),
        *get(("/api/v0/models/{model:path}",), studio.one),
        *post(("/api/v0/chat/completions",), studio.chat, limits),
        *post(("/api/v0/completions",), studio.complete, limits),
        *post(("/api/v0/embeddings",), studio.embed, limits),
    ]
