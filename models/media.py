"""Records how the embeddings of pictures and sound, which encoders compute, enter a text model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from localllm.models.builder import Builder
from localllm.plan import Value


class MediaRecorder:
    """Records how media tokens enter a model. Without media it records nothing."""

    def __init__(self, builder: Builder) -> None:
        self._recorder, self._given, width = builder.recorder, builder.media, builder.config.width
        self._deepstack = builder.config.deepstack
        self._media = self._recorder.embed_media(self._given.streams * width) if self._given is not None else None

    def embedded(self, x: Value) -> Value:
        """Return the embeddings x of a batch, in which media tokens have their own."""
        return x if self._media is None else self._recorder.splice(x, self._media)

    def behind(self, layer: int, x: Value) -> Value:
        """Return a layer's output x plus the stream that belongs there."""
        if self._given is None or self._media is None:
            return x
        stream, listed = layer + 1, self._deepstack
        if listed:
            stream = listed[layer + 1] if layer + 1 < len(listed) else -1
        if not 0 < stream < self._given.streams:
            return x
        media = self._media if x.rows == "batch" else self._recorder.select_rows(self._media)
        return self._recorder.splice(x, media, stream * x.width, add=True)


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
