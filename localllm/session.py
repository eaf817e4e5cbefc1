"""One conversation on a bound model: evaluate tokens, keep what is in the cache, stream an answer.

A session remembers the tokens behind its cache; a new prompt re-evaluates only what differs. An answer is a generator
of pieces; whoever stops reading it, or sets the cancel event, leaves the session usable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Largest, Picks
from localllm.errors import LocalLLMError
from localllm.plan import Batch
from localllm.sampling.sampler import Sampler
from localllm.stopping import StopStrings

if TYPE_CHECKING:
    from localllm.model import Model

_Result = TypeVar("_Result")
StopReason = Literal["end", "stop", "length", "context", "cancelled"]


class ContextFull(LocalLLMError):
    """A prompt that does not fit the context."""


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


class Steps(Protocol):
    """How an answer gets its tokens: `sample` says the next, `feed` takes it, in turn."""

    passes: int  # through the model

    @property
    def held(self) -> int:
        """Tokens in the cache that stand."""
        ...

    def start(self, logits: NDArray[np.float32]) -> None:
        """The logits (1, V) after the prompt."""
        ...

    def sample(self) -> int: ...

    def feed(self, token: int, wanted: int) -> None:
        """Take the token, which the sampler has accepted; at most `wanted` more will be asked for."""
        ...

    def close(self) -> None:
        """Leave in the cache what was fed, no more."""
        ...

    def speculated(self) -> Speculated | None: ...


class PlainSteps:
    """A pass for every token; of its logits come only those that decide, where the backend can tell."""

    def __init__(self, session: Session, sampler: Sampler) -> None:
        self._session, self._sampler = session, sampler
        self._logits: NDArray[np.float32] | None = None
        self._largest: Largest | None = None
        self._wanted = sampler.looks_at if sampler.looks_at <= session.most_picked else 0
        self.passes = 0

    @property
    def held(self) -> int:
        return self._session.length

    def start(self, logits: NDArray[np.float32]) -> None:
        self._logits = logits

    def sample(self) -> int:
        if self._largest is not None:
            return self._sampler.sample_largest(self._largest.ids[-1], self._largest.logits[-1])
        assert self._logits is not None
        return self._sampler.sample(self._logits[-1])

    def feed(self, token: int, wanted: int) -> None:
        if self._wanted:
            self._largest = self._session.evaluate_largest((token,), self._wanted)
        else:
            self._logits = self._session.evaluate((token,), logits=False)
        self.passes += 1

    def close(self) -> None: ...

    def speculated(self) -> None: ...


class Session:
    """A sequence in the model's cache. Close it to give its blocks back."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sequence = model.pool.new_sequence()
        self._speculator = model.speculation.speculator() if model.speculation is not None else None

    @property
    def tokens(self) -> list[int]:
        """Tokens in the cache, in order."""
        return list(self._sequence.tokens)

    @property
    def length(self) -> int:
        """How many."""
        return self._sequence.length

    @property
    def room(self) -> int:
        """How many more fit as things stand."""
        return min(self._model.context - self._sequence.length, self._sequence.room)

    def close(self) -> None:
        self._sequence.free()
        if self._speculator is not None:
            self._speculator.close()

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, tokens: Sequence[int], logits: bool) -> NDArray[np.float32]:
        """Append up to `model.batch_rows` tokens; logits float32 (T, vocabulary), or (1, vocabulary) of the last alone.

        The result is a view that the next evaluation overwrites.
        """
        return self._step(tokens, logits, self._model.executable.step)

    @property
    def most_picked(self) -> int:
        """How many of the largest logits `evaluate_largest` may be asked for; 0 where it is not there."""
        executable = self._model.executable
        return executable.most_picked if isinstance(executable, Picks) else 0

    def evaluate_largest(self, tokens: Sequence[int], count: int) -> Largest:
        """As `evaluate`, for the `count` largest logits of the last token alone."""
        executable = self._model.executable
        assert isinstance(executable, Picks)
        return self._step(tokens, False, lambda batch: executable.step_largest(batch, count))

    def _step(self, tokens: Sequence[int], logits: bool, run: Callable[[Batch], _Result]) -> _Result:
        sequence, count = self._sequence, len(tokens)
        if sequence.length + count > self._model.context:
            raise ContextFull(
                f"the context of {self._model.context} tokens is full: {sequence.length} are held and {count} more "
                "do not fit; start with a larger context (-c)"
            )
        start = sequence.length
        slots, *window_slots = sequence.append(list(tokens))
        try:
            self._copy_blocks()
            tables, *window_tables = (table[None] for table in sequence.tables())
            batch = Batch(
                tokens=np.array(tokens, np.int32),
                positions=np.arange(start, start + count, dtype=np.int32),
                slots=slots,
                sequence=np.zeros(count, np.int32),
                tables=tables,
                logit_rows=np.arange(count, dtype=np.int32) if logits else np.array([count - 1], np.int32),
                window_slots=window_slots[0] if window_slots else None,
                window_tables=window_tables[0] if window_tables else None,
            )
            return run(batch)
        except BaseException:
            sequence.truncate(start)
            raise

    def _copy_blocks(self) -> None:
        """What forks that go on need before the next step."""
        full = self._model.pool
        for pool, windowed in ((full, False), (full.windowed, True)):
            if pool is not None:
                source, target = pool.take_copies()
                if source.size:
                    self._model.executable.copy_blocks(source, target, windowed)

    def shared(self, tokens: Sequence[int]) -> int:
        """How many of the leading `tokens` are in the cache."""
        return self._sequence.common_prefix(tokens)

    def rewind(self, length: int) -> int:
        """Keep the first `length` tokens; none where what layers with a window saw then has been given up."""
        length = self._sequence.reach(length)
        self._sequence.truncate(length)
        return length

    # -- conversations in files --------------------------------------------------------------------------------------

    def read_blocks(self, layer: int, start: int, stop: int) -> NDArray[np.uint8]:
        """Content of the cache blocks start..stop of this conversation in one layer: uint8 (blocks, bytes)."""
        return self._model.executable.read_blocks(layer, self._table(layer)[start:stop])

    def write_blocks(self, layer: int, start: int, content: NDArray[np.uint8]) -> None:
        """Put content (blocks, bytes) into the blocks of this conversation from `start` on."""
        self._model.executable.write_blocks(layer, self._table(layer)[start : start + len(content)], content)

    def _table(self, layer: int) -> NDArray[np.int32]:
        tables = self._sequence.tables()
        return tables[-1 if self._model.layers[layer].window else 0]

    @contextmanager
    def taking(self, tokens: Sequence[int]) -> Iterator[None]:
        """Take blocks for tokens, whole blocks of them from the start, which are filled meanwhile."""
        self._sequence.occupy(tokens)
        try:
            yield
        except BaseException:
            self._sequence.free()
            raise

    # -- answers ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        cancel: threading.Event | None = None,
        ignore_end: bool = False,
        resumed: bool = False,
    ) -> Iterator[Piece]:
        """Stream the continuation of `prompt` (from position 0; what the cache holds already is not evaluated again).

        `resumed`: the prompt ends in the middle of a text, so that a first space is the text's own.
        Ends at an end-of-generation token, a stop string, `max_tokens`, or the end of the context; the last piece says
        which. ContextFull if the prompt itself does not fit.
        """
        model = self._model
        if not prompt:
            raise LocalLLMError("the prompt has no tokens; give some text")
        if len(prompt) > model.context:
            raise ContextFull(
                f"the prompt has {len(prompt)} tokens, the context holds {model.context}; shorten it or raise -c"
            )
        began = perf_counter()
        reused = self.rewind(self._sequence.common_prefix(prompt[:-1]))  # the last one's logits are needed
        steps = self._steps(sampler, prompt)
        cancelled = cancel.is_set if cancel is not None else lambda: False
        for start in range(reused, len(prompt), model.batch_rows):
            if cancelled():
                break
            steps.start(self.evaluate(prompt[start : start + model.batch_rows], logits=False))
        prompt_seconds = perf_counter() - began
        for token in prompt:
            sampler.accept(token)

        decoder = model.tokenizer.stream(drop_space=not resumed) if model.tokenizer is not None else None
        stops = StopStrings(stop) if stop else None
        ends = frozenset[int]() if ignore_end or model.tokenizer is None else model.tokenizer.eog
        tokens, taken, decode_seconds, first = 0, 0, 0.0, 0.0
        reason: StopReason = "cancelled"
        tail = ""
        try:
            while not cancelled():
                if max_tokens is not None and tokens >= max_tokens:
                    reason = "length"
                    break
                token = steps.sample()
                first = first or perf_counter() - began
                if token in ends:
                    reason = "end"
                    break
                sampler.accept(token)
                tokens += 1
                text = decoder.push(token) if decoder is not None else ""
                if stops is not None:
                    text, stopped = stops.push(text)
                    if stopped:
                        reason, tail = "stop", text
                        break
                yield Piece(text, token)
                if steps.held >= model.context:
                    reason = "context"
                    break
                if max_tokens is not None and tokens >= max_tokens:
                    reason = "length"
                    break
                before = perf_counter()
                steps.feed(token, model.context if max_tokens is None else max_tokens - tokens)
                decode_seconds += perf_counter() - before
                taken += 1
        finally:
            steps.close()
        if reason != "stop":
            tail = decoder.finish() if decoder is not None else ""
            if stops is not None:
                text, stopped = stops.push(tail)
                tail = text if stopped else text + stops.finish()
        memory = model.executable.memory
        yield Piece(
            tail,
            None,
            Statistics(
                prompt_tokens=len(prompt),
                reused_tokens=reused,
                prompt_seconds=prompt_seconds,
                answer_tokens=tokens,
                decode_seconds=decode_seconds,
                decode_steps=taken,
                first_token_seconds=first,
                bytes_per_step=int(memory.read_after(self._sequence.length)),
                reason=reason,
                decode_passes=steps.passes,
                speculation=steps.speculated(),
            ),
        )

    def _steps(self, sampler: Sampler, prompt: Sequence[int]) -> Steps:
        if self._speculator is None:
            return PlainSteps(self, sampler)
        from localllm.speculation.steps import SpeculativeSteps

        return SpeculativeSteps(self._speculator, self, sampler, prompt)
