"""`/v1/models`: the models in the formats of OpenAI, llama.cpp and Anthropic, merged into one object."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request

from localllm.hub.derived import LATEST
from localllm.server.errors import UnknownModel
from localllm.server.http import Handlers
from localllm.server.info import ModelInfo
from localllm.server.service import Service
from localllm.server.settings import ServerSettings
from localllm.server.turn import Json

_VOCABULARIES = {"llama": 1, "gpt2": 2, "gemma4": 2, "bert": 3, "t5": 4, "rwkv": 5, "plamo2": 6}  # llama_vocab_type


class OpenAIModels(Handlers):
    """HTTP handlers of the model list and of a single model."""

    async def every(self, request: Request) -> Json:
        """List all models, loaded or not."""
        models = self.service.models()
        ids = [model.id for model in models]
        return {
            "object": "list",
            "data": [self._entry(model) for model in models],
            "models": [tag_json(model) for model in models],
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": False,
        }

    async def one(self, request: Request) -> Json:
        """Return the model with this name. An unknown name is an error here, unlike in generation requests."""
        name = request.path_params["model"]
        return self._entry(exactly(self.service, self.settings, name))

    def _entry(self, model: ModelInfo) -> Json:
        """Return an entry of `data` with llama.cpp's `aliases` and `tags`, which the command line sets."""
        return model_json(model) | {"aliases": list(self.settings.aliases), "tags": list(self.settings.tags)}


def exactly(service: Service, settings: ServerSettings, name: str) -> ModelInfo:
    """Return the model with this name; raise UnknownModel even if the server has only one model."""
    found = next((model for model in service.models() if model.id == name or name in settings.aliases), None)
    if found is None:
        raise UnknownModel(f"no model {name!r}; /v1/models lists them")
    return found


def model_json(model: ModelInfo) -> Json:
    """Return an entry of `data`: OpenAI's four fields, Anthropic's three, and llama.cpp's `meta` and `status`."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "localllm",
        "type": "model",
        "display_name": model.id,
        "created_at": modified(model),
        "status": {"value": model.state, "failed": model.state == "failed"},
        "architecture": {"input_modalities": ["text", *model.reads], "output_modalities": ["text"]},
        "meta": {
            "vocab_type": _VOCABULARIES.get(model.tokenizer, 0),
            "n_vocab": model.vocabulary,
            "n_ctx": model.context,
            "n_ctx_train": model.trained_context,
            "n_embd": model.width,
            "n_params": model.parameters,
            "size": model.file_bytes,
            "ftype": model.quantization,
        },
    }


def tag_json(model: ModelInfo) -> Json:
    """Return an entry of `models`, as in llama.cpp and Ollama."""
    return {
        "name": model.id,
        "model": model.id,
        "modified_at": modified(model),
        "size": model.file_bytes,
        "digest": model.digest,
        "type": "model",
        "description": "",
        "tags": [],
        "capabilities": list(model.capabilities),
        "parameters": "",
        "details": gguf_details(model, _parameter_size(model.parameters)),
    }


def gguf_details(model: ModelInfo, parameters: str) -> Json:
    """Return `details` of a model, as in llama.cpp and Ollama."""
    return {
        "parent_model": model.derived.base if model.derived is not None else "",
        "format": "gguf",
        "family": model.architecture,
        "families": [model.architecture],
        "parameter_size": parameters,
        "quantization_level": model.quantization,
    }


def _parameter_size(count: int) -> str:
    """Return a parameter count such as 8.0B or 135.0M."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def modified(model: ModelInfo) -> str:
    """Return the modification time of the file. File systems can hold times that dates cannot."""
    return datetime.fromtimestamp(min(max(model.created, 0), LATEST), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
