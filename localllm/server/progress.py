"""The progress of one choice: its tokens and times, and llama.cpp's `timings` and `prompt_progress`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from localllm.generation.request import Event, Prefilled, Started, Token
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
