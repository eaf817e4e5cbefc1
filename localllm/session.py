"""One conversation in an engine: evaluate tokens, reuse the cache, stream an answer.

A session remembers the tokens in its cache; a new prompt evaluates only the tokens after the common prefix. An answer
is a generator of pieces. The session stays usable if the reader stops early or sets the cancel event.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Largest
from localllm.engine import ContextFull, Engine, Rows
from localllm.errors import LocalLLMError
from localllm.generation.decoding import Decoding, PlainDecoding, Speculates
from localllm.generation.prompt import prefill
from localllm.generation.statistics import Meter, Piece, StopReason
from localllm.generation.text import AnswerText
from localllm.generation.watching import Watches
from localllm.notice import Notice, Setting
from localllm.sampling.sampler import Sampler
from localllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.scheduler.request import Constraint


class Session:
    """A sequence of an engine and its answers. Close it to return its blocks.

    Without a tokenizer, answers are only tokens. With a `speculator`, they are drafted and verified.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer | None = None, speculator: Speculates | None = None
    ) -> None:
        self.engine = engine
        self.sequence = engine.add()
        self.batch_rows = engine.limits.rows  # per pass over a prompt
        self._tokenizer, self._speculator = tokenizer, speculator
        self.watch: Watches | None = None  # told how answers are made

    @property
    def tokens(self) -> list[int]:
        """The tokens in the cache, in order."""
        return list(self.sequence.tokens)

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        return self.sequence.length

    @property
    def room(self) -> int:
        """Number of tokens that still fit now."""
        return self.engine.room(self.sequence)

    def close(self) -> None:
        """Return the blocks: now, or when the thread that uses the engine leaves it."""
        self.engine.alone.afterwards(self._release)

    def _release(self) -> None:
        self.engine.release(self.sequence)
        if self._speculator is not None:
            self._speculator.close()

    def use(self, speculator: Speculates | None) -> None:
        """Draft the next answers with `speculator`, or not at all."""
        if self._speculator is not None:
            self._speculator.close()
        self._speculator = speculator

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, tokens: Sequence[int], logits: bool) -> NDArray[np.float32]:
        """Append at most a step's tokens; return logits float32 (T, vocabulary), or (1, vocabulary) for only the last.

        The result is a view that the next evaluation overwrites.
        """
        return self.engine.step((Rows(self.sequence, tokens, "all" if logits else "last"),))[0].logits

    @property
    def most_picked(self) -> int:
        """Maximum number of largest logits that the device can find; 0: none."""
        return self.engine.most_largest

    def evaluate_largest(self, tokens: Sequence[int], count: int) -> Largest:
        """Append tokens, and return the `count` largest logits of the last one."""
        return self.engine.step((Rows(self.sequence, tokens, "last", count),))[0].largest

    def shared(self, tokens: Sequence[int]) -> int:
        """Return how many of the leading `tokens` are in the cache."""
        return self.sequence.common_prefix(tokens)

    def rewind(self, length: int) -> int:
        """Keep the first `length` tokens, or none if layers with a window have lost needed ones; return the number."""
        return self.engine.truncate(self.sequence, length)

    # -- answers ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        cancel: threading.Event | None = None,
        ignore_eos: bool = False,
        resumed: bool = False,
        constraint: Constraint | None = None,
        visible: Collection[int] = (),
    ) -> Iterator[Piece]:
        """Stream the continuation of `prompt` (from position 0; tokens in the cache are not evaluated again).

        `resumed`: the prompt ends in the middle of a text, so a first space belongs to the text. The answer is held to
        the `constraint`, which is at its start, or stands where the prompt ends. The text of the control tokens in
        `visible` is shown.
        Ends at an end-of-generation token, a stop string, `max_tokens`, the end of the context, or where the
        constraint ends; the last piece gives the reason. ContextFull if the prompt itself does not fit, ModelBusy at a
        piece that is requested while another thread uses the engine.
        """
        steps = self._generate(prompt, sampler, max_tokens, stop, cancel, ignore_eos, resumed, constraint, visible)
        return self.engine.alone.each(steps)

    def _generate(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        max_tokens: int | None,
        stop: tuple[str, ...],
        cancel: threading.Event | None,
        ignore_eos: bool,
        resumed: bool,
        constraint: Constraint | None,
        visible: Collection[int],
    ) -> Generator[Piece]:
        context = self.engine.limits.positions
        _check_prompt(prompt, context)
        prompt = self.engine.opened(prompt)
        meter = Meter(len(prompt))
        meter.reused_tokens = self.rewind(self.shared(prompt[:-1]))  # the logits of the last token are needed
        sampler.constrain(constraint, self._tokenizer.eog if self._tokenizer is not None else (), ignore_eos)
        decoding, text = self._decoding(sampler, prompt), AnswerText(self._tokenizer, stop, resumed, visible)
        cancelled = cancel.is_set if cancel is not None else lambda: False
        logits = prefill(self, prompt[meter.reused_tokens :], self.batch_rows, cancelled)
        meter.prompt_read()
        for token in prompt:
            sampler.accept(token)
        reason: StopReason = "cancelled"
        tail = ""
        try:
            if logits is not None:
                decoding.start(logits)
            while logits is not None and not cancelled():
                if max_tokens is not None and meter.answer_tokens >= max_tokens:
                    reason = "length"
                    break
                token = decoding.sample()
                meter.sampled()
                if sampler.is_end(token):
                    reason = "end"
                    break
                sampler.write(token)
                meter.answer_tokens += 1
                shown = text.push(token)
                if text.stopped:
                    reason, tail = "stop", shown
                    break
                yield Piece(shown, token)
                if sampler.finished:
                    reason = "end"
                    break
                if decoding.held >= context:
                    reason = "context"
                    break
                if max_tokens is not None and meter.answer_tokens >= max_tokens:
                    reason = "length"
                    break
                before = perf_counter()
                decoding.feed(token, context if max_tokens is None else max_tokens - meter.answer_tokens)
                meter.decoded(before)
        finally:
            decoding.close()
        read = int(self.engine.executable.memory.read_after(self.length))
        yield Piece(tail + text.finish(), None, meter.finish(reason, read, decoding.passes, decoding.speculated()))

    def _decoding(self, sampler: Sampler, prompt: Sequence[int]) -> Decoding:
        if self._speculator is not None:
            decoding: Decoding = self._speculator.decode(self, sampler, prompt)
        else:
            decoding = PlainDecoding(self, sampler, whole=self.watch is not None)
        return decoding if self.watch is None else self.watch.answer(prompt, self.sequence, decoding, sampler)


def _check_prompt(prompt: Sequence[int], context: int) -> None:
    """Raise LocalLLMError for a prompt without tokens, ContextFull for one longer than the context."""
    if not prompt:
        raise LocalLLMError("the prompt has no tokens; give some text")
    if len(prompt) > context:
        counts = f"the prompt has {len(prompt)} tokens, the context holds {context}"
        raise ContextFull(Notice(counts, "; shorten it or raise ", Setting("ctx_size")))
