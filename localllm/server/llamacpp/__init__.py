"""llama.cpp's native API: /completion, /infill, /tokenize, /props, /slots and other paths of llama-server.

llama.cpp's OpenAI paths, under /v1, and /rerank are in `openai`.
"""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from localllm.server.http import get, post
from localllm.server.llamacpp.completion import Completions
from localllm.server.llamacpp.router import Router
from localllm.server.llamacpp.state import StatusRoutes
from localllm.server.llamacpp.texts import Texts, Vectors
from localllm.server.permission import may_unload
from localllm.server.service import Service
from localllm.server.settings import ServerSettings


def routes(service: Service, settings: ServerSettings) -> list[Route]:
    """Return the routes of llama.cpp's native API."""
    completions, vectors = Completions(service, settings), Vectors(service, settings)
    texts, state = Texts(service, settings), StatusRoutes(service, settings)
    router = Router(service, settings)
    posts = (
        (("/completion", "/completions"), completions.complete),
        (("/infill",), completions.infill),
        (("/tokenize",), texts.tokenize),
        (("/detokenize",), texts.detokenize),
        (("/apply-template",), texts.apply_template),
        (("/embedding", "/embeddings"), vectors.embed),
        (("/models/load",), router.load),
    )
    gets = (
        (("/health", "/v1/health"), state.health),
        (("/props",), state.props),
        (("/slots",), state.slots),
        (("/metrics",), state.metrics),
        (("/lora-adapters",), state.adapters),
    )
    bodiless = (
        (("/slots/{id}",), state.change_slot),  # reads a body only for some actions
        (("/props",), state.change_props),
        (("/lora-adapters",), state.change_adapters),
    )
    made = [route for paths, handler in posts for route in post(paths, handler, settings.limits)]
    made += post(("/models/unload",), router.unload, settings.limits, check=partial(may_unload, settings))
    made += [route for paths, handler in gets for route in get(paths, handler)]
    return made + [route for paths, handler in bodiless for route in get(paths, handler, "POST")]
