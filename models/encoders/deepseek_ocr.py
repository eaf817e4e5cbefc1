"""DeepSeek-OCR: a SAM encoder with windows, convolutions that shrink its result, and a CLIP encoder over both.

SAM adds to each score a term for the distance in rows and one for the distance in columns, both linear in the query. As
a function of the distance, a term is a sum of waves. Turned by the query's row, their coefficients become more values
of the query, and the waves at the key's row more values of the key, so that the ordinary product has the terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from localllm.models import derived
from localllm.models.encoders import grids
from localllm.models.encoders.convolutions import CONVOLVED, convolved
from localllm.models.encoders.keys import read_sizes
from localllm.models.encoders.layers import Layers, Style
from localllm.models.encoders.network import Network, flat, table
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Plan, Rope, Weight
from localllm.plan.runs import Encoding, Layout, Part, Run

PATCH = 16
SIDES = {1024: 64, 640: 40}  # pixels and patches per side of the overview and of a tile
WHOLE = (2, 5, 8, 11)  # layers of SAM that attend to the whole picture
EPS = 1e-6


class DeepSeekOcrEncoder:
    """The encoder of an overview (1024, 1024, 3), or of a row of tiles, one above the other, (tiles * 640, 640, 3)."""

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        self.sizes, self._tensors = read_sizes(keys, "vision"), tensors
        self._sam = keys.integer("vision.sam.embedding_length", 1, 1 << 13)
        self._heads = keys.integer("vision.sam.head_count", 1, 128)
        self._window = keys.integer("vision.window_size", 1, 64)
        self._layers = keys.integer("vision.sam.block_count", 1, 64)
        if self._sam % (2 * self._heads):
            raise ModelError(f"clip.vision.sam.head_count: {self._heads} heads do not divide {self._sam} values")
        self.parts: dict[str, Part] = {}
        for layer in range(self._layers):
            for side in SIDES.values():
                span = self._span(layer, side)
                name = f"sam {layer} {span}"
                if name not in self.parts:
                    cells = -(-max(SIDES.values()) // span) * span if span == self._window else side
                    self.parts[name] = Part(self._sam_layer(layer, span), cells**2, span**2)
        self._record_neck()
        self._record_clip()

    def _span(self, layer: int, side: int) -> int:
        """Return the side of the squares of patches within which a layer of SAM attends."""
        return side if layer in WHOLE else min(self._window, side)

    # -- SAM -----------------------------------------------------------------------------------------------------------

    def _network(self) -> Network:
        return Network(self._tensors, EPS, "gelu", "layer")

    def _sam_layer(self, layer: int, span: int) -> Plan:
        """Record a layer of SAM. Rows beyond the picture, which complete the last windows, have values of zero."""
        network, name, width, heads = self._network(), f"v.sam.blk.{layer}.", self._sam, self._heads
        recorder = network.recorder
        inputs = {"patches": width, "inside": 1, "waves": 4 * span * heads}
        if not layer:
            inputs = {"pixels": 3 * PATCH**2, "positions": width, "inside": 1, "waves": 4 * span * heads}
        x, *more = recorder.receive_all(inputs)
        if not layer:
            weight = flat(self._tensors, "v.sam.patch_embd.weight", (width, x.width))
            bias = flat(self._tensors, "v.sam.patch_embd.bias", (width,))
            x = recorder.add(recorder.linear(x, weight, bias), more.pop(0))
        inside, waves = more
        y = recorder.glu(inside, network.norm(x, name + "pre_ln"), "identity")
        q, k, v = (
            recorder.linear(
                y,
                self._tensors.rows(f"{name}attn.qkv.weight", n * width, (n + 1) * width, 3 * width, width),
                self._tensors.optional_part(f"{name}attn.qkv.bias", n * width, (n + 1) * width, 3 * width),
            )
            for n in range(3)
        )
        terms = recorder.rotate(recorder.head_linear(q, self._coefficients(name, span)), 4 * span, _turn(span))
        q, k = recorder.concat(q, terms, heads), recorder.concat(k, waves, heads)
        stored = recorder.append(k, v, heads)
        y = recorder.attention(q, stored, heads, (width // heads) ** -0.5, causal=False)
        x = recorder.add(x, network.linear(y, name + "attn.out", width))
        y = network.mlp(network.norm(x, name + "post_ln"), name + "mlp.lin1", name + "mlp.lin2")
        network.end(recorder.add(x, y))
        return network.plan()

    def _coefficients(self, name: str, span: int) -> Weight:
        """Return the matrices (heads, 4 * span, head width) that give the waves' coefficients of a query."""
        width, count = self._sam // self._heads, 2 * span - 1
        found = []
        for axis in "hw":
            own = f"{name}attn.pos_{axis}.weight"
            listed = table(self._tensors, own, max(1, self._tensors.values(own) // width), width).astype(np.float64)
            if len(listed) != count:
                listed = grids.linear(len(listed), count) @ listed
            distance = np.arange(count) - (span - 1)
            angle = 2 * math.pi / count * np.arange(span)[:, None] * distance
            share = np.where(np.arange(span)[:, None] == 0, 1.0, 2.0) / count
            found.append(np.stack([share * np.cos(angle) @ listed, -(share * np.sin(angle)) @ listed], axis=1))
        # the scores are divided by the root of the width; these terms are not
        rows = np.concatenate(found).reshape(4 * span, width) * math.sqrt(width)
        stack = np.tile(rows[None], (self._heads, 1, 1)).astype(np.float32)
        made = derived.table(f"{name}waves {span}", stack.reshape(-1, width))
        return Weight.of(derived.Derived(made.name, stack.shape, made.rows))

    def _record_neck(self) -> None:
        """Record the convolutions behind SAM: 1 x 1 and 3 x 3 with norms, then two that halve the grid."""
        columns = self._sam
        for name, norm, factor in (
            ("neck.0", "neck.1", 1),
            ("neck.2", "neck.3", 9),
            ("net_2", "", 9),
            ("net_3", "", 9),
        ):
            network, own = self._network(), f"v.sam.{name}"
            columns *= factor
            channels = max(1, self._tensors.values(f"{own}.weight") // columns)
            x = network.kernel(network.recorder.receive(columns, "squares"), own, channels, bias=False)
            network.end(network.norm(x, f"v.sam.{norm}") if norm else x)
            self.parts[name] = Part(network.plan(), CONVOLVED)
            columns = channels
        if columns != self.sizes.shape.width:
            raise ModelError(f"v.sam.net_3.weight: expected {self.sizes.shape.width} channels, found {columns}")

    # -- CLIP ----------------------------------------------------------------------------------------------------------

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
        network = self._network()
        y = network.linear(network.recorder.receive(2 * shape.width, "both"), "mm.model.fc")
        network.end(y)
        self.parts["head"], self.width = Part(network.plan(), tokens), y.width
        self._class = table(self._tensors, "v.class_embd", 1, shape.width)
        self._positions = table(self._tensors, "v.position_embd.weight", tokens + 1, shape.width)
        self._of_sam = table(self._tensors, "v.sam.pos_embd.weight", SIDES[1024] ** 2, self._sam)
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
            y = yield from self._tile(picture[start : start + side], SIDES[side])
            tokens = SIDES[side] // 4
            found.append(y.reshape(tokens, tokens, -1))
        lines = np.concatenate(found, axis=1)
        newline = np.broadcast_to(self._newline, (len(lines), 1, self.width))
        rows = np.concatenate([lines, newline], axis=1).reshape(-1, self.width)
        return np.concatenate([rows, self._separator]) if flags and flags[0] else rows

    def _tile(self, picture: F32, side: int) -> Encoding:
        x = None
        pixels = grids.patch_rows(picture, PATCH)
        for layer in range(self._layers):
            span = self._span(layer, side)
            order, layout, waves = _places(side, span, self._heads)
            inside = (order >= 0).astype(np.float32)[:, None]
            first = (pixels, grids.resized(self._of_sam, side, side, grids.cubic)) if x is None else (x,)
            taken = tuple([each[order] * inside for each in first])
            (y,) = yield Run(f"sam {layer} {span}", (*taken, inside, waves), (layout,))
            x = np.empty((side * side, self._sam), np.float32)
            x[order[order >= 0]] = y[order >= 0]
        assert x is not None
        for name, stride in (("neck.0", 0), ("neck.2", 1), ("net_2", 2), ("net_3", 2)):
            if stride:
                picture = yield from convolved(name, x.reshape(side, side, -1), stride)
                side, x = len(picture), picture.reshape(-1, picture.shape[2])
            else:
                (x,) = yield Run(name, (x,), (Layout((len(x),)),))
        # Here llama.cpp resizes the table of positions for tiles with channels and positions as the two axes, and takes
        # the position of the class row from a wrong place. The model resizes the grid of positions of each channel.
        own = grids.resized(self._positions[1:], side, side, grids.cubic)
        rows = np.concatenate([self._class + self._positions[:1], x + own])
        (y,) = yield Run("clip", (rows,), (Layout((len(rows),)),))
        (y,) = yield Run("head", (np.concatenate([y[1:], x], axis=1),), (Layout((len(x),)),))
        return y


def _places(side: int, span: int, heads: int) -> tuple[grids.Ints, Layout, F32]:
    """Return the patch of each row (-1 beyond the picture), window by window, their layout, and the waves of keys."""
    count = -(-side // span)
    grid = grids.by_cells(count * span, count * span, span)
    order = np.where((grid.y < side) & (grid.x < side), grid.y * side + grid.x, -1)
    axes = np.stack([grid.y % span, grid.x % span], axis=1).astype(np.int32)
    rate = 2 * math.pi / (2 * span - 1) * np.arange(span)
    angle = axes[:, :, None] * rate  # (rows, 2, span)
    waves = np.stack([np.cos(angle), np.sin(angle)], axis=3).reshape(len(axes), -1).astype(np.float32)
    return order, Layout((span * span,) * count**2, axes), np.tile(waves, (1, heads))


def _turn(span: int) -> Rope:
    rate = tuple(2 * math.pi / (2 * span - 1) * n for n in range(span))
    return Rope("interleaved", 4 * span, rate * 2, axes=(0,) * span + (1,) * span)
