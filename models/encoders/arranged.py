"""Vision encoders whose tokens are arranged, or computed further, behind the projector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localllm.models.encoders import banded, grids, heads
from localllm.models.encoders.convolutions import CONVOLVED, convolved
from localllm.models.encoders.grids import Grid
from localllm.models.encoders.layers import halves, sides
from localllm.models.encoders.network import Network, flat, table
from localllm.models.encoders.vision import VisionEncoder
from localllm.models.encoders.vision_row import Vision
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Value
from localllm.plan.runs import Encoding, Layout, Part, Run


class StepEncoder(VisionEncoder):
    """Step3-VL: two convolutions that halve the grid, and a product."""

    ROW = Vision(
        head=heads.linear("mm.model.fc"), resize=grids.antialiased, before="v.pre_ln", turn=sides(),
    )  # fmt: skip

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        self._convolutions: dict[str, Part] = {}
        # the key counts the steps of the convolutions
        super().__init__(self.ROW, keys.having(vision__projector__scale_factor=1), tensors)
        self.parts |= self._convolutions

    def _cell_columns(self) -> int:
        columns = self._columns
        for name in ("mm.0", "mm.1"):
            network = self._network()
            channels = max(1, network.tensors.values(f"{name}.weight") // (9 * columns))
            network.end(network.kernel(network.recorder.receive(9 * columns, "squares"), name, channels))
            self._convolutions[name], columns = Part(network.plan(), CONVOLVED), channels
        return columns

    def _prepared(self, x: F32, grid: Grid) -> Encoding:
        picture = x.reshape(grid.rows, grid.columns, -1)
        for name in ("mm.0", "mm.1"):
            picture = yield from convolved(name, picture)
        return picture.reshape(-1, picture.shape[2])


class HunyuanEncoder(VisionEncoder):
    """HunyuanVL: a learned row after each row of tokens, then a product; learned rows at both ends, then a norm."""

    ROW = Vision(
        head=lambda network, x: _convolutions(network, x), resize=grids.enlarged, side=2, channels_first=True,
        cell_norm="mm.pre_norm", cell_norms="rms",
    )  # fmt: skip

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        super().__init__(self.ROW, keys, tensors)
        inner, count = self.width, self.parts["head"].rows
        network = self._network()
        y = network.linear(network.recorder.receive(inner, "tokens"), "mm.model.fc")
        network.end(y)
        self.parts["product"], self.width = Part(network.plan(), 2 * count), y.width
        network = self._network()
        network.end(network.norm(network.recorder.receive(self.width, "tokens"), "mm.post_norm", "rms"))
        self.parts["norm"] = Part(network.plan(), 2 * count + 2)
        self._newline = table(tensors, "v.image_newline", 1, inner)
        self._ends = [table(tensors, f"mm.image_{end}", 1, self.width) for end in ("begin", "end")]

    def _finished(self, y: F32, grid: Grid, flags: Sequence[int]) -> Encoding:
        lines = grid.rows // self.sizes.side
        rows = yield from banded.chosen(y, banded.with_ends(len(y), lines, len(y)).reshape(-1), self._newline)
        (rows,) = yield Run("product", (rows,), (Layout((len(rows),)),))
        count = len(rows)
        rows = yield from banded.chosen(rows, np.array([count, *range(count), count + 1]), *self._ends)
        (rows,) = yield Run("norm", (rows,), (Layout((len(rows),)),))
        return rows


def _convolutions(network: Network, x: Value) -> Value:
    for name in ("mm.0", "mm.2"):
        bias = max(1, network.tensors.values(f"{name}.bias"))
        matrix = flat(network.tensors, f"{name}.weight", (bias, x.width))
        x = network.recorder.linear(x, matrix, flat(network.tensors, f"{name}.bias", (bias,)))
        x = network.activate(x, "gelu") if name == "mm.0" else x
    return x


class DeepSeek4Encoder(VisionEncoder):
    """DeepSeek V4: tokens in pairs of rows, column by column, with learned rows for ends, new lines and padding."""

    ROW = Vision(
        head=heads.mlp("mm.1", "mm.2", "gelu_erf"), norms="rms", before="v.pre_ln", after="v.post_ln", turn=halves(),
        side=3, padded=True, channels_first=True,
    )  # fmt: skip

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        super().__init__(self.ROW, keys, tensors)
        names = "v.image_newline", "v.token_embd.img_pad", "v.token_embd.img_start", "v.token_embd.img_end"
        self._marks = [table(tensors, name, 1, self.width) for name in names]

    def _finished(self, y: F32, grid: Grid, flags: Sequence[int]) -> Encoding:
        """Arrange the tokens. The third flag is the number of padding rows before the picture."""
        newline, pad, start, end = range(len(y), len(y) + 4)
        lines = -(-grid.rows // self.sizes.side)
        x = banded.with_ends(len(y), lines, newline)
        x = np.pad(x, ((0, lines % 2), (0, 0)), constant_values=pad)
        body = x.reshape(len(x) // 2, 2, -1).transpose(0, 2, 1).reshape(-1)
        tail, lead = len(body) // 2 % 2 * 2, flags[2] if len(flags) > 2 else 0
        if not 0 <= lead <= 3:
            raise ModelError(f"picture: {lead} rows of padding before it; expected 0 to 3")
        index = np.concatenate([np.full(lead, pad), [start], body, np.full(tail, pad), [end]])
        return (yield from banded.chosen(y, index, *self._marks))
