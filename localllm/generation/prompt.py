"""Evaluate a prompt in a session, one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Evaluates(Protocol):
    """The part of a session that prefill, decoding and verification use."""

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        ...

    @property
    def room(self) -> int:
        """Number of tokens that still fit now."""
        ...

    def evaluate(self, tokens: Sequence[int], logits: bool) -> NDArray[np.float32]:
        """Append tokens; return logits (T, vocabulary), or (1, vocabulary) for only the last."""
        ...

    def rewind(self, length: int) -> int:
        """Keep the first `length` tokens, or none if that is not possible; return the number kept."""
        ...


def prefill(
    session: Evaluates, tokens: Sequence[int], batch_rows: int, cancelled: Callable[[], bool]
) -> NDArray[np.float32] | None:
    """Evaluate tokens, `batch_rows` at a time; return logits (1, vocabulary) of the last, or None if cancelled."""
    logits = None
    for start in range(0, len(tokens), batch_rows):
        if cancelled():
            return None
        logits = session.evaluate(tokens[start : start + batch_rows], logits=False)
    return logits
