"""`Projector`: an mmproj file's rules for pictures and sounds, from decoded arrays to marker texts and pieces.

    projector = Projector(file.metadata, TextModel(width, mrope, tokens), weights)
    parts = projector.picture([picture]) + ["describe it"]     # pass two frames for a pair of a video

Each marker text is tokenized alone, with special tokens parsed; the ids of adjacent texts are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.media.piece import Piece

Weights = Callable[[str], NDArray[np.float32] | None]  # the values of a small tensor of the file; None: it has none
Part = str | Piece


@dataclass(frozen=True, slots=True)
class TextModel:
    """What the layout depends on: the embedding width, M-RoPE, and the texts of the tokens."""

    width: int
    mrope: bool = False
    tokens: Collection[str] = ()


class Projector:
    """The rules of one mmproj file. Raises MediaError for a file that they cannot serve."""

    kinds: tuple[str, ...]  # "image", "audio"
    rate: int  # samples per second of `sound`; 0 without an audio encoder

    def __init__(
        self,
        metadata: Mapping[str, Any],
        text: TextModel,
        weights: Weights,
        minimum_tokens: int | None = None,
        maximum_tokens: int | None = None,
    ) -> None:
        raise NotImplementedError

    def picture(self, frames: Sequence[NDArray[np.uint8]], index: int = 0, before: int = 0) -> list[Part]:
        """Return the parts of a picture: (height, width, 3) uint8, or two frames of equal size.

        `index` counts the pictures before it in the prompt, `before` the tokens before it, without BOS.
        """
        raise NotImplementedError

    def sound(self, samples: NDArray[np.float32]) -> list[Part]:
        """Return the parts of a sound: mono samples at `rate`."""
        raise NotImplementedError
