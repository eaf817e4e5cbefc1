"""`EncoderInput`: one input of an encoder, with the layout of its tokens. It becomes one media chunk of the prompt.

A picture or a sound becomes one or more pieces (tiles, windows of 30 s) with marker texts around them. The encoder
reads `tensors` and `flags`; the engine reads the layout and `digest`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["image", "audio"]


@dataclass(frozen=True, slots=True)
class Flags:
    """Facts that an encoder needs besides the tensors. All defaults: nothing special."""

    view_separator: bool = False  # append the view separator (DeepSeek-OCR's overview)
    newline: bool = False
    lead_pad: int = 0  # pad embeddings in front (deepseek4v)
    grid: tuple[int, int] = (0, 0)  # columns and rows of tiles stacked in height behind the overview (granite4_vision)
    original: tuple[int, int] = (0, 0)  # width and height of the picture before preprocessing, with `grid`

    @property
    def numbers(self) -> tuple[int, ...]:
        """The flags as llama.cpp's eight numbers, for encoders."""
        return (int(self.view_separator), int(self.newline), self.lead_pad, *self.grid, *self.original, 0)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class EncoderInput:
    """One input of an encoder. `columns` x `rows` is the grid of its tokens; without one, it is `tokens` x 1.

    `axes` gives the tokens' positions in a text model with M-RoPE, relative to the first token (order t, y, x, z).
    Entries marked in `absolute` are positions themselves.
    """

    kind: Kind
    tensors: tuple[NDArray[np.float32], ...]  # (height, width, 3) each, or (mel bins, frames); two: frames of a video
    flags: Flags
    tokens: int
    columns: int
    rows: int
    positions: int  # position of the token behind the piece, relative to the first token
    causal: bool  # False: the tokens of this piece see each other in both directions
    axes: NDArray[np.int32] | None = None  # (tokens, 4), or None without M-RoPE: token i has the offset i
    absolute: NDArray[np.bool_] | None = None  # (tokens, 4): entries of `axes` that are positions, not offsets
    digest: bytes = field(init=False)  # SHA-256 of kind, tensors, shapes and flags

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.kind.encode() + struct.pack("<8q", *self.flags.numbers))
        for tensor in self.tensors:
            digest.update(struct.pack(f"<{tensor.ndim + 1}q", tensor.ndim, *tensor.shape))
            digest.update(np.ascontiguousarray(tensor, "<f4").data)
        object.__setattr__(self, "digest", digest.digest())

    @property
    def key(self) -> bytes:
        """SHA-256 of the content and of the layout: equal keys mean equal embeddings at equal offsets."""
        key = hashlib.sha256(self.digest)
        key.update(struct.pack("<5q", self.tokens, self.columns, self.rows, self.positions, self.causal))
        for array in (self.axes, self.absolute):
            key.update(b"-" if array is None else np.ascontiguousarray(array, "<i4").data)
        return key.digest()

    @property
    def nbytes(self) -> int:
        """Memory of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)
