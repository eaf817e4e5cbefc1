"""One turn of a conversation, in the form that all APIs share.

    OpenAI, Anthropic, Ollama, llama.cpp  ->  Turn  ->  Service.answer  ->  Event ...  ->  the API's own events

An API handler converts its request to a `Turn` (or a `Completion`) and converts the events back. It does not see
templates, tokens or the scheduler. The events are defined in `localllm.generation.request`. A choice that fills its
context ends with the reason "length".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm.options.structure import Structure as Structure  # re-exported for the API packages
from localllm.options.thinking import Thinking as Thinking

Json = dict[str, Any]
ToolChoice = Literal["auto", "none", "required"]
Continued = Literal["", "content", "reasoning_content"]
SlotAction = Literal["save", "restore", "erase"]
REQUEST = "the request"  # in errors: picture 2 of the request


@dataclass(frozen=True, slots=True)
class Generation:
    """The common options of turns and plain completions."""

    # fields of SamplingOptions by name; missing fields default to the values in the model file
    sampling: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, float] = field(default_factory=dict)  # biases of the tokens of texts
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    sampled: bool = False  # log probabilities are computed after the sampling options
    structure: Structure | None = None
    n: int = 1  # choices for the same prompt
    reuse: bool = True
    slot: int = -1  # number of the slot to use; -1: any free slot
    priority: int = 0
    client: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request for the next message of a conversation.

    `messages` have OpenAI's form: role, content (a text, or parts whose `type` is "text", "image" or "audio", see
    `Upload.part`), `tool_calls`, `tool_call_id`, `name`, `reasoning_content`. `tools` are OpenAI's: {"type":
    "function", "function": {...}}.
    """

    messages: Sequence[Mapping[str, Any]]
    generation: Generation = field(default_factory=Generation)
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    forced_tool: str = ""  # name of the single tool that the model must call
    parallel_calls: bool = True
    calls_inline: bool = False  # tool calls stay in the content, in the model's format
    thinking: Thinking = field(default_factory=Thinking)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False  # the model continues the last message, which is the assistant's
    continues: Continued = ""  # the part to continue; "": the content, or the reasoning if the content is empty


@dataclass(frozen=True, slots=True)
class Completion:
    """A request to continue a text or token ids, or to fill in between a text and its `suffix`."""

    prompt: str | Sequence[int]
    generation: Generation = field(default_factory=Generation)
    suffix: str | None = None
    extra: Sequence[tuple[str, str]] = ()  # files for infilling: (name, text)
    echo_logprobs: bool = False  # also return log probabilities of the prompt
    parse_special: bool = True
    add_special: bool = True
    media: Sequence[Any] = ()  # pictures and sounds, uploads or bytes, one for each marker <__media__> in the prompt


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """One vector or one score per text, and the number of tokens. Pooling "none" gives `rows` instead."""

    vectors: list[list[float]]
    tokens: int
    rows: list[list[list[float]]] = field(default_factory=list)  # (texts, tokens, width)
    steps: int = 0  # number of forward passes
