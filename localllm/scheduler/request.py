"""What is asked of a core, and what it tells: a `Request`, then its events, ending with `Finished` or `Failed`.

These are the only events: the API, the chat and every protocol of the server read the same ones. The core knows token
ids and their text. Who reads an answer adds its `parts` (`localllm.answer.reader.with_parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import LocalLLMError
from localllm.generation.constraint import Constraint
from localllm.generation.statistics import Usage
from localllm.options import SamplingOptions
from localllm.sampling.repetition import Breakers

if TYPE_CHECKING:
    from localllm.answer.parts import Part
    from localllm.cache import Sequence as Cached
    from localllm.sampling.sampler import Sampler

Reason = Literal["end", "stop", "length", "context", "cancelled", "tool_calls"]  # the last: the reader found calls


def account_of(client: str) -> str:
    """Return the account of a client, ACCOUNT or ACCOUNT/USER."""
    return client.partition("/")[0]


def within_share(mine: int, left: int) -> bool:
    """Return whether an account that has `mine` places may take one more of the `left` free ones.

    One account gets half of all, two get a third each, and so on: a newcomer always finds a free place.
    """
    return left > 0 and mine <= left


class Choosing(NamedTuple):
    """What decides a token of an answer: logits, and the token that was drafted in its place."""

    logits: NDArray[np.float32]  # (V,), a view that the next step overwrites
    draft: int | None = None
    verified: bool = False  # whether the draft was in the step, so that accepting it costs no further one
    drafter: str = ""


class AnswerObserver(Protocol):
    """Told how one answer is made, in the thread that makes it."""

    def started(self, prompt: Sequence[int], sequence: Cached, sampler: Sampler) -> None:
        """Hear that the answer begins; `sequence` holds the prompt's tokens that need not be evaluated again."""
        ...

    def choosing(self) -> None:
        """Hear that the next token is about to be chosen."""
        ...

    def chose(self, token: int, by: Choosing, sampler: Sampler) -> None:
        """Hear which token was chosen; the sampler has not accepted it yet."""
        ...

    def ended(self, length: int) -> None:
        """Hear that the answer has ended with so many tokens in the cache."""
        ...


LogitsProcessor = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]
"""Returns the logits (V,) to choose a token from, given the tokens so far and the model's logits, which it may
change."""


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
    choice: int = 0  # number of this answer among those to the same prompt; its events have it
    priority: int = 0  # higher runs first
    client: str = ""  # whose request it is, as ACCOUNT or ACCOUNT/USER: fairness is per account, then per user
    processor: LogitsProcessor | None = None  # changes logits before a token is chosen
    observer: AnswerObserver | None = None  # told how each token is chosen; all logits are then computed

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
    data: bytes = b""  # of the token: its text, maybe part of a character
    top_data: tuple[bytes, ...] = ()  # of each in `top`

    @property
    def text(self) -> str:
        """The token as text; U+FFFD for bytes that are part of a character."""
        return self.data.decode("utf-8", "replace")

    @property
    def alternatives(self) -> tuple[Logprob, ...]:
        """The tokens in `top` with their bytes."""
        return tuple(
            Logprob(token, logprob, (), data) for (token, logprob), data in zip(self.top, self.top_data, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Started:
    """The request runs: `reused_tokens` of its prompt's tokens were in the cache."""

    prompt_tokens: int
    reused_tokens: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Prefilled:
    """More of the prompt is evaluated: `evaluated` of its tokens, those reused included."""

    evaluated: int
    logprobs: tuple[Logprob, ...] = ()  # of the prompt's tokens since the last event, if wanted
    choice: int = 0


@dataclass(slots=True)
class Token:
    """One more token, and the text that it completed (empty if it ends within a character or a possible stop)."""

    token: int
    text: str
    logprob: Logprob | None = None
    parts: tuple[Part, ...] = ()  # that the text completed, once it is read
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer: `text` was held back and belongs to it."""

    reason: Reason
    text: str
    usage: Usage
    stop: str = ""  # the stop string that ended it
    held: int = 0  # tokens of the prompt and the answer that are in the cache
    parts: tuple[Part, ...] = ()  # the last ones, once the text is read
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that could not be answered."""

    error: LocalLLMError
    choice: int = 0


Event = Started | Prefilled | Token | Finished | Failed
