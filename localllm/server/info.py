"""Describe a model from its GGUF file without loading it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

from localllm.base.errors import LocalLLMError
from localllm.gguf import open_gguf
from localllm.gguf.identity import identity
from localllm.hub.stored_model import DerivedModel
from localllm.model import Model
from localllm.models import ModelError, architecture_of
from localllm.server.prompts import Prompts

State = Literal["unloaded", "loading", "loaded", "failed"]


@dataclass(slots=True)
class ModelInfo:
    """The description of a model file, loaded or not."""

    id: str
    path: str
    created: int  # modification time of the file in seconds since 1970
    file_bytes: int
    architecture: str = ""
    quantization: str = ""
    parameters: int = 0
    context: int = 0  # maximum tokens of one request
    trained_context: int = 0
    vocabulary: int = 0
    width: int = 0
    tokenizer: str = ""  # tokenizer model named in the file: llama, gpt2, ...
    template: str = ""  # source of the chat template, or ""
    bos: str = ""  # text of the BOS token, or ""
    eos: str = ""  # text of the EOS token, or ""
    end_tokens: tuple[int, ...] = ()  # ids of all end-of-generation tokens
    digest: str = ""
    # subset of: completion, chat, tools, thinking, insert, embedding, rerank, vision, audio, multimodal
    capabilities: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()  # "image", "audio", once the model is loaded
    state: State = "unloaded"
    expires: float = 0.0  # when it is unloaded without requests, in seconds since 1970; 0: when memory is needed
    derived: DerivedModel | None = None  # what this model adds to its base

    @property
    def pools(self) -> bool:
        """Whether to try the model for vectors. A chat model gives them if its device supports it."""
        return "embedding" in self.capabilities or "completion" in self.capabilities


def info_of(name: str, path: Path, model: Model | None = None, embeds: bool = False) -> ModelInfo:
    """Return the entry of a model file, with the context if the model is loaded. A damaged file has the state "failed".

    `embeds` is true if the server loads models for embeddings.
    """
    try:
        status = path.stat()
    except OSError:
        return ModelInfo(name, str(path), 0, 0, state="failed")
    known = ModelInfo(name, str(path), int(status.st_mtime), status.st_size)
    try:
        with open_gguf(path) as file:
            data = file.metadata
            architecture = architecture_of(data)
            sizes: Counter[str] = Counter()
            for tensor in file.tensors.values():
                sizes[tensor.format] += tensor.nbytes
            tokens = data.get("tokenizer.ggml.tokens")
            trained = _number(data.get(f"{architecture.name}.context_length"))
            template = model.template_source if model is not None else data.get("tokenizer.chat_template", "")
            return ModelInfo(
                id=name,
                path=str(path),
                created=known.created,
                file_bytes=sum(sizes.values()) or known.file_bytes,
                architecture=architecture.name,
                quantization=sizes.most_common(1)[0][0] if sizes else "",
                parameters=sum(prod(tensor.shape) for tensor in file.tensors.values()),
                context=model.context if model is not None else trained,
                trained_context=trained,
                vocabulary=len(tokens) if isinstance(tokens, Sized) else 0,
                tokenizer=str(data.get("tokenizer.ggml.model", "")),
                width=_number(data.get(f"{architecture.name}.embedding_length")),
                template=template if isinstance(template, str) else "",
                bos=_token(model, "bos"),
                eos=_token(model, "eos"),
                end_tokens=tuple(sorted(model.tokenizer.eog)) if model is not None and model.maybe_tokenizer else (),
                digest=identity(file),
                reads=model.reads if model is not None else (),
                capabilities=_capabilities(
                    model, embeds or architecture.encoder, template if isinstance(template, str) else ""
                ),
            )
    except (LocalLLMError, ModelError, ValueError, TypeError, OSError):
        return ModelInfo(name, str(path), known.created, known.file_bytes, state="failed")


def _token(model: Model | None, name: Literal["bos", "eos"]) -> str:
    """Return the text of a loaded model's BOS or EOS token."""
    tokenizer = model.maybe_tokenizer if model is not None else None
    token = None if tokenizer is None else tokenizer.bos if name == "bos" else tokenizer.eos
    return "" if tokenizer is None or token is None else tokenizer.piece(token).decode("utf-8", "replace")


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _capabilities(model: Model | None, embeds: bool, template: str) -> tuple[str, ...]:
    if embeds or (model is not None and model.embeds):
        ranks = model is not None and model.embeds and model.embedder.pooling("auto") == "rank"
        return ("embedding", "rerank") if ranks else ("embedding",)
    found = ["completion"] if model is not None and model.encodes else ["completion", "chat"]
    found += ["tools"] if "tools" in template else []
    found += ["insert"] if model is not None and model.maybe_tokenizer is not None and Prompts(model).fills else []
    reads = model.reads if model is not None else ()
    found += ["multimodal"] * bool(reads) + ["vision"] * ("image" in reads) + ["audio"] * ("audio" in reads)
    found += ["thinking"] if any(mark in template for mark in ("think", "reasoning")) else []
    return tuple(found)
