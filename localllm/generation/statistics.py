"""What one answer is to its reader: pieces of text, and at the end what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Literal

StopReason = Literal["end", "stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class Speculated:
    """What speculation did in one answer."""

    drafted: int  # guesses that were checked
    accepted: int  # of them
    rounds: int  # passes that checked any
    plain_seconds: float  # what decoding would have taken without, by the time of passes of one row in the same answer

    @property
    def mean_accepted(self) -> float:
        """Guesses that stood, of a pass that checked any."""
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
    """What one answer cost. Times in seconds, rates per second."""

    prompt_tokens: int  # of the whole prompt
    reused_tokens: int  # of them already in the cache
    prompt_seconds: float
    answer_tokens: int
    decode_seconds: float  # of the passes that decode, and of drafting for them
    decode_steps: int  # tokens they took in
    first_token_seconds: float  # from the call to the first token
    bytes_per_step: int  # weights and cache that one decode pass reads, at the end of the answer
    reason: StopReason
    decode_passes: int = 0  # through the model; fewer than steps where guesses stood
    speculation: Speculated | None = None

    @property
    def prompt_rate(self) -> float:
        """Evaluated prompt tokens a second."""
        return (self.prompt_tokens - self.reused_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        return self.decode_steps / self.decode_seconds if self.decode_seconds else 0.0

    def and_then(self, more: Statistics) -> Statistics:
        """Of an answer in two parts: counts and times together, the rest as it ended."""
        together = {name: getattr(self, name) + getattr(more, name) for name in _ADDED}
        speculation = self.speculation.and_then(more.speculation) if self.speculation else more.speculation
        return replace(more, first_token_seconds=self.first_token_seconds, speculation=speculation, **together)

    @property
    def bandwidth(self) -> float:
        """Bytes a second that decoding read."""
        return self.decode_passes * self.bytes_per_step / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def speedup(self) -> float:
        """How many times as fast as without speculation decoding was, estimated; 1 where there was none."""
        return self.speculation.plain_seconds / self.decode_seconds if self.speculation and self.decode_seconds else 1.0


_ADDED = (
    "prompt_tokens", "reused_tokens", "prompt_seconds", "answer_tokens", "decode_seconds", "decode_steps",
    "decode_passes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of the answer and the text that became certain with it; the last has no token but the statistics."""

    text: str
    token: int | None
    statistics: Statistics | None = None


@dataclass(slots=True)
class Meter:
    """Counts and times one answer, from when it is made. `finish` says what it came to."""

    prompt_tokens: int
    reused_tokens: int = 0
    prompt_seconds: float = 0.0
    answer_tokens: int = 0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    first_token_seconds: float = 0.0
    _began: float = field(default_factory=perf_counter)

    def prompt_read(self) -> None:
        """The prompt has been evaluated."""
        self.prompt_seconds = perf_counter() - self._began

    def sampled(self) -> None:
        """A token is known; the first is timed."""
        self.first_token_seconds = self.first_token_seconds or perf_counter() - self._began

    def decoded(self, since: float) -> None:
        """A token was fed, from `since` (perf_counter) until now."""
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
