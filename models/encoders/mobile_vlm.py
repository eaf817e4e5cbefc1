"""The projectors of MobileVLM: a grid of tokens is halved by depthwise convolutions (LDP) or by averages (LDPv2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localllm.models.encoders import grids
from localllm.models.encoders.convolutions import depthwise, depthwise_rows, depthwise_runs, rowwise, sum_plan, summed
from localllm.models.encoders.grids import Grid
from localllm.models.encoders.heads import mlp
from localllm.models.encoders.network import Network
from localllm.models.encoders.vision import VisionEncoder
from localllm.models.encoders.vision_row import Head, Vision
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Value
from localllm.plan.runs import Encoding, Part


def _row(head: Head) -> Vision:
    # llama.cpp's order of the class row is wrong as for "mlp", and the first patch is dropped
    return Vision(head=head, resize="fixed", cls="first", short=1, before="v.pre_ln", swaps=True)


class LdpEncoder(VisionEncoder):
    """Two blocks of a depthwise convolution, a gate per channel from the mean of all rows, and a product."""

    ROW = _row(mlp("mm.model.mlp.1", "mm.model.mlp.3", "gelu"))

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        super().__init__(self.ROW, keys, tensors)
        network = self._network()
        self.parts["sum"] = Part(sum_plan(network, self.width), 64)
        for block in (1, 2):
            self._record(f"mm.model.mb_block.{block}.block.", block, residual=block == 1)

    def _record(self, name: str, block: int, residual: bool) -> None:
        width, rows = self.width, depthwise_rows(9 * self.width)
        network = self._network()
        x = depthwise(network, network.recorder.receive(9 * width, "windows"), name + "0.0", width)
        x = network.norm(x, name + "0.1")
        network.end(network.recorder.glu(_hard_sigmoid(network, x), x, "identity"))
        self.parts[f"depthwise {block}"] = Part(network.plan(), rows)
        network = self._network()
        x, share = network.recorder.receive_all({"sum": width, "share": 1})
        x = network.recorder.glu(share, x, "identity")  # the mean
        x = network.mlp(x, name + "1.fc1", name + "1.fc2", "relu")
        network.end(_hard_sigmoid(network, x))
        self.parts[f"gate {block}"] = Part(network.plan(), 1)
        network = self._network()
        names = ["rows", "gates", "residual"] if residual else ["rows", "gates"]
        x, gates, *more = network.recorder.receive_all(dict.fromkeys(names, width))
        x = network.recorder.glu(gates, x, "identity")
        x = network.norm(network.linear(x, name + "2.0", width), name + "2.1")
        network.end(network.recorder.add(x, more[0]) if more else x)
        self.parts[f"product {block}"] = Part(network.plan(), rows)

    def _finished(self, y: F32, grid: Grid, flags: Sequence[int]) -> Encoding:
        rows, picture = depthwise_rows(9 * self.width), y.reshape(grid.rows, grid.columns, self.width)
        for block in (1, 2):
            own = yield from depthwise_runs(f"depthwise {block}", picture, 3, block)
            x = own.reshape(-1, self.width)
            total, share = (yield from summed("sum", x)), np.full((1, 1), 1 / len(x), np.float32)
            gate = yield from rowwise(f"gate {block}", total, share)
            more = (picture.reshape(-1, self.width),) if block == 1 else ()
            x = yield from rowwise(f"product {block}", x, np.repeat(gate, len(x), axis=0), *more, most=rows)
            picture = x.reshape(*own.shape[:2], self.width)
        return picture.reshape(-1, self.width)


class LdpV2Encoder(VisionEncoder):
    """Averages of 2 x 2 tokens, plus a depthwise convolution of them."""

    ROW = _row(mlp("mm.model.mlp.0", "mm.model.mlp.2", "gelu"))

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        super().__init__(self.ROW, keys, tensors)
        network, width = self._network(), self.width
        network.end(network.mean(network.recorder.receive(4 * width, "cells"), 4))
        self.parts["mean"] = Part(network.plan(), self.parts["head"].rows)
        network = self._network()
        x, rows = network.recorder.receive_all({"windows": 9 * width, "rows": width})
        network.end(network.recorder.add(depthwise(network, x, "mm.model.peg.0", width), rows))
        self.parts["positions"] = Part(network.plan(), depthwise_rows(9 * width))

    def _finished(self, y: F32, grid: Grid, flags: Sequence[int]) -> Encoding:
        x = yield from rowwise("mean", grids.cells(y, grid.rows, grid.columns, 2))
        picture = x.reshape(grid.rows // 2, grid.columns // 2, -1)
        y = yield from depthwise_runs("positions", picture, 3, 1, None, x)
        return y.reshape(-1, self.width)


def _hard_sigmoid(network: Network, x: Value) -> Value:
    """Return min(max(x + 3, 0), 6) / 6."""
    tensors = network.tensors
    sixth = tensors.numbers(f"sixth({x.width})", [1 / 6] * x.width)
    half = tensors.numbers(f"half({x.width})", [0.5] * x.width)
    return network.recorder.scale_columns(network.recorder.clamp(x, 3.0), sixth, bias=half)
