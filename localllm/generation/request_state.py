"""The state of one request: its tokens, its sequence in the KV cache, and the text generated so far.

`tokens` are the prompt and the answer so far. Tokens that are not in the cache are pending: at first the prompt, later
the newest token, and after a preemption all tokens evicted from the cache. Once all pending tokens are evaluated, the
next token is sampled from the logits of the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import TopK
from localllm.base.errors import LocalLLMError
from localllm.engine import CacheSequence, MediaSpan
from localllm.generation.errors import NotRepeated
from localllm.generation.logprobs import logprob_of, sampled_logprob
from localllm.generation.prompt_media import PromptMedia
from localllm.generation.request import (
    Choosing,
    Event,
    Failed,
    Finished,
    Logprob,
    Prefilled,
    Reason,
    Request,
    Started,
    Token,
)
from localllm.generation.speculation.rule import DraftToken
from localllm.generation.statistics import Usage
from localllm.generation.text import AnswerText
from localllm.sampling.sampler import Sampler
from localllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.generation.speculation.suffixes import SuffixDrafter

F32 = NDArray[np.float32]
AHEAD = 1024  # tokens; pictures further ahead are not encoded yet, because embeddings take much memory


@dataclass(eq=False, slots=True)
class Ticket:
    """A submitted request. `cancel` may be called from any thread and ends the request at the next step."""

    request: Request
    listener: Callable[[Event], None]  # called by the stepping thread; must not block
    wanted: Callable[[], bool] | None = None  # returns whether the consumer can take more events; None: always
    stop: threading.Event | None = None  # cancels the request when set
    ended: Callable[[], None] | None = None  # called by the stepping thread when the request has ended
    _cancelled: bool = False

    def cancel(self) -> None:
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        return self._cancelled or (self.stop is not None and self.stop.is_set())

    @property
    def paused(self) -> bool:
        """Whether the consumer cannot take more events at present."""
        return self.wanted is not None and not self.wanted()


def _with_ids(prompt: Sequence[int | MediaSpan], media: Sequence[PromptMedia]) -> list[int]:
    """Return the tokens of a prompt, with the ids of its media."""
    ids, found = iter(media), list[int]()
    if not media:
        return cast(list[int], list(prompt))
    for each in prompt:
        found += next(ids).placed.media.ids if isinstance(each, MediaSpan) else (each,)
    return found


class RequestState:
    """The state of one ticket. Only the stepping thread accesses it."""

    def __init__(
        self,
        ticket: Ticket,
        number: int,
        sampler: Sampler,
        tokenizer: Tokenizer | None,
        read_after: Callable[[int], int] = lambda length: 0,
        media: Sequence[PromptMedia] = (),
    ) -> None:
        """`read_after(length)` returns the bytes that a decode step reads with `length` tokens in the cache.

        `media` are the pictures and sounds of the prompt.
        """
        request = ticket.request
        self.ticket, self.request, self.number = ticket, request, number
        self.tokens: list[int] = _with_ids(request.prompt, media)
        self.prompt_tokens = len(self.tokens)
        self.media = media
        self.sequence: CacheSequence | None = None  # None while the request waits
        self.flown_from = -1  # length of the sequence before the step in flight; -1: no step is in flight
        self.flown = 0  # number of the newest step of the scheduler with this request
        self.losses = 0  # steps in sequence that were lost with a part of the executable
        self.slot = -1  # slot number, set when the request starts to run
        self.checkpoints: list[int] = []  # ascending lengths at which to copy the sequence for later prompts
        self.drafts: list[DraftToken] = []  # drafted tokens for the next step
        self.verified = 0  # number of drafted tokens that the step verifies
        self.modelled = False  # whether the draft model drafted the tokens
        self.outcome: list[tuple[int, bool]] = []  # per draft: trust class, and whether it was accepted
        self.drafter: SuffixDrafter | None = None
        self.ended = ""  # finish reason, set when the request has ended
        self._complete = False  # whether an end-of-generation token was sampled
        self.sampler = sampler
        self._text = AnswerText(tokenizer, request.stops, request.resumed, request.visible)
        self._bytes: Callable[[int], bytes] = tokenizer.piece if tokenizer is not None else lambda token: b""
        self._ends = frozenset[int]() if tokenizer is None else tokenizer.eog
        self._submitted = perf_counter()
        self._resumed = self.decoding_since = 0.0  # time of the last admission, and of the first token after it
        self._admitted = self._prompted = self._first = 0.0
        self._reused = -1
        self._told = 0  # number of prompt tokens reported by `Prefilled` events
        self._drafted = self._accepted = self._rounds = self._passes = 0
        self._decode_seconds = self._plain_seconds = 0.0
        self._plain = 0.0  # estimated duration of this step without drafts, in seconds
        self.drafting = False  # whether speculation is enabled for this request
        self._read_after = read_after

    # -- what to evaluate ------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Number of tokens to evaluate before the next token can be sampled."""
        return len(self.tokens) - (self.sequence.length if self.sequence is not None else 0)

    @property
    def prefilling(self) -> bool:
        """Whether the request is in prefill, of its prompt or, after a preemption, of prompt and answer."""
        return self.pending > 1 or not self._prompted

    @property
    def text_tokens(self) -> list[int]:
        """The tokens of text: ids of pictures and sound mean nothing outside the cache."""
        return [token for token in self.tokens if token >= 0] if self.media else self.tokens

    @property
    def media_ahead(self) -> bool:
        """Whether the cache lacks a picture or sound of the prompt."""
        length = self.sequence.length if self.sequence is not None else 0
        return any(each.stop > length for each in self.media)

    @property
    def unencoded(self) -> PromptMedia | None:
        """The first picture or sound whose tokens must be evaluated soon, and whose embeddings are unknown."""
        length = self.sequence.length if self.sequence is not None else 0
        near = (each for each in self.media if each.stop > length and each.start < length + AHEAD)
        return next((each for each in near if each.embeddings is None), None)

    def span_at(self, start: int) -> int:
        """Return the number of tokens from `start` on that one step must evaluate: a picture's, if they see each other.
        0: no such picture begins there.
        """
        return next((e.span.tokens for e in self.media if e.start == start and not e.span.causal), 0)

    @property
    def in_flight(self) -> bool:
        """Whether a step with tokens of this request has not been collected. Its sequence must not change then."""
        return self.flown_from >= 0

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def known_left(self) -> int:
        """Number of known tokens of the answer (`Request.known`) that are not verified yet."""
        return max(len(self.request.known) - self.answer_tokens, 0)

    @property
    def cached_tokens(self) -> int:
        """Return the number of tokens to keep in the cache.

        Rejected drafts are dropped. The newest token is dropped too unless an end token followed it, even if it was
        drafted: the next step evaluates it.
        """
        if self.sequence is None:
            return 0
        return min(self.sequence.length, len(self.tokens) - (self.answer_tokens > 0 and not self._complete))

    @property
    def tokens_left(self) -> int:
        """Number of tokens that may still be generated."""
        most = self.request.max_tokens
        return (1 << 40) if most is None else most - self.answer_tokens

    @property
    def required_top_k(self) -> int:
        """The k of the top-k logits from which the next token can be sampled; 0 if all logits are needed."""
        request = self.request
        whole = request.logprobs is not None or request.observer is not None or request.processor is not None
        return 0 if whole else self.sampler.required_top_k

    @property
    def pace(self) -> float:
        """Ratio of the measured decode time to the estimated decode time without drafts; at most 1."""
        return min(self._decode_seconds / self._plain_seconds, 1.0) if self._plain_seconds else 1.0

    def had_its_turn(self, seconds: float) -> bool:
        """Whether the request, since its admission, has decoded for at least `seconds` and twice as long as its prefill
        took.
        """
        if not self.decoding_since:
            return False
        return perf_counter() - self.decoding_since >= max(seconds, 2 * (self.decoding_since - self._resumed))

    def fly(self, number: int, begun: int = 0) -> None:
        """Record that step `number` of the scheduler evaluates tokens of this request. `begun` of them are in its
        sequence already.
        """
        assert self.sequence is not None
        self.flown_from, self.flown = self.sequence.length - begun, number

    def land(self) -> None:
        """Record that no step is in flight."""
        self.flown_from = -1

    # -- events ----------------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Pass an event to the listener. If the listener raises, cancel the request."""
        try:
            self.ticket.listener(event)
        except Exception:  # the listener is user code
            self.ticket.cancel()

    def admitted(self, sequence: CacheSequence, reused: int) -> None:
        """Start to run with `reused` tokens in the cache, for the first time or after a preemption."""
        self.sequence = sequence
        self._resumed, self.decoding_since = perf_counter(), 0.0
        if self._reused < 0:
            self._admitted, self._reused = self._resumed, reused
            self._told = reused
            for token in self.text_tokens:
                self.sampler.accept(token)
            constraint = self.request.constraint() if self.request.constraint is not None else None
            self.sampler.constrain(constraint, self._ends, self.request.ignore_eos)
            if self.request.observer is not None:
                self.request.observer.started(self.tokens, sequence, self.sampler)
            self.tell(Started(self.prompt_tokens, reused, self.request.choice))

    def evaluated(self, logits: F32) -> None:
        """Report prefill progress. With `prompt_logprobs`, `logits` has one row per new prompt token."""
        assert self.sequence is not None
        length = min(self.sequence.length, self.prompt_tokens)
        for each in self.media:
            if each.stop <= length:
                each.drop()
        if length <= self._told:
            return
        found: tuple[Logprob, ...] = ()
        if self.request.prompt_logprobs:
            following = self.tokens[self._told + 1 : length + 1]
            new = logits[self._told - (self.sequence.length - len(logits)) :]  # after a preemption, some are known
            top = self.request.logprobs or 0
            found = tuple(logprob_of(row, token, top, self._bytes) for row, token in zip(new, following, strict=False))
        self._told = length
        self.tell(Prefilled(length, found, self.request.choice))

    # -- choosing tokens -------------------------------------------------------------------------------------------

    def draft_known(self, most: int) -> None:
        """Draft at most `most` of the known tokens. They are verified like other drafts, so sampler, constraint and
        text come to the state of the earlier run.
        """
        start = self.answer_tokens
        self.drafts = [DraftToken(token, 0) for token in self.request.known[start : start + max(most, 0)]]
        self.verified, self.modelled = len(self.drafts), False

    def decoded(self, seconds: float, plain: float) -> None:
        """Record a decode step: its duration, and its estimated duration without drafts (`plain`), in seconds."""
        self._decode_seconds += seconds
        self._plain_seconds += plain
        self._plain = plain
        self._passes += 1

    def take(self, logits: F32) -> None:
        """Sample tokens from the logits (1 + verified, V) after the newest token and after each verified draft.

        A draft is accepted if the sampler chooses the same token, so the output is identical to plain decoding.
        """
        known = self.known_left > 0
        if not known:
            self._drafted += self.verified
            self._rounds += self.verified > 0
        observer = self.request.observer
        for at, row in enumerate(logits):
            if self.request.processor is not None:
                row = self._processed(row)
            if observer is not None:
                observer.choosing()
            chosen = self.sampler.sample(row)
            if observer is not None:
                observer.chose(chosen, self._choosing(row, at), self.sampler)
            logprob = self._logprob(row, chosen) if self.request.logprobs is not None else None
            right = at < len(self.drafts) and (
                self.drafts[at].token == chosen if known else self._was_drafted(chosen, at)
            )
            if right and at < self.verified and not known:
                self._accepted += 1
                self._plain_seconds += self._plain
            if not self._append(chosen, logprob) or not right:
                return

    def take_top_k(self, found: TopK) -> None:
        """Sample the next token from the top-k logits (1, `required_top_k`)."""
        chosen = self.sampler.sample_top_k(found.ids[-1], found.logits[-1])
        if self.drafts:
            self._was_drafted(chosen, 0)
        self._append(chosen, None)

    def _processed(self, row: F32) -> F32:
        assert self.request.processor is not None
        try:
            found = np.asarray(self.request.processor(tuple(self.text_tokens), row.copy()), np.float32)
        except LocalLLMError:
            raise
        except Exception as error:  # the processor is user code
            raise LocalLLMError(f"the logits processor failed: {type(error).__name__}: {error}") from error
        if found.shape != row.shape:
            raise LocalLLMError(f"the logits processor returned an array of shape {found.shape}, not {row.shape}")
        if not np.isfinite(most := found.max()) and np.isfinite(row.max()):
            raise LocalLLMError(f"the logits processor leaves no token to choose: its largest logit is {most}")
        return found

    def _choosing(self, row: F32, at: int) -> Choosing:
        if at >= len(self.drafts):
            return Choosing(row)
        by = "draft model" if self.modelled else "repetition"
        return Choosing(row, self.drafts[at].token, at < self.verified, by)

    def _logprob(self, logits: F32, chosen: int) -> Logprob | None:
        """Return the log-probability of the chosen token; None for an end token."""
        top = self.request.logprobs
        assert top is not None
        if self.sampler.is_end(chosen):
            return None
        if self.request.sampled:
            return sampled_logprob(*self.sampler.distribution(logits), chosen, top, self._bytes)
        return logprob_of(logits, chosen, top, self._bytes)

    def _was_drafted(self, chosen: int, at: int) -> bool:
        """Return whether drafted token `at` equals the chosen token. Record the outcome even if the draft was not
        verified.
        """
        draft = self.drafts[at]
        self.outcome.append((draft.trust, draft.token == chosen))
        return draft.token == chosen

    def _append(self, token: int, logprob: Logprob | None) -> bool:
        """Append the sampled token; return whether generation continues."""
        if not self.decoding_since:
            self.decoding_since = now = perf_counter()
            self._prompted = self._prompted or now
            self._first = self._first or now
        known = self.known_left > 0
        if known and token != self.request.known[self.answer_tokens]:
            number, earlier = self.answer_tokens, self.request.known[self.answer_tokens]
            self.fail(NotRepeated(f"token {number} of the answer is {token}, but it was {earlier} before the fault"))
            return False
        if self.sampler.is_end(token):
            self._complete = True
            self.finish("end")
            return False
        self.sampler.write(token)
        self.tokens.append(token)
        self.losses = 0
        if self.drafter is not None:
            self.drafter.accept(token)
        text = self._text.push(token)
        if self._text.stopped:
            if known:  # a token that completes a stop string is never sent
                self.fail(NotRepeated("the answer ends before the tokens that were sent before the fault"))
            self.finish("stop", text)
            return False
        if not known:
            self.tell(Token(token, text, logprob, (), self.request.choice))
        if self.sampler.finished:
            self.finish("end")
        elif self.tokens_left <= 0:
            self.finish("length")
        return not self.done

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self, reason: Reason, text: str = "") -> None:
        """End the answer. The final text is `text` followed by the text held back so far."""
        if not self.ended:
            self.ended = reason
            self._observe_end()
            text += self._text.finish()
            choice = self.request.choice
            self.tell(Finished(reason, text, self.usage(), self._text.ended_by, self.cached_tokens, choice=choice))

    def fail(self, error: LocalLLMError) -> None:
        """End the request with an error."""
        if not self.ended:
            self.ended = "failed"
            self._observe_end()
            self.tell(Failed(error, self.request.choice))

    def _observe_end(self) -> None:
        if self.request.observer is not None:
            self.request.observer.ended(self.sequence.length if self.sequence is not None else 0)

    @property
    def done(self) -> bool:
        return bool(self.ended)

    def usage(self) -> Usage:
        def since(start: float, end: float) -> float:
            return max(0.0, end - start) if start and end else 0.0

        return Usage(
            prompt_tokens=self.prompt_tokens,
            reused_tokens=max(self._reused, 0),
            answer_tokens=self.answer_tokens,
            queued_seconds=since(self._submitted, self._admitted),
            first_token_seconds=since(self._submitted, self._first),
            prompt_seconds=since(self._admitted, self._prompted),
            decode_seconds=self._decode_seconds,
            decode_steps=self._passes + self._accepted,
            decode_passes=self._passes,
            bytes_per_step=self._read_after(self.sequence.length if self.sequence is not None else 0),
            drafting=self.drafting or self._drafted > 0,
            drafted=self._drafted,
            accepted=self._accepted,
            rounds=self._rounds,
            plain_seconds=self._plain_seconds,
        )
