"""The row of data about a projector of pictures: what its file does not say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from localllm.models.encoders.grids import Resize
from localllm.models.encoders.layers import Style, Turn
from localllm.models.encoders.network import Network, Norms
from localllm.plan import Activation, Value

Head = Callable[[Network, Value], Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """What the file does not say about the encoder of a projector type."""

    head: Head
    order: Literal["rows", "cells"] = "rows"  # of patches within the layers
    kernels: int = 1  # patch kernels: 2 take two pictures, the frames of a video, or one picture twice
    norms: Norms | None = "layer"  # None: RMS if the norms of the first layer have no bias
    activation: Activation | None = None  # None: as the keys say
    resize: Resize | Literal["fixed"] | None = None  # how a position table becomes one for the grid; None: no table
    optional_table: bool = False
    axes_table: bool = False  # the position table has a row per column and a row per line, which are added
    cls: Literal["", "first", "last"] = ""  # where learned rows stand among the patches
    cls_position: bool = True  # the position table begins with the position of the learned row
    turn: Callable[[int], Turn] | None = None
    turned_from: int = 0  # row and column of the first patch
    style: Style = field(default_factory=Style)
    patch: int = 1  # factor on the patch size of the file
    side: int = 1  # patches per side of a cell, unless a key says otherwise
    channels_first: bool = False  # the values of a cell are ordered by channel
    padded: bool = False  # incomplete cells are filled with zeros
    per_patch: Head | None = None  # after the layers
    before: str = ""  # norms before the layers,
    after: str = ""  # after them,
    cell_norm: str = ""  # and of each patch before it becomes part of a cell; after "?": if the file has it
    cell_eps: float = 0.0
    cell_norms: Norms | None = None
    signed: bool = False  # pixels from 0 to 1 become -1 to 1
    pixels_last: bool = False  # the values of a patch are ordered by row, column, channel
    window: int = 0  # pixels per side of a window; 0: every layer attends to the whole picture
    window_key: bool = False  # a key gives the size of windows
    table_window: bool = False  # a window is as large as the position table
    period: int = 0  # every such layer, and the last, attends to the whole picture, unless keys say otherwise
    break_row: str = ""  # learned row between the rows of tokens, if the file has it
    ends: tuple[str, str] | None = None  # learned rows before and after the tokens
    short: int = 0  # layers at the end that are not used
    deep: bool = False  # outputs of some layers are projected, too, and follow the embedding
    swaps: bool = False  # in old files the names of ffn_up and ffn_down are swapped

    def style_of(self, head_dim: int) -> Style:
        """Return the style of the layers, with the rotation of heads of this width."""
        return self.style if self.turn is None else replace(self.style, turn=self.turn(head_dim))
