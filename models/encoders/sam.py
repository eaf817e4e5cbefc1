"""The SAM encoder of DeepSeek-OCR: layers that attend within windows, and convolutions that shrink their result.

A layer adds to each score a term for the distance in rows and one for the distance in columns, which are linear in the
query. `relative` makes them values of queries and keys.
"""

from __future__ import annotations

import math

import numpy as np

from localllm.models.encoders import grids
from localllm.models.encoders.convolutions import CONVOLVED, convolved
from localllm.models.encoders.network import Network, flat, table
from localllm.models.encoders.relative import coefficients_of_table, rates_of_span, stack_of, turn, waves
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Plan, Weight
from localllm.plan.runs import Encoding, Layout, Part, Run

PATCH = 16
LARGEST = 64  # patches per side of the overview, for which the file has a position table
WHOLE = (2, 5, 8, 11)  # layers that attend to the whole picture
EPS = 1e-6


class Sam:
    """The parts and runs of the encoder, for square pictures with some numbers of patches per side."""

    def __init__(self, keys: Keys, tensors: Tensors, sides: tuple[int, ...], width: int) -> None:
        self._tensors = tensors
        self._width = keys.integer("vision.sam.embedding_length", 1, 1 << 13)
        self._heads = keys.integer("vision.sam.head_count", 1, 128)
        self._window = keys.integer("vision.window_size", 1, 64)
        self._layers = keys.integer("vision.sam.block_count", 1, 64)
        if self._width % (2 * self._heads):
            raise ModelError(f"clip.vision.sam.head_count: {self._heads} heads do not divide {self._width} values")
        self.parts: dict[str, Part] = {}
        for layer in range(self._layers):
            for side in sides:
                span = self._span(layer, side)
                name = f"sam {layer} {span}"
                if name not in self.parts:
                    cells = -(-max(sides) // span) * span if span == self._window else side
                    self.parts[name] = Part(self._layer(layer, span), cells**2, span**2)
        self._record_neck(width)
        self._positions = table(tensors, "v.sam.pos_embd.weight", LARGEST**2, self._width)

    def _span(self, layer: int, side: int) -> int:
        """Return the side of the squares of patches within which a layer attends."""
        return side if layer in WHOLE else min(self._window, side)

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _network(self) -> Network:
        return Network(self._tensors, EPS, "gelu", "layer")

    def _layer(self, layer: int, span: int) -> Plan:
        """Record a layer. Rows beyond the picture, which complete the last windows, have values of zero."""
        network, name, width, heads = self._network(), f"v.sam.blk.{layer}.", self._width, self._heads
        recorder = network.recorder
        inputs = {"patches": width, "inside": 1, "waves": 4 * span * heads}
        if not layer:
            inputs = {"pixels": 3 * PATCH**2, "positions": width, "inside": 1, "waves": 4 * span * heads}
        x, *more = recorder.receive_all(inputs)
        if not layer:
            weight = flat(self._tensors, "v.sam.patch_embd.weight", (width, x.width))
            bias = flat(self._tensors, "v.sam.patch_embd.bias", (width,))
            x = recorder.add(recorder.linear(x, weight, bias), more.pop(0))
        inside, of_keys = more
        y = recorder.glu(inside, network.norm(x, name + "pre_ln"), "identity")
        q, k, v = (
            recorder.linear(
                y,
                self._tensors.rows(f"{name}attn.qkv.weight", n * width, (n + 1) * width, 3 * width, width),
                self._tensors.optional_part(f"{name}attn.qkv.bias", n * width, (n + 1) * width, 3 * width),
            )
            for n in range(3)
        )
        terms = recorder.rotate(
            recorder.head_linear(q, self._coefficients(name, span)), 4 * span, turn(rates_of_span(span), 2)
        )
        q, k = recorder.concat(q, terms, heads), recorder.concat(k, of_keys, heads)
        stored = recorder.append(k, v, heads)
        y = recorder.attention(q, stored, heads, (width // heads) ** -0.5, causal=False)
        x = recorder.add(x, network.linear(y, name + "attn.out", width))
        y = network.mlp(network.norm(x, name + "post_ln"), name + "mlp.lin1", name + "mlp.lin2")
        network.end(recorder.add(x, y))
        return network.plan()

    def _coefficients(self, name: str, span: int) -> Weight:
        """Return the matrices (heads, 4 * span, head width) that give the waves' coefficients of a query."""
        width, count, found = self._width // self._heads, 2 * span - 1, []
        for axis in "hw":
            own = f"{name}attn.pos_{axis}.weight"
            listed = table(self._tensors, own, max(1, self._tensors.values(own) // width), width).astype(np.float64)
            if len(listed) != count:
                listed = grids.linear(len(listed), count) @ listed
            found.append(coefficients_of_table(listed))
        # the scores are divided by the root of the width; these terms are not
        return stack_of(f"{name}waves {span}", [np.concatenate(found) * math.sqrt(width)] * self._heads)

    def _record_neck(self, width: int) -> None:
        """Record the convolutions behind the layers: 1 x 1 and 3 x 3 with norms, then two that halve the grid."""
        columns = self._width
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
        if columns != width:
            raise ModelError(f"v.sam.net_3.weight: expected {width} channels, found {columns}")

    # -- runs ----------------------------------------------------------------------------------------------------------

    def encode(self, picture: F32) -> Encoding:
        """Yield the runs of a square picture, and return one row per 4 x 4 patches."""
        x, side = None, len(picture) // PATCH
        pixels = grids.patch_rows(picture, PATCH)
        positions = yield from grids.resized(self._positions, side, side, grids.cubic)
        spans = {self._span(layer, side) for layer in range(self._layers)}
        places = {span: _places(side, span, self._heads) for span in spans}
        for layer in range(self._layers):
            span = self._span(layer, side)
            order, layout, own = places[span]
            inside = (order >= 0).astype(np.float32)[:, None]
            first = (x,) if x is not None else (pixels, positions)
            taken = tuple([each[order] * inside for each in first])
            (y,) = yield Run(f"sam {layer} {span}", (*taken, inside, own), (layout,))
            x = np.empty((side * side, self._width), np.float32)
            x[order[order >= 0]] = y[order >= 0]
        assert x is not None
        for name, stride in (("neck.0", 0), ("neck.2", 1), ("net_2", 2), ("net_3", 2)):
            if stride:
                picture = yield from convolved(name, x.reshape(side, side, -1), stride)
                side, x = len(picture), picture.reshape(-1, picture.shape[2])
            else:
                (x,) = yield Run(name, (x,), (Layout((len(x),)),))
        return x


def _places(side: int, span: int, heads: int) -> tuple[grids.Ints, Layout, F32]:
    """Return the patch of each row (-1 beyond the picture), window by window, their layout, and the waves of keys."""
    count = -(-side // span)
    grid = grids.by_cells(count * span, count * span, span)
    order = np.where((grid.y < side) & (grid.x < side), grid.y * side + grid.x, -1)
    axes = np.stack([grid.y % span, grid.x % span], axis=1).astype(np.int32)
    own = waves(axes, rates_of_span(span))
    return order, Layout((span * span,) * count**2, axes), np.tile(own, (1, heads))
