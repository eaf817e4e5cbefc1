"""The pictures and sounds of a request: their tokens in its prompt, and their embeddings while they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from localllm.engine import Encoding, MediaSpan, Placed
from localllm.engine.media import MediaIds

F32 = NDArray[np.float32]


class PromptMedia:
    """A picture or a sound of a request's prompt, and its embeddings while they are needed."""

    def __init__(self, placed: Placed, span: MediaSpan) -> None:
        self.placed, self.span = placed, span
        self.encoding: Encoding | None = None  # while the encoder works on it
        self.embeddings: F32 | None = None  # (tokens, width)
        self.encoded = 0  # tokens that the encoder has made, more than once after a preemption

    def drop(self) -> None:
        """Give up the embeddings, because they are in the cache or the request has ended."""
        self.encoding = self.embeddings = None

    @property
    def start(self) -> int:
        return self.placed.start

    @property
    def stop(self) -> int:
        return self.placed.stop


def expanded(prompt: Sequence[int | MediaSpan], ids: MediaIds) -> tuple[list[int], list[PromptMedia]]:
    """Return the tokens of a prompt, media tokens included, and its media."""
    tokens: list[int] = []
    found: list[PromptMedia] = []
    if MediaSpan not in set(map(type, prompt)):
        return cast(list[int], list(prompt)), found
    for each in prompt:
        if isinstance(each, MediaSpan):
            media = ids.of(each.key, each.tokens, each.positions, each.advance, each.causal)
            found.append(PromptMedia(Placed(len(tokens), media), each))
            tokens += media.ids
        else:
            tokens.append(each)
    return tokens, found


def rows_of(media: Sequence[PromptMedia], start: int, stop: int) -> F32 | None:
    """Return the embeddings of the media tokens among tokens `start` to `stop`; None if there are none."""
    parts = []
    for each in media:
        first, last = max(each.start, start), min(each.stop, stop)
        if first < last:
            assert each.embeddings is not None, "evaluated before they are encoded"
            parts.append(each.embeddings[first - each.start : last - each.start])
    return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else None
