"""Watching how an answer is made, without changing it; an answer that nobody watches takes no longer.

`Engine.watch` is told of steps, `Session.watch` of answers. `localllm.explain` records both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from localllm.generation.decoding import Decoding
from localllm.sampling.sampler import Sampler

if TYPE_CHECKING:
    from localllm import cache


class Watches(Protocol):
    """Told of a session's answers."""

    def answer(self, prompt: Sequence[int], sequence: cache.Sequence, decoding: Decoding, sampler: Sampler) -> Decoding:
        """Return the decoding to use in place of `decoding`; it must choose the same tokens.

        The sequence holds the tokens of the prompt that need not be evaluated again.
        """
        ...
