"""One turn of a conversation, as every protocol asks for it and as every protocol is told of it.

    OpenAI, Anthropic, Ollama, llama.cpp  ->  Turn  ->  Service.answer  ->  Event ...  ->  the protocol's own events

A protocol translates its request into a `Turn` (or a `Completion`) and the events back; it knows nothing of templates,
tokens or the scheduler. The events are the core's (`localllm.scheduler.request`), with their parts. An answer that
fills its context ends for the reason "length".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from localllm.answer.structure import Structure as Structure  # protocols name it, too
from localllm.answer.thinking import Thinking as Thinking

Json = dict[str, Any]
ToolChoice = Literal["auto", "none", "required"]
Continued = Literal["", "content", "reasoning_content"]
SlotAction = Literal["save", "restore", "erase"]


@dataclass(frozen=True, slots=True)
class Generation:
    """What turns and plain completions have in common."""

    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingOptions; the rest as the file says
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    sampled: bool = False  # the log-probabilities are those after the sampling options
    structure: Structure | None = None
    n: int = 1  # answers to the same prompt
    reuse: bool = True
    slot: int = -1  # that saves and restores mean; -1: a free one
    priority: int = 0
    client: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """The next message of a conversation is wanted.

    `messages` have OpenAI's form: role, content (a text, or parts whose `type` is "text"), `tool_calls`,
    `tool_call_id`, `name`, `reasoning_content`. `tools` are OpenAI's: {"type": "function", "function": {...}}.
    """

    messages: Sequence[Mapping[str, Any]]
    generation: Generation = field(default_factory=Generation)
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    forced_tool: str = ""  # the name of the one tool to call
    parallel_calls: bool = True
    calls_inline: bool = False  # calls stay in the content, as the model writes them
    thinking: Thinking = field(default_factory=Thinking)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False  # the last message is the assistant's, and is continued
    continues: Continued = ""  # which part of it; "": its content, or its thought if it has no content


@dataclass(frozen=True, slots=True)
class Completion:
    """The continuation of a text or of token ids, or of what belongs between a text and its `suffix`."""

    prompt: str | Sequence[int]
    generation: Generation = field(default_factory=Generation)
    suffix: str | None = None
    extra: Sequence[tuple[str, str]] = ()  # files for infilling: (name, text)
    echo_logprobs: bool = False  # log-probabilities of the prompt too
    parse_special: bool = True
    add_special: bool = True


class ModelInfo(Protocol):
    """What protocols say of a model."""

    id: str
    created: int  # seconds since 1970: the file's time
    context: int  # tokens of one request
    trained_context: int
    vocabulary: int
    width: int
    tokenizer: str  # the kind as the file names it: llama, gpt2, ...
    parameters: int
    file_bytes: int
    path: str
    architecture: str
    quantization: str
    template: str  # source of the chat template, or ""
    bos: str  # the text of the token that begins a text, or ""
    eos: str  # of the one that ends it
    end_tokens: tuple[int, ...]  # ids of all tokens that end an answer
    state: Literal["unloaded", "loading", "loaded", "failed"]
    capabilities: tuple[str, ...]  # of: completion, chat, tools, thinking, insert, embedding, rerank
    digest: str


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """A vector or one score for each text, and how many tokens they took. Pooling "none" gives `rows` instead."""

    vectors: list[list[float]]
    tokens: int
    rows: list[list[list[float]]] = field(default_factory=list)  # texts, tokens, width
    steps: int = 0  # passes of the model
