"""Reads a prompt into a session, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Evaluates(Protocol):
    """What reading, decoding and checking guesses need of a session."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

    @property
    def room(self) -> int:
        """How many more fit as things stand."""
        ...

    def evaluate(self, tokens: Sequence[int], logits: bool) -> NDArray[np.float32]:
        """Append tokens; logits (T, vocabulary), or (1, vocabulary) of the last alone."""
        ...

    def rewind(self, length: int) -> int:
        """Keep the first `length` tokens, or none if that is not possible: how many."""
        ...


def prefill(
    session: Evaluates, tokens: Sequence[int], batch_rows: int, cancelled: Callable[[], bool]
) -> NDArray[np.float32] | None:
    """Evaluate tokens, `batch_rows` at a time; logits (1, vocabulary) of the last, or None if it was cancelled."""
    logits = None
    for start in range(0, len(tokens), batch_rows):
        if cancelled():
            return None
        logits = session.evaluate(tokens[start : start + batch_rows], logits=False)
    return logits
