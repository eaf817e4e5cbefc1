"""Collect the events of one choice: the full output for non-streamed responses, and token counts and times for all
responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.generation.parts import CallArguments, CallStart, Content, Part, Reasoning
from localllm.generation.request import Event, Finished, Prefilled, Started, Token
from localllm.generation.statistics import Usage
from localllm.server.turn import Json

Clock = Callable[[], float]


@dataclass(slots=True, kw_only=True)
class Progress:
    """Tokens and times of a choice, updated from its events."""

    clock: Clock = time.monotonic
    prompt_tokens: int = 0
    reused: int = 0
    evaluated: int = 0  # prompt tokens evaluated so far, including cached tokens
    tokens: int = 0
    began: float = 0.0
    prefilled: float = 0.0  # time of the last event of prefill, or of the first token
    last: float = 0.0  # time of the last token

    def add(self, event: Event) -> None:
        """Update the counts and times."""
        match event:
            case Started():
                self.began = self.clock()
                self.prompt_tokens, self.reused = event.prompt_tokens, event.reused_tokens
                self.evaluated = event.reused_tokens
            case Prefilled():
                self.prefilled = self.clock()
                self.evaluated = event.evaluated
            case Token():
                self.last = self.clock()
                self.prefilled = self.prefilled or self.last
                self.evaluated = self.prompt_tokens
                self.tokens += 1

    @property
    def decode_seconds(self) -> float:
        return max(self.last - self.prefilled, 0.0) if self.tokens else 0.0

    @property
    def usage(self) -> Usage:
        """The usage so far, with the prompt tokens that were evaluated."""
        return Usage(
            prompt_tokens=max(self.evaluated, self.reused),
            reused_tokens=self.reused,
            answer_tokens=self.tokens,
            prompt_seconds=max(self.prefilled - self.began, 0.0) if self.prefilled else 0.0,
            decode_seconds=self.decode_seconds,
        )

    @property
    def timings(self) -> Json:
        """llama.cpp's `timings` so far."""
        return timings(self.usage)

    @property
    def prefill(self) -> Json:
        """llama.cpp's `prompt_progress`."""
        milliseconds = int((self.clock() - self.began) * 1e3)
        return {
            "prompt_progress": {
                "total": self.prompt_tokens,
                "cache": self.reused,
                "processed": self.evaluated,
                "time_ms": milliseconds,
            }
        }


def timings(usage: Usage) -> Json:
    """Return llama.cpp's `timings`: tokens, milliseconds and tokens/s of prefill and decode.

    The prefill step yields the first token, so n tokens take n - 1 decode steps.
    """
    prompt, steps = usage.prompt_tokens - usage.reused_tokens, usage.answer_tokens - 1
    found = {
        "cache_n": usage.reused_tokens,
        "prompt_n": prompt,
        "prompt_ms": usage.prompt_seconds * 1e3,
        "prompt_per_token_ms": _ratio(usage.prompt_seconds * 1e3, prompt),
        "prompt_per_second": _ratio(prompt, usage.prompt_seconds),
        "predicted_n": usage.answer_tokens,
        "predicted_ms": usage.decode_seconds * 1e3,
        "predicted_per_token_ms": _ratio(usage.decode_seconds * 1e3, steps),
        "predicted_per_second": _ratio(steps, usage.decode_seconds),
    }
    if usage.drafted:
        found |= {"draft_n": usage.drafted, "draft_n_accepted": usage.accepted}
    return found


def _ratio(amount: float, count: float) -> float:
    return amount / count if amount > 0 and count > 0 else 0.0


class CollectedCall:
    """A tool call."""

    __slots__ = ("_arguments", "id", "name")

    def __init__(self, id: str, name: str) -> None:
        self.id, self.name = id, name
        self._arguments: list[str] = []

    def add(self, text: str) -> None:
        self._arguments.append(text)

    @property
    def arguments(self) -> str:
        """The arguments as JSON, or an empty object if the model wrote none."""
        return "".join(self._arguments) or "{}"


class Collected:
    """One choice of a turn, with the events received so far."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.thinking_tokens = 0
        self.calls: dict[int, CollectedCall] = {}
        self.done: Finished | None = None
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._thinks = False  # whether the last part was reasoning

    def add(self, event: Event) -> None:
        """Add an event of this choice."""
        self.progress.add(event)
        if isinstance(event, Token | Finished):
            self._add_parts(event.parts)
        if isinstance(event, Token):
            self.thinking_tokens += self._thinks
        elif isinstance(event, Finished):
            self.done = event

    def _add_parts(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._thinks = isinstance(part, Reasoning)
            match part:
                case Reasoning(text):
                    self._reasoning.append(text)
                case Content(text):
                    self._content.append(text)
                case CallStart(index, id, name):
                    self.calls[index] = CollectedCall(id, name)
                case CallArguments(index, json):
                    self.calls[index].add(json)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def usage(self) -> Usage:
        """The usage of this choice. Until the choice ends, it only has the token counts."""
        sofar = self.progress
        return self.done.usage if self.done else Usage(sofar.prompt_tokens, sofar.reused, sofar.tokens)
