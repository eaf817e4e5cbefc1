"""A sequence for evaluating tokens without sampling, used by measurements, calibration and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.engine.engine import Engine
from localllm.engine.rows import SequenceRows


class Session:
    """A sequence of an engine. `close` frees its blocks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sequence = engine.add()
        self.batch_rows = engine.limits.rows  # maximum rows per forward pass in prefill

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
        """Number of tokens that still fit at present."""
        return self.engine.room(self.sequence)

    def close(self) -> None:
        """Free the blocks: now, or when the thread that holds the engine's lock releases it."""
        self.engine.alone.afterwards(lambda: self.engine.release(self.sequence))

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, tokens: Sequence[int], logits: bool) -> NDArray[np.float32]:
        """Append at most `batch_rows` tokens. Return float32 logits (T, V), or (1, V) of the last token unless
        `logits`.

        The result is a view that the next evaluation overwrites.
        """
        return self.engine.step((SequenceRows(self.sequence, tokens, "all" if logits else "last"),))[0].logits

    def shared(self, tokens: Sequence[int]) -> int:
        """Return the number of leading `tokens` that are in the cache."""
        return self.sequence.common_prefix(tokens)

    def rewind(self, length: int) -> int:
        """Keep the first `length` tokens; none if a sliding-window layer freed blocks they need. Return the length."""
        return self.engine.truncate(self.sequence, length)
