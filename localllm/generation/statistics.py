"""Token counts and times of an answer. Times are in seconds, rates per second."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of an answer."""

    prompt_tokens: int = 0  # tokens of the whole prompt
    reused_tokens: int = 0  # prompt tokens that were already in the cache
    answer_tokens: int = 0
    queued_seconds: float = 0.0  # from submission to admission
    first_token_seconds: float = 0.0  # from submission to the first token
    prompt_seconds: float = 0.0  # prefill time, from admission to the first token
    decode_seconds: float = 0.0  # duration of the steps after the first token, including drafting
    decode_steps: int = 0  # tokens evaluated in decode steps, excluding rejected drafts
    decode_passes: int = 0  # forward passes in decode; fewer than tokens if drafts were accepted
    bytes_per_step: int = 0  # bytes of weights and KV cache that a decode step reads at the end of the answer
    drafting: bool = False  # whether speculation was enabled
    drafted: int = 0  # drafted tokens that were verified
    accepted: int = 0  # drafted tokens that were accepted
    rounds: int = 0  # forward passes that verified drafts
    plain_seconds: float = 0.0  # estimated time of decoding without drafts

    @property
    def prompt_rate(self) -> float:
        """Prefill speed in tokens/s."""
        return (self.prompt_tokens - self.reused_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        return self.decode_steps / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes of weights and KV cache read per second in decode."""
        return self.decode_passes * self.bytes_per_step / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def mean_accepted(self) -> float:
        """Mean number of accepted tokens per verifying forward pass."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def speedup(self) -> float:
        """Estimated decode speedup from speculation; 1 without drafts."""
        return self.plain_seconds / self.decode_seconds if self.drafting and self.decode_seconds else 1.0

    def and_then(self, more: Usage) -> Usage:
        """Return the usage of this part of an answer followed by `more`: counts and times are added."""
        together = {name: getattr(self, name) + getattr(more, name) for name in _ADDED}
        return replace(
            more,
            queued_seconds=self.queued_seconds,
            first_token_seconds=self.first_token_seconds,
            drafting=self.drafting or more.drafting,
            **together,
        )


_ADDED = (
    "prompt_tokens", "reused_tokens", "prompt_seconds", "answer_tokens", "decode_seconds", "decode_steps",
    "decode_passes", "drafted", "accepted", "rounds", "plain_seconds",
)  # fmt: skip
