"""What a text model takes besides tokens: the embeddings of pictures and sound, which encoders compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from localllm.models.builder import Builder
from localllm.plan import Value


@dataclass(frozen=True, slots=True)
class MediaInput:
    """The embeddings of media tokens: rows of `streams` slices as wide as the model.

    The first slice replaces the token's embedding, the others are added behind the first layers (deepstack). `span` is
    the largest number of tokens of a picture whose tokens see each other, in the layers that `Properties.spans` names;
    0: pictures are causal.
    """

    streams: int = 1
    span: int = 0


class MediaRecorder:
    """Records how media tokens enter a model. Without media it records nothing."""

    def __init__(self, builder: Builder) -> None:
        self._recorder, self._given, width = builder.recorder, builder.media, builder.config.width
        self._media = self._recorder.embed_media(self._given.streams * width) if self._given is not None else None

    def embedded(self, x: Value) -> Value:
        """Return the embeddings x of a batch, with those of media tokens in place."""
        return x if self._media is None else self._recorder.splice(x, self._media)

    def behind(self, layer: int, x: Value) -> Value:
        """Return a layer's output x plus the stream that belongs there."""
        if self._given is None or self._media is None or layer + 1 >= self._given.streams:
            return x
        media = self._media if x.rows == "batch" else self._recorder.select_rows(self._media)
        return self._recorder.splice(x, media, (layer + 1) * x.width, add=True)


def axes_of(sections: Sequence[int], pairs: int, interleaved: bool) -> tuple[int, ...]:
    """Return the axis (time, row, column, other) by which each of the rotated pairs turns (M-RoPE, arXiv:2409.12191).

    `sections` are the numbers of pairs per axis. If `interleaved`, the axes alternate, and pairs beyond their sections
    turn by time, as in transformers; llama.cpp does not turn these.
    """
    total, ends = sum(sections), list(accumulate(sections))
    if not interleaved:
        return tuple([next(axis for axis, end in enumerate(ends) if pair % total < end) for pair in range(pairs)])
    return tuple([
        axis if (axis := pair % total % 3) < len(sections) and pair % total < 3 * sections[axis] else 0
        for pair in range(pairs)
    ])  # fmt: skip
