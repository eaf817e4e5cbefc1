"""Decoding, the source of an answer's tokens: its interface, and plain decoding with one pass per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Largest
from localllm.generation.prompt import Evaluates
from localllm.generation.statistics import Speculated
from localllm.sampling.sampler import Sampler


class Deciding(NamedTuple):
    """What decides the next token of an answer: logits, and the token that was drafted in its place."""

    logits: NDArray[np.float32]  # (V,), a view that the next pass overwrites
    draft: int | None = None
    verified: bool = False  # whether the draft was in the last pass, so that accepting it costs no pass
    drafter: str = ""


class Decoding(Protocol):
    """The source of an answer's tokens: `sample` returns the next one, `feed` evaluates it, in turn."""

    @property
    def passes(self) -> int:
        """Number of passes of the model."""
        ...

    @property
    def held(self) -> int:
        """Number of final tokens in the cache."""
        ...

    def start(self, logits: NDArray[np.float32]) -> None:
        """Take the logits (1, V) after the prompt."""
        ...

    def sample(self) -> int: ...

    def deciding(self) -> Deciding:
        """Return what `sample` decides by, before and after it, until `feed`."""
        ...

    def feed(self, token: int, wanted: int) -> None:
        """Feed the token that the sampler has accepted; at most `wanted` more will be requested."""
        ...

    def close(self) -> None:
        """Remove everything from the cache that was not fed."""
        ...

    def speculated(self) -> Speculated | None: ...


class Speculates(Protocol):
    """Decodes answers with drafted tokens."""

    def decode(self, session: Evaluates, sampler: Sampler, prompt: Sequence[int]) -> Decoding: ...

    def close(self) -> None: ...


class EvaluatesLargest(Evaluates, Protocol):
    """A session that can return only the largest logits."""

    @property
    def most_picked(self) -> int:
        """Maximum number of largest logits; 0: not supported."""
        ...

    def evaluate_largest(self, tokens: Sequence[int], count: int) -> Largest: ...


class PlainDecoding:
    """One pass per token. If the device can select the largest logits, it returns only those that decide."""

    def __init__(self, session: EvaluatesLargest, sampler: Sampler, whole: bool = False) -> None:
        """`whole`: return all logits, although fewer decide."""
        self._session, self._sampler = session, sampler
        self._logits: NDArray[np.float32] | None = None
        self._largest: Largest | None = None
        self._wanted = sampler.looks_at if sampler.looks_at <= session.most_picked and not whole else 0
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

    def deciding(self) -> Deciding:
        assert self._logits is not None, "only some logits are here"
        return Deciding(self._logits[-1])

    def feed(self, token: int, wanted: int) -> None:
        if self._wanted:
            self._largest = self._session.evaluate_largest((token,), self._wanted)
        else:
            self._logits = self._session.evaluate((token,), logits=False)
        self.passes += 1

    def close(self) -> None: ...

    def speculated(self) -> None: ...
