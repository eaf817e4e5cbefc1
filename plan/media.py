"""Embeddings of pictures and sound among the tokens of a text.

A media token has a negative id and a row of `Batch.media`, which an encoder computed. Its row consists of `streams`
slices as wide as the model: the first replaces the token's embedding, the others are added behind layers (deepstack).
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.operation import Producer, Unary
from localllm.plan.values import Value


@dataclass(frozen=True, slots=True)
class EmbedMedia(Producer):
    """out[t] = the row of `Batch.media` for token t if its id is negative. Other rows are undefined, and never read."""


@dataclass(frozen=True, slots=True)
class Splice(Unary):
    """out[t] = x[t] for tokens of the text; for media tokens, columns start.. of media[t], added to x[t] if `add`."""

    media: Value
    start: int
    add: bool

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.x, self.media
