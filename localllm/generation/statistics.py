"""The output of an answer: pieces of text, and statistics at the end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Literal

StopReason = Literal["end", "stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class Speculated:
    """Statistics of speculation in an answer."""

    drafted: int  # drafted tokens that were verified
    accepted: int  # of these
    rounds: int  # passes that verified drafts
    plain_seconds: float  # estimated time without speculation, from passes of one row in the same answer

    @property
    def mean_accepted(self) -> float:
        """Mean number of accepted tokens per verifying pass."""
        return self.accepted / self.rounds if self.rounds else 0.0

    def and_then(self, more: Speculated | None) -> Speculated:
        if more is None:
            return self
        return Speculated(
            self.drafted + more.drafted,
            self.accepted + more.accepted,
            self.rounds + more.rounds,
            self.plain_seconds + more.plain_seconds,
        )


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of an answer: counts, times in seconds, rates per second."""

    prompt_tokens: int  # tokens of the whole prompt
    reused_tokens: int  # of these, tokens already in the cache
    prompt_seconds: float
    answer_tokens: int
    decode_seconds: float  # time of decoding passes and drafting
    decode_steps: int  # tokens that these evaluated
    first_token_seconds: float  # time from the call to the first token
    bytes_per_step: int  # bytes of weights and cache that a decoding pass reads at the end of the answer
    reason: StopReason
    decode_passes: int = 0  # passes of the model; fewer than steps if drafts were accepted
    speculation: Speculated | None = None

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens evaluated per second."""
        return (self.prompt_tokens - self.reused_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        return self.decode_steps / self.decode_seconds if self.decode_seconds else 0.0

    def and_then(self, more: Statistics) -> Statistics:
        """Combine the statistics of two parts of an answer: add counts and times, take the rest from the end."""
        together = {name: getattr(self, name) + getattr(more, name) for name in _ADDED}
        speculation = self.speculation.and_then(more.speculation) if self.speculation else more.speculation
        return replace(more, first_token_seconds=self.first_token_seconds, speculation=speculation, **together)

    @property
    def bandwidth(self) -> float:
        """Bytes per second read by decoding."""
        return self.decode_passes * self.bytes_per_step / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def speedup(self) -> float:
        """Estimated speedup of decoding by speculation; 1 without speculation."""
        return self.speculation.plain_seconds / self.decode_seconds if self.speculation and self.decode_seconds else 1.0


_ADDED = (
    "prompt_tokens", "reused_tokens", "prompt_seconds", "answer_tokens", "decode_seconds", "decode_steps",
    "decode_passes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of the answer and the text that it completed. The last piece has no token but the statistics."""

    text: str
    token: int | None
    statistics: Statistics | None = None


@dataclass(slots=True)
class Meter:
    """Counts and times an answer from its creation. `finish` returns the statistics."""

    prompt_tokens: int
    reused_tokens: int = 0
    prompt_seconds: float = 0.0
    answer_tokens: int = 0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    first_token_seconds: float = 0.0
    _began: float = field(default_factory=perf_counter)

    def prompt_read(self) -> None:
        """Record that the prompt has been evaluated."""
        self.prompt_seconds = perf_counter() - self._began

    def sampled(self) -> None:
        """Record that a token is known; time the first one."""
        self.first_token_seconds = self.first_token_seconds or perf_counter() - self._began

    def decoded(self, since: float) -> None:
        """Record that a token was fed, from `since` (perf_counter) until now."""
        self.decode_seconds += perf_counter() - since
        self.decode_steps += 1

    def finish(
        self, reason: StopReason, bytes_per_step: int, passes: int, speculation: Speculated | None
    ) -> Statistics:
        return Statistics(
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            prompt_seconds=self.prompt_seconds,
            answer_tokens=self.answer_tokens,
            decode_seconds=self.decode_seconds,
            decode_steps=self.decode_steps,
            first_token_seconds=self.first_token_seconds,
            bytes_per_step=bytes_per_step,
            reason=reason,
            decode_passes=passes,
            speculation=speculation,
        )
