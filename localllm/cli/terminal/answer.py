"""Functions that `chat` and `run` share: stream an answer to stdout, stop it on Ctrl-C, and print statistics."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any

from localllm.base.notices import Notice
from localllm.cli.flags import typed
from localllm.cli.options import DisplayOptions
from localllm.cli.terminal.console import YELLOW, say
from localllm.cli.terminal.formatting import rate_text
from localllm.cli.terminal.shown import shown_on
from localllm.generation.statistics import Usage
from localllm.model import Model
from localllm.options import AnswerOptions, SamplingOptions

if TYPE_CHECKING:
    from localllm.chat import Conversation
    from localllm.engine import ContextFull
    from localllm.generation.request import Finished
    from localllm.reply import Reply
    from localllm.template import ChatTemplate


MEASURE_SECONDS = 0.03


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets instead of raising, so that no forward pass stops halfway."""
    cancel = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        cancel.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)


def write(reply: Reply, display: DisplayOptions, conversation: Conversation | None = None) -> Finished:
    """Stream an answer to stdout, then end its line. Piped output is the model's text, unchanged if it is printable."""
    from localllm.generation.parts import Content, Reasoning

    if conversation is not None and conversation.data:
        display = display.changed({"plain": True})
    # Output under a grammar is only wrapped at words, because characters that look like Markdown are literal there.
    shown = shown_on(sys.stdout, display, markdown=conversation is None or not conversation.structured)
    try:
        for piece in reply:
            if conversation is None or not shown.parted:
                shown.content(piece.raw if conversation is None else conversation.shown(piece))
                continue
            for part in piece.parts:
                if isinstance(part, Reasoning):
                    shown.reasoning(part.text)
                elif isinstance(part, Content):
                    shown.content(part.text)
    finally:
        shown.end()
    return reply.end


def tell(model: Model) -> None:
    """Print decisions made while loading: the devices, the KV cache types, a guessed pre-tokenizer."""
    for note in (model.placed, model.cache.note):
        if note:
            say(note)
    if model.maybe_tokenizer is not None and model.maybe_tokenizer.note:
        say(f"note: {model.maybe_tokenizer.note}", YELLOW)


def sampling_of(model: Model, asked: Mapping[str, Any]) -> SamplingOptions:
    """Combine the user's sampler options with the defaults in the file. Print a note for each unusable default."""
    for note in model.sampling_defaults.notes:
        say(f"note: {note}", YELLOW)
    return model.sampling_defaults.options(asked)


def converse(
    model: Model,
    template: ChatTemplate,
    answering: AnswerOptions,
    asked: Mapping[str, Any],
    first_messages: Sequence[Mapping[str, str]] = (),
    context_shift: bool = False,
) -> Conversation:
    """Create a conversation from the options."""
    from localllm.chat import Conversation

    return Conversation(
        model,
        template,
        sampling_of(model, asked),
        lambda note: say(Notice("note: ", note), YELLOW),
        answering,
        context_shift=context_shift,
        first_messages=first_messages,
    )


def explain_end(model: Model) -> str:
    """Explain why an answer stopped at a full context."""
    return f"the context of {model.context} tokens is full and the answer ends here; {_larger(model)}"


def explain_refusal(model: Model, error: ContextFull) -> str:
    """Explain why a prompt does not fit. Advise a larger context only if the model was trained on one."""
    counts = typed(error).partition("; ")[0]
    return f"{counts}; shorten it, or {_larger(model)}" if _trained(model) > model.context else f"{counts}; shorten it"


def _larger(model: Model) -> str:
    trained = _trained(model)
    if model.context >= trained:
        return f"the model was trained on {'no more' if model.context == trained else trained}"
    return f"-c N raises it, up to the trained length of {trained}"


def _trained(model: Model) -> int:
    return model.config.context_length if model.config is not None else model.context


def read_bandwidth(model: Model) -> float:
    """Measure the bandwidth, in bytes per second, at which this machine reads the weights: the best of several short
    reads."""
    return max(_reads(model, MEASURE_SECONDS))


def _reads(model: Model, seconds: float) -> list[float]:
    start, found = perf_counter(), []
    while True:  # one read is enough for large weights
        found.append(model.executable.read_bandwidth())
        if perf_counter() - start > seconds:
            return found


class MeasuredRoof:
    """The read bandwidth of this machine, for comparison with the bandwidth that decoding used.

    Other programs can disturb the measurement. The measurement is valid if the median of many reads is close to the
    best read.
    """

    SECONDS, STEADY, MOST_SHARE = 0.1, 0.8, 1.05

    def __init__(self, model: Model) -> None:
        self._model, self._best = model, 0.0

    def share(self, bandwidth: float) -> tuple[float, float]:
        """Return a bandwidth as a share of the maximum, and the maximum in bytes per second, or (0, 0) if unknown."""
        reads = sorted(_reads(self._model, self.SECONDS))
        steady = reads[len(reads) // 2] >= self.STEADY * reads[-1]
        self._best = max(self._best, reads[-1] if steady else 0.0)
        share = bandwidth / self._best if self._best and steady else 0.0
        return (share, self._best) if share <= self.MOST_SHARE and share else (0.0, 0.0)


def statistics_line(s: Usage, used: int, context: int) -> str:
    """Return the short statistics of an answer. `used` is the number of context tokens so far."""
    parts = []
    if s.answer_tokens:
        parts.append(f"first token {s.first_token_seconds:.2f} s")
    if s.decode_steps:
        parts.append(f"{rate_text(s.decode_rate)} tokens/s")
    return ", ".join([*parts, f"{used} of {context} tokens"])


def full_statistics(s: Usage, roof: MeasuredRoof) -> str:
    """Return all measured statistics in one line."""
    reused = f" (+ {s.reused_tokens} reused)" if s.reused_tokens else ""
    parts = [f"prompt {s.prompt_tokens - s.reused_tokens}{reused}, {rate_text(s.prompt_rate)} tokens/s"]
    if s.answer_tokens:
        rate = f", {rate_text(s.decode_rate)} tokens/s" if s.decode_steps else ""
        parts += [f"answer {s.answer_tokens}{rate}", f"first token {s.first_token_seconds:.2f} s"]
    if s.decode_steps:
        share, of = roof.share(s.bandwidth)
        parts.append(f"{s.bandwidth / 1e9:.2f} GB/s" + (f", {share:.0%} of {of / 1e9:.1f} GB/s" if share else ""))
    if s.drafting:
        parts.append(speculation_part(s))
    return " | ".join(parts)


def speculation_part(s: Usage) -> str:
    """Return the result of speculation: accepted and drafted tokens, accepted tokens per forward pass, and the
    speedup."""
    if not s.rounds:
        return "no tokens drafted"
    return (
        f"accepted {s.accepted} of {s.drafted} drafted tokens ({s.mean_accepted:.1f} a pass), "
        f"estimated x{s.speedup:.2f} of plain decoding"
    )
