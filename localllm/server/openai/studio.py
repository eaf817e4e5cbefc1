"""LM Studio's REST API, /api/v0: OpenAI's requests, whose answers also have statistics and facts about the model."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from localllm import __version__
from localllm.server.http import Handlers
from localllm.server.info import ModelInfo
from localllm.server.openai.chat import Chat, ChatBody
from localllm.server.openai.completions import CompletionBody, Completions
from localllm.server.openai.embeddings import Embeddings, EmbeddingsBody
from localllm.server.openai.models import exactly
from localllm.server.turn import Json

STOPS = {"stop": "eosFound", "length": "maxPredictedTokensReached", "tool_calls": "toolCalls"}


class Studio(Handlers):
    """HTTP handlers of LM Studio's API. Streams have the chunks of OpenAI's API."""

    async def every(self, request: Request) -> Json:
        """List all models."""
        return {"object": "list", "data": [studio_json(model) for model in self.service.models()]}

    async def one(self, request: Request) -> Json:
        """Return the model with this name."""
        return studio_json(exactly(self.service, self.settings, request.path_params["model"]))

    async def chat(self, request: Request, body: ChatBody) -> Response | Json:
        return self._told(await Chat(self.service, self.settings).complete(request, body))

    async def complete(self, request: Request, body: CompletionBody) -> Response | Json:
        return self._told(await Completions(self.service, self.settings).complete(request, body))

    async def embed(self, request: Request, body: EmbeddingsBody) -> Json:
        return await Embeddings(self.service, self.settings).embed(request, body)

    def _told(self, answer: Response | Json) -> Response | Json:
        """Add LM Studio's fields to a complete answer."""
        if isinstance(answer, Response):
            return answer
        model, timings = self.service.find(answer["model"]), answer["timings"]
        reason = answer["choices"][0]["finish_reason"]
        return answer | {
            "stats": {
                "tokens_per_second": timings["predicted_per_second"],
                "time_to_first_token": timings["prompt_ms"] / 1000,
                "generation_time": timings["predicted_ms"] / 1000,
                "stop_reason": STOPS.get(reason, reason),
            },
            "model_info": {
                "arch": model.architecture,
                "quant": model.quantization,
                "format": "gguf",
                "context_length": model.context,
            },
            "runtime": {"name": "localllm", "version": __version__, "supported_formats": ["gguf"]},
        }


def studio_json(model: ModelInfo) -> Json:
    """Return an entry of LM Studio's list. The publisher is the first folder of the model's name."""
    loaded = model.state == "loaded"
    return {
        "id": model.id,
        "object": "model",
        "type": "embeddings" if "embedding" in model.capabilities else "llm",
        "publisher": model.id.rpartition("/")[0].partition("/")[0],
        "arch": model.architecture,
        "compatibility_type": "gguf",
        "quantization": model.quantization,
        "state": "loaded" if loaded else "not-loaded",
        "max_context_length": model.trained_context,
    } | ({"loaded_context_length": model.context} if loaded else {})
