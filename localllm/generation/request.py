"""A `Request` to a core, and the events that the core sends back. The last event is `Finished` or `Failed`.

The Python API, the chat and every server protocol use these events. The core fills in token ids and text;
`localllm.output.reader.with_parts` adds the `parts` of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.base.errors import LocalLLMError
from localllm.engine.media import MediaSpan as MediaSpan
from localllm.generation.statistics import Usage
from localllm.options import SamplingOptions
from localllm.sampling.constraint import Constraint
from localllm.sampling.repetition import Breakers

if TYPE_CHECKING:
    from localllm.engine import CacheSequence
    from localllm.generation.parts import Part
    from localllm.sampling.sampler import Sampler

Reason = Literal["end", "stop", "length", "context", "cancelled", "tool_calls"]  # tool_calls: set by `with_parts`


def account_of(client: str) -> str:
    """Return the ACCOUNT of a client named ACCOUNT or ACCOUNT/USER."""
    return client.partition("/")[0]


def within_share(mine: int, left: int) -> bool:
    """Return whether an account with `mine` open requests may take one of the `left` free places.

    A single account can take half of the total, two accounts a third each, and so on. A new account therefore always
    finds a free place.
    """
    return left > 0 and mine <= left


class Choosing(NamedTuple):
    """The logits from which a token is sampled, and the token that was drafted for its position."""

    logits: NDArray[np.float32]  # (V,), a view that the next step overwrites
    draft: int | None = None
    verified: bool = False  # whether the step verified the draft; accepting a verified draft saves a step
    drafter: str = ""


class AnswerObserver(Protocol):
    """Observes how one answer is generated, in the thread that generates it."""

    def started(self, prompt: Sequence[int], sequence: CacheSequence, sampler: Sampler) -> None:
        """Called when the answer begins; `sequence` contains the prompt tokens reused from the cache."""
        ...

    def choosing(self) -> None:
        """Called before the next token is chosen."""
        ...

    def chose(self, token: int, by: Choosing, sampler: Sampler) -> None:
        """Called after a token is chosen, before the sampler accepts it."""
        ...

    def ended(self, length: int) -> None:
        """Called when the answer has ended, with `length` tokens in the cache."""
        ...


LogitsProcessor = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]
"""Takes the tokens so far and the model's logits (V,), which it may change; returns the logits to sample from."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one answer: the prompt, the sampling options and the stop conditions.

    The prompt consists of token ids, and of pictures and sounds, if the model takes them.
    """

    prompt: Sequence[int | MediaSpan]
    sampling: SamplingOptions
    max_tokens: int | None = None  # None: until the context is full
    stops: tuple[str, ...] = ()  # stop strings, excluded from the answer
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives per token; None: no log-probabilities
    sampled: bool = False  # whether log-probabilities are taken after the sampling options, not before
    prompt_logprobs: bool = False  # whether to also return log-probabilities of the prompt tokens (`echo`)
    dry_breakers: Breakers | None = None  # DRY sequence breakers, if already known
    constraint: Callable[[], Constraint] | None = None  # returns a new grammar state; called once per answer
    visible: frozenset[int] = frozenset()  # ids of control tokens to include in the text, for `localllm.output`
    resumed: bool = False  # whether the answer continues a text, so that its leading space is kept
    reuse: bool = True  # whether to use the prefix cache and to leave the request's tokens there
    slot: int = -1  # slot to use; -1: a free one
    choice: int = 0  # index of this answer among several answers to one prompt; repeated in its events
    priority: int = 0  # requests with higher priority run first
    client: str = ""  # ACCOUNT or ACCOUNT/USER: scheduling is fair between accounts, then between their users
    processor: LogitsProcessor | None = None  # modifies the logits before sampling
    observer: AnswerObserver | None = None  # observes each token; requires all logits to be computed
    states: Callable[[int, NDArray[np.float32]], None] | None = None  # takes hidden states (n, width) from a position
    known: Sequence[int] = ()  # first tokens of the answer, which an earlier run sent: verified, and not sent again

    @property
    def whole_prompt(self) -> bool:
        """Whether every prompt token is evaluated, and has a row of logits."""
        return self.prompt_logprobs or self.states is not None

    @property
    def account(self) -> str:
        """The client's API key or address. Limits apply per account, because a request can name any user."""
        return account_of(self.client)


def text_of(prompt: Sequence[int | MediaSpan]) -> list[int]:
    """Return the tokens of a prompt without its pictures and sounds."""
    return [each for each in prompt if not isinstance(each, MediaSpan)]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probabilities of a token and of the most likely tokens under the model, before the sampling options.

    With `Request.sampled`, they refer to the distribution that the token was sampled from.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first
    data: bytes = b""  # bytes of the token, possibly an incomplete UTF-8 character
    top_data: tuple[bytes, ...] = ()  # bytes of each token in `top`

    @property
    def text(self) -> str:
        """The token as text, with U+FFFD in place of an incomplete character."""
        return self.data.decode("utf-8", "replace")

    @property
    def alternatives(self) -> tuple[Logprob, ...]:
        """The tokens in `top` as `Logprob` objects with their bytes."""
        return tuple(
            Logprob(token, logprob, (), data) for (token, logprob), data in zip(self.top, self.top_data, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted. `reused_tokens` of its prompt tokens were already in the cache."""

    prompt_tokens: int
    reused_tokens: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prefill progress: `evaluated` prompt tokens are in the cache, including reused ones."""

    evaluated: int
    logprobs: tuple[Logprob, ...] = ()  # log-probabilities of the prompt tokens since the last event, if requested
    choice: int = 0


@dataclass(slots=True)
class Token:
    """A token of the answer, and the text that it completed (empty inside a character or a possible stop string)."""

    token: int
    text: str
    logprob: Logprob | None = None
    parts: tuple[Part, ...] = ()  # parts that the text completed, added by `with_parts`
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer. `text` is the remaining text, which was held back until now."""

    reason: Reason
    text: str
    usage: Usage
    stop: str = ""  # the stop string that ended the answer
    cached_tokens: int = 0  # number of prompt and answer tokens that are in the cache
    parts: tuple[Part, ...] = ()  # the last parts, added by `with_parts`
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that failed."""

    error: LocalLLMError
    choice: int = 0


Event = Started | Prefilled | Token | Finished | Failed
