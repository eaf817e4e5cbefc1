"""Yasa 2: ConvNeXt V2. Depthwise convolutions, products, and a norm of each channel's energy over the whole picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localllm.models.encoders import grids
from localllm.models.encoders.convolutions import (
    CONVOLVED,
    depthwise,
    depthwise_rows,
    depthwise_runs,
    rowwise,
    sum_plan,
    summed,
)
from localllm.models.encoders.keys import read_sizes
from localllm.models.encoders.network import Network, table
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Value
from localllm.plan.runs import Encoding, Part

SIDE = 7  # of a depthwise kernel
TOKENS = 8  # per side
LEAST = 1e-6  # of the mean energy of the channels


class YasaEncoder:
    """The encoder of a square picture."""

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        self.sizes, self._tensors = read_sizes(keys, "vision"), tensors
        self.parts: dict[str, Part] = {}
        name, columns = "v.patch_embd", 3 * self.sizes.patch**2
        network, width = self._network(), self._channels(name, columns)
        x = network.kernel(network.recorder.receive(columns, "patches"), name, width)
        network.end(network.norm(x, "v.patch_ln"))
        self.parts["patches"] = Part(network.plan(), CONVOLVED)
        self._stages: list[tuple[int, int, bool]] = []  # (channels, blocks, whether the picture is halved before)
        while self._has_block(len(self._stages), 0):
            width = self._stage(len(self._stages), width)
        network = self._network()
        if not self._stages:
            raise ModelError("v.stage.0.blk.0.dw.weight: this tensor is missing")
        self._side = self.sizes.image // self.sizes.patch // 2 ** sum(halved for _, _, halved in self._stages)
        if self._side < TOKENS or self._side % TOKENS:
            problem = f"{self._side} rows of positions are not a multiple of {TOKENS}"
            raise ModelError(f"clip.vision.image_size: with {self.sizes.image} pixels, {problem}")
        self._positions = table(tensors, "v.vision_pos_embed", self._side**2, width)
        cells = (self._side // TOKENS) ** 2
        x, positions = network.recorder.receive_all({"cells": cells * width, "positions": cells * width})
        x = network.mean(network.recorder.add(x, positions), cells)
        y = network.mlp(x, "mm.0", "mm.2", "gelu_erf")
        network.end(y)
        self.width, self.parts["head"] = y.width, Part(network.plan(), TOKENS**2)

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _network(self) -> Network:
        return Network(self._tensors, self.sizes.eps, "gelu_erf", "layer")

    def _channels(self, name: str, columns: int) -> int:
        return max(1, self._tensors.values(f"{name}.weight") // columns)

    def _has_block(self, stage: int, block: int) -> bool:
        return any(f"v.stage.{stage}.blk.{block}.{of}.weight" in self._tensors for of in ("dw", "pw1"))

    def _stage(self, stage: int, width: int) -> int:
        """Record a stage, and return its number of channels."""
        name = f"v.stage.{stage}."
        halved = f"{name}down.conv.weight" in self._tensors
        if halved:
            network = self._network()
            network.end(network.norm(network.recorder.receive(width, "rows"), name + "down.ln"))
            self.parts[f"norm {stage}"] = Part(network.plan(), CONVOLVED)
            network, columns = self._network(), 4 * width
            width = self._channels(name + "down.conv", columns)
            network.end(network.kernel(network.recorder.receive(columns, "cells"), name + "down.conv", width))
            self.parts[f"halve {stage}"] = Part(network.plan(), CONVOLVED)
        blocks = 0
        while self._has_block(stage, blocks):
            inner = self._block(f"{stage} {blocks}", f"{name}blk.{blocks}.", width)
            blocks += 1
            self.parts[f"squares {inner}"] = Part(sum_plan(self._network(), inner, squares=True), CONVOLVED)
            self.parts[f"sum {inner}"] = Part(sum_plan(self._network(), inner), CONVOLVED)
        self._stages.append((width, blocks, halved))
        return width

    def _block(self, number: str, name: str, width: int) -> int:
        """Record a block, and return the width between its products."""
        network = self._network()
        x = depthwise(network, network.recorder.receive(SIDE**2 * width, "windows"), name + "dw", width)
        y = network.activate(network.linear(network.norm(x, name + "ln"), name + "pw1"))
        network.end(y)
        self.parts[f"first {number}"] = Part(network.plan(), depthwise_rows(SIDE**2 * width))
        network = self._network()
        squares, one = network.recorder.receive_all({"squares": y.width, "one": 1})
        network.end(_shares(network, squares, one))
        self.parts[f"norm {number}"] = Part(network.plan(), 1)
        network = self._network()
        x, shares, rows = network.recorder.receive_all({"inner": y.width, "shares": y.width, "rows": width})
        # x + weight * x * share + bias
        weight, bias = (network.tensors.vector(f"{name}grn.{of}", y.width) for of in ("weight", "bias"))
        added = network.recorder.scale_columns(network.recorder.glu(shares, x, "identity"), weight, bias=bias)
        x = network.linear(network.recorder.add(x, added), name + "pw2", width)
        network.end(network.recorder.add(rows, x))
        self.parts[f"second {number}"] = Part(network.plan(), CONVOLVED)
        return y.width

    # -- runs ----------------------------------------------------------------------------------------------------------

    def encode(self, pictures: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs of a square picture (height, width, 3)."""
        picture, size = pictures[0], self.sizes.image
        if picture.shape != (size, size, 3):
            raise ModelError(f"picture: {picture.shape} is not {size} x {size} pixels")
        side = size // self.sizes.patch
        x = yield from rowwise("patches", grids.patch_rows(picture, self.sizes.patch))
        for stage, (width, blocks, halved) in enumerate(self._stages):
            if halved:
                x = yield from rowwise(f"norm {stage}", x)
                x = yield from rowwise(f"halve {stage}", grids.cells(x, side, side, 2, channels_first=True))
                side //= 2
            for block in range(blocks):
                number = f"{stage} {block}"
                y = yield from depthwise_runs(f"first {number}", x.reshape(side, side, width), SIDE)
                inner = y.reshape(side * side, -1)
                columns = inner.shape[1]
                squares = yield from summed(f"sum {columns}", inner, f"squares {columns}")
                shares = yield from rowwise(f"norm {number}", squares, np.ones((1, 1), np.float32))
                x = yield from rowwise(f"second {number}", inner, np.broadcast_to(shares, inner.shape), x)
        cells = side // TOKENS
        found = yield from rowwise("head", *(grids.cells(each, side, side, cells) for each in (x, self._positions)))
        return found


def _shares(network: Network, squares: Value, one: Value) -> Value:
    """Return the root of each channel's energy, divided by the mean of the roots.

    The reciprocal of the mean comes from the RMS norm of the pair (1, scale * mean). For a large scale, it is
    (root(2) / (scale * mean), root(2)).
    """
    recorder, tensors, scale = network.recorder, network.tensors, 1e9
    roots = recorder.activate(squares, "signed_root")
    mean = recorder.scale(recorder.clamp(network.mean(roots, roots.width), 3e38, LEAST), scale)
    weight = tensors.numbers("reciprocal", [scale / 2**0.5, 0.0])
    inverse = recorder.slice(recorder.rms_norm(recorder.concat(one, mean), weight, 0.0), 0, 1)
    return recorder.glu(inverse, roots, "identity")
