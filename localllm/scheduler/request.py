"""What is asked of the scheduler, and what it tells: a `Request`, then its events, ending with `Finished` or `Failed`.

The scheduler knows token ids and their text. Messages, tools and protocols are the server's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import LocalLLMError
from localllm.options import SamplingOptions
from localllm.sampling.repetition import Breakers

Reason = Literal["end", "stop", "length", "context", "cancelled"]


class Constraint(Protocol):
    """The state of a grammar over the tokens of one answer. The scheduler asks and advances it; it is never shared."""

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return which tokens (V,) may come next; None if any may. The scheduler does not change the array."""
        ...

    def accept(self, token: int) -> None:
        """Advance by a token that `allowed`."""
        ...

    def validate(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first, may follow; the state does not change."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, so that only an end-of-text token may follow."""
        ...


def account_of(client: str) -> str:
    """Return the account of a client, ACCOUNT or ACCOUNT/USER."""
    return client.partition("/")[0]


def within_share(mine: int, left: int) -> bool:
    """Return whether an account that has `mine` places may take one more of the `left` free ones.

    One account gets half of all, two get a third each, and so on: a newcomer always finds a free place.
    """
    return left > 0 and mine <= left


@dataclass(frozen=True, slots=True)
class Request:
    """An answer wanted: the tokens before it, and how to choose and end it."""

    prompt: Sequence[int]
    sampling: SamplingOptions
    max_tokens: int | None = None  # None: until the context is full
    stops: tuple[str, ...] = ()  # texts that end the answer; they are not part of it
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives with each token's log-probability; None: no log-probabilities
    sampled: bool = False  # log-probabilities after the sampling options, of the answer's tokens
    prompt_logprobs: bool = False  # log-probabilities of the prompt's tokens too (`echo`)
    breakers: Breakers | None = None  # DRY's sequence breakers, if they have been found before
    constraint: Callable[[], Constraint] | None = None  # makes the state of a grammar; called once per answer
    visible: frozenset[int] = frozenset()  # control tokens whose text is part of the answer, for `localllm.answer`
    resumed: bool = False  # the answer continues a text, so a first space belongs to it
    reuse: bool = True  # whether tokens in the cache may be used, and stay there afterwards
    place: int = -1  # what it evaluates counts as this place's; -1: as that of a free one
    priority: int = 0  # higher runs first
    client: str = ""  # whose request it is, as ACCOUNT or ACCOUNT/USER: fairness is per account, then per user

    @property
    def account(self) -> str:
        """The API key or address of the client. A request can name any user, so limits are per account."""
        return account_of(self.client)


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token under the model, before sampling options, and of the most likely ones.

    With `Request.sampled` it is that of the distribution from which the token was drawn.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first


@dataclass(frozen=True, slots=True)
class Started:
    """The request runs: `reused` of its prompt's tokens were in the cache."""

    prompt_tokens: int
    reused: int


@dataclass(frozen=True, slots=True)
class Prompted:
    """More of the prompt is evaluated: `evaluated` of its tokens, those reused included."""

    evaluated: int
    logprobs: tuple[Logprob, ...] = ()  # of the prompt's tokens since the last event, if wanted


@dataclass(frozen=True, slots=True)
class Written:
    """One more token, and the text that it completed (empty if it ends within a character or a possible stop)."""

    token: int
    text: str
    logprob: Logprob | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer took. Seconds count from `Scheduler.submit`."""

    prompt_tokens: int = 0
    reused: int = 0
    answer_tokens: int = 0
    queued_seconds: float = 0.0
    first_token_seconds: float = 0.0
    prompt_seconds: float = 0.0  # of evaluating the prompt
    decode_seconds: float = 0.0  # from the first token to the last
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer: `text` was held back and belongs to it."""

    reason: Reason
    text: str
    usage: Usage
    stop: str = ""  # the stop string that ended it


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that could not be answered."""

    error: LocalLLMError


Event = Started | Prompted | Written | Finished | Failed


@dataclass(eq=False, slots=True)
class Ticket:
    """A submitted request. `cancel` may be called from any thread, and ends it at the next step."""

    request: Request
    listener: Callable[[Event], None]  # called in the scheduler's thread; it must not block
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()
