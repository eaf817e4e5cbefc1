"""Log probabilities of a base model on disk, in llama.cpp's --kl-divergence-base format.

The file has "_logits_", then int32 ctx, vocabulary and windows, then the tokens int32 (windows, ctx). Each scored token
has a row of uint16: two float32 (scale, lowest), then one integer n per token of the vocabulary, which represents
lowest + scale * n. Rows are padded to an even length. Values below e^-16 times the largest probability are clamped.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localllm.base.errors import LocalLLMError
from localllm.base.files.outputs import new_file
from localllm.base.files.regular import open_regular
from localllm.base.notices import Notice, Setting
from localllm.evaluation.likelihood import F32
from localllm.evaluation.windows import Windows

MAGIC = b"_logits_"
HEAD = len(MAGIC) + 12
DEPTH = np.float32(16.0)  # distance from the highest to the lowest stored logarithm
STEPS = np.float32(65535.0)
LIMIT = 1 << 24  # maximum of ctx, vocabulary and windows; a larger value means another kind of file


def _row(vocabulary: int) -> int:
    """Return the number of uint16 values per row."""
    return 2 * ((vocabulary + 1) // 2) + 4


def is_logits_file(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC


class LogitsFile:
    """An open file of log probabilities: a `LogitsSource` for its windows. The caller closes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = io.BufferedReader(open_regular(path))
        try:
            self.windows, self.vocabulary = self._head()
        except BaseException:
            self._file.close()
            raise

    def _head(self) -> tuple[Windows, int]:
        head = self._file.read(HEAD)
        if len(head) < HEAD or head[: len(MAGIC)] != MAGIC:
            raise LocalLLMError(Notice(f"{self._path}: not a base-logits file; make one with ", Setting("save_base")))
        ctx, vocabulary, count = np.frombuffer(head, "<i4", 3, len(MAGIC)).tolist()
        if not (4 <= ctx <= LIMIT and 1 <= vocabulary <= LIMIT and 1 <= count <= LIMIT):
            raise LocalLLMError(
                f"{self._path}: damaged: {count} windows of {ctx} tokens and a vocabulary of {vocabulary}"
            )
        row = 2 * _row(vocabulary)
        size = HEAD + count * (4 * ctx + (ctx - 1 - ctx // 2) * row)
        found = os.fstat(self._file.fileno()).st_size
        if found < size:
            raise LocalLLMError(f"{self._path}: has {found} bytes, but its header requires {size}; it is truncated")
        tokens = np.frombuffer(self._file.read(4 * ctx * count), "<i4").astype(np.int32).reshape(count, ctx)
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise LocalLLMError(f"{self._path}: contains a token outside its vocabulary; it is damaged")
        return Windows(tokens), vocabulary

    def log_probabilities(self, window: int, start: int, stop: int) -> F32:
        """Return rows start..stop of the scored tokens in a window, (stop - start, vocabulary)."""
        row = 2 * _row(self.vocabulary)
        before = HEAD + self.windows.tokens.nbytes
        self._file.seek(before + (window * self.windows.scored + start) * row)
        return unpack_logits(np.frombuffer(self._file.read((stop - start) * row), "<u2").reshape(stop - start, -1))[
            :, : self.vocabulary
        ]

    def close(self) -> None:
        self._file.close()


def unpack_logits(rows: NDArray[np.uint16]) -> F32:
    """Convert stored rows to log probabilities float32 (rows, vocabulary padded to even)."""
    scale, lowest = np.ascontiguousarray(rows[:, :4]).view("<f4").T[:, :, None]
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged file may contain infinity
        log_p: F32 = scale * rows[:, 4:].astype(np.float32) + lowest
    return log_p


def pack_logits(log_p: F32) -> NDArray[np.uint16]:
    """Convert log probabilities (rows, vocabulary) to stored rows uint16."""
    highest = log_p.max(axis=1, keepdims=True)
    lowest = np.maximum(log_p.min(axis=1, keepdims=True), highest - DEPTH)
    scale = (highest - lowest) / STEPS
    rows = np.zeros((len(log_p), _row(log_p.shape[1])), "<u2")
    rows[:, :4] = np.concatenate([scale, lowest], axis=1).astype("<f4").view("<u2")
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # clamping also handles -infinity
        steps = np.where(scale > 0, np.rint((log_p - lowest) / scale), 0)
    rows[:, 4 : 4 + log_p.shape[1]] = np.clip(steps, 0, STEPS)
    return rows


@contextmanager
def save_base(
    path: Path, windows: Windows, vocabulary: int, overwrite: bool = False
) -> Iterator[Callable[[F32], None]]:
    """Yield a function that takes the log probabilities in order. The file appears only after everything succeeded.

    Raises OutputError for an existing file without `overwrite`, and if a write fails.
    """
    with new_file(path, overwrite) as file:
        file.write(MAGIC + np.array([windows.ctx_size, vocabulary, len(windows.tokens)], "<i4").tobytes())
        file.write(windows.tokens.astype("<i4").tobytes())
        yield lambda log_p: file.write(pack_logits(log_p).tobytes())
