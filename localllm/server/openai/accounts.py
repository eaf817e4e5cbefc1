"""Usage and timings: OpenAI's `usage`, and llama.cpp's `timings` and `prompt_progress`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from localllm.generation.request import Event, Prefilled, Started, Token
from localllm.generation.statistics import Usage
from localllm.server.collected import Collected
from localllm.server.turn import Json

Clock = Callable[[], float]


def usage_of(answers: Sequence[Collected], prompts: int = 1) -> Json:
    """Return `usage`: the tokens of all choices and of the prompts, where each prompt counts once regardless of `n`.

    The choices of one prompt are adjacent.
    """
    per_prompt = len(answers) // prompts
    firsts = [answers[number * per_prompt] for number in range(prompts)]
    prompt = sum(each.usage.prompt_tokens for each in firsts)
    completion = sum(each.usage.answer_tokens for each in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.usage.reused_tokens for each in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.thinking_tokens for each in answers)},
    }


def timings(usage: Usage) -> Json:
    """Return llama.cpp's `timings`. The decode speed excludes the first token, which has no interval."""
    evaluated = usage.prompt_tokens - usage.reused_tokens
    found = {
        "cache_n": usage.reused_tokens,
        "prompt_n": evaluated,
        "prompt_ms": usage.prompt_seconds * 1e3,
        "prompt_per_token_ms": _ratio(usage.prompt_seconds * 1e3, evaluated),
        "prompt_per_second": _ratio(evaluated, usage.prompt_seconds),
        "predicted_n": usage.answer_tokens,
        "predicted_ms": usage.decode_seconds * 1e3,
        "predicted_per_token_ms": _ratio(usage.decode_seconds * 1e3, usage.answer_tokens - 1),
        "predicted_per_second": _ratio(usage.answer_tokens - 1, usage.decode_seconds),
    }
    if usage.drafted:
        found |= {"draft_n": usage.drafted, "draft_n_accepted": usage.accepted}
    return found


def _ratio(amount: float, count: float) -> float:
    return amount / count if amount > 0 and count > 0 else 0.0


class Stopwatch:
    """Measures a choice during generation, for `timings_per_token` and `return_progress`."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._begun = self._first = self._last = 0.0
        self._prompt = self._reused = self._tokens = 0

    def add(self, event: Event) -> None:
        """Record the time of an event."""
        match event:
            case Started():
                self._begun = self._clock()
                self._prompt, self._reused = event.prompt_tokens, event.reused_tokens
            case Token():
                self._last = self._clock()
                self._first = self._last if self._tokens == 0 else self._first
                self._tokens += 1

    @property
    def timings(self) -> Json:
        """Return `timings` up to now."""
        made = Usage(
            prompt_tokens=self._prompt,
            reused_tokens=self._reused,
            answer_tokens=self._tokens,
            prompt_seconds=max(0.0, self._first - self._begun),
            decode_seconds=self._last - self._first,
        )
        return timings(made)

    def progress(self, event: Started | Prefilled) -> Json:
        """Return `prompt_progress` after an event."""
        return {
            "total": self._prompt,
            "cache": self._reused,
            "processed": event.reused_tokens if isinstance(event, Started) else event.evaluated,
            "time_ms": round((self._clock() - self._begun) * 1e3),
        }
