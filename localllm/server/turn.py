"""One turn of a conversation, as every protocol asks for it and as every protocol is told of it.

    OpenAI, Anthropic, Ollama, llama.cpp  ->  Turn  ->  Service.answer  ->  TurnEvent ...  ->  the protocol's own events

A protocol translates its request into a `Turn` (or a `Completion`) and the events back; it knows nothing of templates,
tokens or the scheduler.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from localllm.answer.parts import Part
from localllm.answer.structure import Structure as Structure  # protocols name it, too
from localllm.answer.thinking import Thinking as Thinking
from localllm.options import SamplingOptions
from localllm.scheduler.request import Logprob, Usage

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


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt of answer number `answer` is known."""

    prompt_tokens: int
    reused: int
    answer: int = 0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """More of the prompt is evaluated."""

    tokens: int
    answer: int = 0
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class More:
    """More of answer number `answer`: parts that a token completed, and its log-probability if wanted.

    `parts` is empty if the token completed none; plain completions have only `Content`.
    """

    parts: tuple[Part, ...]
    token: int | None = None
    logprob: Logprob | None = None
    answer: int = 0


StopReason = Literal["end", "stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True)
class Done:
    """The end of answer number `answer`."""

    reason: StopReason
    usage: Usage
    stop: str = ""
    answer: int = 0


TurnEvent = Begun | Evaluated | More | Done


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


class Service(Protocol):
    """What the protocols use. Errors are LocalLLMError; `refusal.py` gives their status and kind."""

    def models(self) -> Sequence[ModelInfo]:
        """All models that can be asked for, those that are not loaded included."""
        ...

    def find(self, name: str) -> ModelInfo:
        """The model of a request; "" and unknown names give the only model, or UnknownModel if there are several."""
        ...

    def answer(self, model: str, turn: Turn) -> AsyncIterator[TurnEvent]:
        """Stream an answer. Closing the iterator ends it at the next step."""
        ...

    def complete(self, model: str, completion: Completion) -> AsyncIterator[TurnEvent]: ...

    async def count(self, model: str, turn: Turn) -> int:
        """Return how many tokens the prompt of a turn has."""
        ...

    async def render(self, model: str, turn: Turn) -> str:
        """Return the prompt of a turn as text."""
        ...

    async def prompt_ids(self, model: str, turn: Turn) -> list[int]:
        """Return the tokens of the prompt of a turn."""
        ...

    async def tokenize(self, model: str, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of a text. ContextFull, before any work, if it is too long for any context of this size."""
        ...

    async def tokenize_all(
        self, model: str, texts: Sequence[str], add_special: bool, parse_special: bool
    ) -> list[list[int]]:
        """Return the tokens of each text. `add_special` is for the first one. Their sum is limited like one text."""
        ...

    async def pieces(self, model: str, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token."""
        ...

    async def embed(
        self, model: str, texts: Sequence[str | Sequence[int]], pooling: str = "auto", normalize: bool = True
    ) -> EmbedResult:
        """Return a vector for each text, of length 1 if `normalize`; with pooling "none" one for each token."""
        ...

    async def rank(self, model: str, query: str, documents: Sequence[str]) -> EmbedResult: ...

    async def slot(self, model: str, number: int, action: SlotAction, name: str) -> tuple[int, int]:
        """Save what a slot evaluated last in a file, restore it, or erase it; return tokens, and bytes of the file."""
        ...

    def sampling_defaults(self, model: str) -> SamplingOptions: ...


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """A vector or one score for each text, and how many tokens they took. Pooling "none" gives `rows` instead."""

    vectors: list[list[float]]
    tokens: int
    rows: list[list[list[float]]] = field(default_factory=list)  # texts, tokens, width
    steps: int = 0  # passes of the model
