"""llama.cpp's `timings`: tokens, milliseconds and tokens/s of prefill and decode."""

from __future__ import annotations

import time
from dataclasses import dataclass

from localllm.generation.statistics import Usage
from localllm.server.turn import Json


@dataclass(slots=True)
class Clock:
    """Timings of an unfinished request, updated from its events."""

    cached: int = 0
    evaluated: int = 0  # prompt tokens evaluated so far, including cached tokens
    predicted: int = 0
    began: float = 0.0
    prompted: float = 0.0  # time of the last prompt progress event
    last: float = 0.0  # time of the last generated token

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=max(self.evaluated, self.cached),
            reused_tokens=self.cached,
            answer_tokens=self.predicted,
            prompt_seconds=max(self.prompted - self.began, 0.0) if self.prompted else 0.0,
            decode_seconds=max(self.last - self.prompted, 0.0) if self.predicted else 0.0,
        )

    def begin(self, cached: int) -> None:
        self.began = time.monotonic()
        self.cached = self.evaluated = cached

    def prompt(self, evaluated: int) -> None:
        self.prompted = time.monotonic()
        self.evaluated = evaluated

    def token(self, prompt_tokens: int) -> None:
        self.evaluated = prompt_tokens
        self.last = time.monotonic()
        self.prompted = self.prompted or self.last
        self.predicted += 1


def timings(usage: Usage) -> Json:
    """Return the timings of a finished request. The prefill step yields the first token, so n tokens take n - 1 decode
    steps."""
    prompt, steps = usage.prompt_tokens - usage.reused_tokens, max(usage.answer_tokens - 1, 0)
    prompt_ms, predicted_ms = usage.prompt_seconds * 1e3, usage.decode_seconds * 1e3
    found: Json = {
        "cache_n": usage.reused_tokens,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt if prompt else 0.0,
        "prompt_per_second": 1e3 * prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": usage.answer_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
        "predicted_per_second": 1e3 / predicted_ms * steps if predicted_ms else 0.0,
    }
    if usage.drafted:
        found |= {"draft_n": usage.drafted, "draft_n_accepted": usage.accepted}
    return found
