"""DeepSeek-OCR: a SAM encoder, and behind it CLIP's layers over its result, or Qwen 2's with learned queries (v2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localllm.models.encoders import grids
from localllm.models.encoders.keys import read_sizes
from localllm.models.encoders.layers import Layers, Style, by_position
from localllm.models.encoders.network import Network, table
from localllm.models.encoders.sam import EPS, PATCH, Sam
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32
from localllm.plan.runs import Encoding, Layout, Part, Run

SIDES = {1024: 64, 640: 40}  # pixels and patches per side of the overview and of a tile


class DeepSeekOcrEncoder:
    """The encoder of an overview (1024, 1024, 3), or of a row of tiles, one above the other, (tiles * 640, 640, 3)."""

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        self.sizes, self._tensors = read_sizes(keys, "vision"), tensors
        self._sam = Sam(keys, tensors, tuple(SIDES.values()), self.sizes.shape.width)
        self.parts = dict(self._sam.parts)
        self._record_clip()

    def _record_clip(self) -> None:
        shape, tokens = self.sizes.shape, (SIDES[1024] // 4) ** 2
        network = Network(self._tensors, 1e-5, "gelu_quick", "layer")
        x = network.norm(network.recorder.receive(shape.width, "patches"), "v.pre_ln")
        layers = Layers(network, shape, Style())
        for number in range(shape.layers):
            if number:
                network.end()
            x = layers.layer(x, number)
        network.end(x)
        self.parts["clip"] = Part(network.plan(), tokens + 1)
        network = Network(self._tensors, EPS, "gelu", "layer")
        y = network.linear(network.recorder.receive(2 * shape.width, "both"), "mm.model.fc")
        network.end(y)
        self.parts["head"], self.width = Part(network.plan(), tokens), y.width
        self._class = table(self._tensors, "v.class_embd", 1, shape.width)
        self._positions = table(self._tensors, "v.position_embd.weight", tokens + 1, shape.width)
        self._newline = table(self._tensors, "v.image_newline", 1, self.width)
        self._separator = table(self._tensors, "v.view_seperator", 1, self.width)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def encode(self, pictures: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs. The first flag says that the row of the separator follows the overview."""
        picture = pictures[0]
        side = picture.shape[1]
        if side not in SIDES or picture.shape[0] % side or not 1 <= picture.shape[0] // side <= 9:
            raise ModelError(f"picture: {picture.shape} is neither an overview of 1024 pixels nor tiles of 640")
        found = []
        for start in range(0, picture.shape[0], side):
            y = yield from self._tile(picture[start : start + side])
            tokens = SIDES[side] // 4
            found.append(y.reshape(tokens, tokens, -1))
        lines = np.concatenate(found, axis=1)
        newline = np.broadcast_to(self._newline, (len(lines), 1, self.width))
        rows = np.concatenate([lines, newline], axis=1).reshape(-1, self.width)
        return np.concatenate([rows, self._separator]) if flags and flags[0] else rows

    def _tile(self, picture: F32) -> Encoding:
        x = yield from self._sam.encode(picture)
        side = len(picture) // PATCH // 4
        # Here llama.cpp resizes the table of positions for tiles with channels and positions as the two axes, and takes
        # the position of the class row from a wrong place. The model resizes the grid of positions of each channel.
        own = yield from grids.resized(self._positions[1:], side, side, grids.cubic)
        rows = np.concatenate([self._class + self._positions[:1], x + own])
        (y,) = yield Run("clip", (rows,), (Layout((len(rows),)),))
        (y,) = yield Run("head", (np.concatenate([y[1:], x], axis=1),), (Layout((len(x),)),))
        return y


class DeepSeekOcr2Encoder:
    """The encoder of an overview (1024, 1024, 3) or of a tile (768, 768, 3).

    The rows of SAM see each other. Learned queries behind them see these rows and the earlier queries.
    """

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        sizes = read_sizes(keys, "vision")
        shape = sizes.shape
        self._queries = {
            pixels: table(tensors, f"v.resample_query_{pixels}.weight", (pixels // PATCH // 4) ** 2, shape.width)
            for pixels in (1024, 768)
        }
        self._sam = Sam(keys, tensors, tuple([pixels // PATCH for pixels in self._queries]), shape.width)
        most = max(len(queries) for queries in self._queries.values())
        network = Network(tensors, sizes.eps, "silu", "rms")
        x = network.recorder.receive(shape.width, "rows")
        layers = Layers(network, shape, Style(turn=by_position(1e6)(shape.head_dim), sees="span"))
        for number in range(shape.layers):
            if number:
                network.end()
            x = layers.layer(x, number)
        network.end(network.norm(x, "v.post_ln"))
        self.parts = {**self._sam.parts, "layers": Part(network.plan(), 2 * most)}
        network = Network(tensors, sizes.eps)
        y = network.linear(network.recorder.receive(shape.width, "queries"), "mm.model.fc")
        network.end(y)
        self.parts["head"], self.width = Part(network.plan(), most), y.width
        self._separator = table(tensors, "v.view_seperator", 1, self.width)

    def encode(self, pictures: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs. The first flag says that the row of the separator follows the overview."""
        picture = pictures[0]
        side = picture.shape[1]
        if side not in self._queries or picture.shape != (side, side, 3):
            raise ModelError(f"picture: {picture.shape} is neither an overview of 1024 pixels nor a tile of 768")
        x, queries = (yield from self._sam.encode(picture)), self._queries[side]
        rows = np.concatenate([x, queries])
        (y,) = yield Run("layers", (rows,), (Layout((len(rows),), span=len(x)),))
        (y,) = yield Run("head", (y[len(x) :],), (Layout((len(queries),)),))
        return np.concatenate([y, self._separator]) if flags and flags[0] else y
