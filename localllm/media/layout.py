"""Lay out the tokens of a picture: marker texts, pieces, and the positions of the pieces' tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.media.encoder_input import EncoderInput, Flags
from localllm.media.errors import MediaError
from localllm.media.pictures import PictureRow
from localllm.media.settings import Settings
from localllm.media.views import View, Views


@dataclass(frozen=True, slots=True)
class TextModel:
    """What the layout depends on: the embedding width, M-RoPE, and the texts of the tokens.

    `streams` is the number of slices of a picture's embeddings, if the text model lists them; 0 if it does not.
    """

    width: int
    mrope: bool = False
    tokens: Collection[str] = ()
    streams: int = 0


def laid_out(views: Views, row: PictureRow, settings: Settings, text: TextModel) -> list[str | EncoderInput]:
    """Return the parts of a tiled picture, in order."""
    assert views.overview is not None
    marks = row.marks

    def marked(around: tuple[str, str], view: View) -> list[str | EncoderInput]:
        return [around[0], _plain_piece([view], row, settings, text), around[1]]

    parts: list[str | EncoderInput] = []
    if views.tiles:
        parts.append(marks.tiles[0])
        for at, tile in enumerate(views.tiles):
            y, x = divmod(at, views.columns)
            begin = marks.tile[0].format(y=y + 1, x=x + 1)
            parts += marked((begin, marks.tile[1]), tile)
            if x == views.columns - 1 and y < views.rows - 1:
                parts.append(marks.row_end)
        parts.append(marks.tiles[1])
    overview = marked(marks.overview, views.overview)
    parts = [*overview, *parts] if marks.overview_first else [*parts, *overview]
    return [part for part in (row.begin, *parts, row.end) if part]


def picture_piece(
    views: Sequence[View], row: PictureRow, settings: Settings, text: TextModel, index: int
) -> EncoderInput:
    """Return the piece of a picture that is not tiled. `index` is its number in the prompt."""
    if not (text.mrope or row.numbered):
        return _plain_piece(views, row, settings, text)
    tokens = _tokens(views[0], row, settings)
    columns, rows = tokens, 1
    if row.grid:
        height, width = views[0].values.shape[:2]
        columns, rows = width // settings.patch // 2, height // settings.patch // 2
    if row.numbered:
        axes, absolute = _numbered(columns, rows, index)
        if len(axes) != tokens:
            raise MediaError(f"a grid of {columns} x {rows} has {len(axes)} tokens, not {tokens}; the file is damaged")
        positions = tokens
    else:
        at = np.arange(tokens)
        zeros = np.zeros(tokens, np.int64)
        axes = np.stack([zeros, at // columns, at % columns, zeros], 1).astype(np.int32)
        absolute = np.zeros(axes.shape, np.bool_)
        absolute[:, 3] = True
        positions = max(columns, rows)
    tensors = tuple(view.values for view in views)
    return EncoderInput(
        "image", tensors, views[0].flags, tokens, columns, rows, positions, _causal(row, text), axes, absolute
    )  # fmt: skip


def _plain_piece(views: Sequence[View], row: PictureRow, settings: Settings, text: TextModel) -> EncoderInput:
    """Return a piece with one position per token."""
    tokens = _tokens(views[0], row, settings)
    tensors = tuple(view.values for view in views)
    flags: Flags = views[0].flags
    return EncoderInput("image", tensors, flags, tokens, tokens, 1, tokens, _causal(row, text))


def _tokens(view: View, row: PictureRow, settings: Settings) -> int:
    if (tokens := row.count(view, settings)) < 1:
        height, width = view.values.shape[:2]
        raise MediaError(
            f"a picture of {width} x {height} pixels has no token; the mmproj file is damaged: get another"
        )
    return tokens


def _causal(row: PictureRow, text: TextModel) -> bool:
    return not row.non_causal or text.width in row.causal_widths


def _numbered(columns: int, rows: int, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """hunyuanvl: begin, rows with a newline each, end. t counts; y is the column, x the row, z the picture's number."""
    at = np.arange(rows * (columns + 1))
    count = len(at) + 2
    axes = np.repeat(np.arange(count, dtype=np.int32)[:, None], 4, 1)
    axes[1:-1, 1], axes[1:-1, 2], axes[1:-1, 3] = at % (columns + 1), at // (columns + 1), index
    absolute = np.zeros((count, 4), np.bool_)
    absolute[1:-1, 1:] = True
    return axes, absolute
