"""Split a text into windows as llama.cpp's perplexity tool does, and compute the log probabilities of a model for them.

A text of n tokens has n // ctx independent windows. If the vocabulary requires BOS, it replaces the first token of each
window. The tokens in the second half of a window are scored, except the first of them.

With a stride, windows overlap: each window starts `stride` tokens after the previous window, and its last `stride`
tokens are scored. BOS is not inserted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.evaluation.likelihood import F32, Scores, compare, log_softmax, score
from localllm.model import Model

PIECE_BYTES = 16 << 20  # maximum bytes of log probabilities at a time; several arrays of this size exist together


class TextTooShort(LocalLLMError):
    """The text does not fill the requested windows."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Token ids int32 (windows, ctx), as returned by the tokenizer. Without a `stride`, windows do not overlap."""

    tokens: NDArray[np.int32]
    stride: int = 0

    @property
    def ctx_size(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def first(self) -> int:
        """Position of the first scored row."""
        return self.ctx_size - 1 - self.stride if self.stride else self.ctx_size // 2

    @property
    def scored(self) -> int:
        """Number of scored predictions per window."""
        return self.ctx_size - 1 - self.first

    def targets(self, window: int) -> NDArray[np.int32]:
        """Return the tokens (scored,) to predict."""
        return self.tokens[window, self.first + 1 :]


class LogitsSource(Protocol):
    """Provides log probabilities, from a model or from a file."""

    vocabulary: int

    def log_probabilities(self, window: int, start: int, stop: int) -> F32:
        """Return rows start..stop of the scored tokens in a window, (stop - start, vocabulary). Calls must be in
        order."""
        ...


def strided_size(ctx_size: int, stride: int) -> int:
    """Return llama.cpp's window size: the context plus half the stride, rounded up to a multiple of 256 tokens."""
    return -(-(ctx_size + stride // 2) // 256) * 256


def cut_windows(model: Model, text: str, ctx_size: int, limit: int | None = None, stride: int = 0) -> Windows:
    """Split a text into at most `limit` windows. Raise TextTooShort if there are fewer than two windows and no
    overlap."""
    named = (" (", Setting("ctx_size"), ")")
    if ctx_size < 4:
        raise LocalLLMError(Notice(f"windows of {ctx_size} tokens leave nothing to score; use at least 4", *named))
    tokens = np.array(model.tokenize(text.removesuffix("\n")), np.int32)
    count = len(tokens) // ctx_size
    if count < 2:
        counts = f"the text has {len(tokens)} tokens and {2 * ctx_size} are needed for windows of {ctx_size}"
        raise TextTooShort(Notice(counts, "; use a longer text or a smaller window", *named))
    if not stride:
        count = min(count, limit) if limit else count
        return Windows(tokens[: count * ctx_size].reshape(count, ctx_size))
    if stride >= ctx_size:
        raise LocalLLMError(Notice(f"windows of {ctx_size} tokens are too small for a stride of {stride}", *named))
    # The last token of the text predicts nothing.
    overlapping = np.lib.stride_tricks.sliding_window_view(tokens[:-1], ctx_size)[::stride]
    return Windows(overlapping[:limit], stride)


class ModelSource:
    """An open model whose context is large enough for a window."""

    def __init__(self, model: Model, windows: Windows) -> None:
        assert model.config is not None
        if model.context < windows.ctx_size:
            counts = f"windows of {windows.ctx_size} tokens do not fit the context of {model.context}"
            raise LocalLLMError(Notice(counts, " (", Setting("ctx_size"), ")"))
        highest = int(windows.tokens.max())
        if highest >= model.config.vocabulary:
            raise LocalLLMError(
                f"{model.file.path}: has no token {highest}, which the text needs; is it the same vocabulary?"
            )
        self.vocabulary = model.config.vocabulary
        self._model, self._windows = model, windows
        self._session = model.session()

    def log_probabilities(self, window: int, start: int, stop: int) -> F32:
        if start == 0:
            self._session.rewind(0)
            self._read(window)
        first = self._windows.first
        rows = self._windows.tokens[window, first + start : first + stop].tolist()
        step = self._model.executable.limits.logit_rows
        parts = [
            log_softmax(self._session.evaluate(rows[i : i + step], logits=True)) for i in range(0, len(rows), step)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, window: int) -> None:
        """Evaluate the first half of the window, which is not scored."""
        tokens = self._windows.tokens[window, : self._windows.first].tolist()
        tokenizer = self._model.maybe_tokenizer
        if tokenizer is not None and tokenizer.add_bos and tokenizer.bos is not None and not self._windows.stride:
            tokens[0] = tokenizer.bos
        for start in range(0, len(tokens), self._model.batch_rows):
            self._session.evaluate(tokens[start : start + self._model.batch_rows], logits=False)

    def close(self) -> None:
        self._session.close()


def evaluate(
    windows: Windows,
    source: LogitsSource,
    base: LogitsSource | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    keep: Callable[[F32], None] | None = None,
) -> Iterator[Scores]:
    """Yield the scores of the windows in order. `keep` receives the log probabilities of `source`, in order.

    Raises LocalLLMError if the vocabularies differ, or if probabilities are not finite.
    """
    if base is not None and base.vocabulary != source.vocabulary:
        raise LocalLLMError(
            f"the model has {source.vocabulary} tokens and the base {base.vocabulary}; "
            "only models of the same vocabulary can be compared"
        )
    step = max(PIECE_BYTES // (4 * source.vocabulary), 1)
    count = len(windows.tokens)
    if progress is not None:
        progress("evaluating", 0, count)
    for window in range(count):
        targets = windows.targets(window)
        parts = []
        for start in range(0, len(targets), step):
            stop = min(start + step, len(targets))
            log_p = _finite(source, window, start, stop, "model")
            if keep is not None:
                keep(log_p)
            if base is None:
                parts.append(score(log_p, targets[start:stop]))
            else:
                parts.append(compare(log_p, _finite(base, window, start, stop, "base"), targets[start:stop]))
        if progress is not None:
            progress("evaluating", window + 1, count)
        yield Scores.join(parts)


def _finite(source: LogitsSource, window: int, start: int, stop: int, what: str) -> F32:
    log_p = source.log_probabilities(window, start, stop)
    if not np.isfinite(log_p.min()):
        raise LocalLLMError(
            f"the {what} gives NaN or infinity in window {window + 1} of the text; its weights are damaged, or beyond "
            "float32"
        )
    return log_p
