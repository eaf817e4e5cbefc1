"""The facts about a loaded model that are not in its file. The model may be loaded in another process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The context, the memory and the devices of a loaded model. Sizes are in bytes."""

    context: int  # tokens
    blocks: int  # cache blocks
    weights: int
    cache: int
    scratch: int
    draft: int  # weights, cache and scratch of a draft model
    device: str
    placed: str = ""  # which layers run on which device
    pools: bool = False  # whether it returns hidden states, which embeddings pool
    encoders: int = 0  # weights, cache and scratch of the encoders of pictures and sound

    @property
    def bytes(self) -> int:
        return self.weights + self.cache + self.scratch + self.draft + self.encoders
