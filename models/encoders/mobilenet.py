"""Gemma 3n's vision encoder: MobileNet V5, four stages of convolutions and of attention to halved pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localllm.models.encoders import grids
from localllm.models.encoders.convolutions import (
    CONVOLVED,
    convolved,
    depthwise,
    depthwise_rows,
    depthwise_runs,
    rowwise,
    same,
)
from localllm.models.encoders.keys import read_sizes
from localllm.models.encoders.network import Network, flat
from localllm.models.encoders.qformer import cross_runs
from localllm.models.errors import ModelError
from localllm.models.reading import Keys
from localllm.models.tensors import Tensors
from localllm.plan import F32, Value
from localllm.plan.runs import Encoding, Part

STAGES = 4
TOKENS = 16  # per side
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Block:
    """A recorded block."""

    name: str
    kind: str  # "edge", "inverted" or "attention"
    stride: int
    residual: bool
    start: int = 0  # side of a depthwise kernel; 0: missing
    middle: int = 0
    halved: bool = False  # keys and values are of a halved picture


class MobileNetEncoder:
    """The encoder of a square picture."""

    def __init__(self, keys: Keys, tensors: Tensors) -> None:
        self._tensors = tensors
        self._size = read_sizes(keys, "vision").image
        width = keys.integer("vision.embedding_length", 1, 1 << 14)
        self.parts: dict[str, Part] = {}
        network, name = self._network(), "v.conv_stem."
        channels = max(1, tensors.values(f"{name}conv.weight") // 27)
        x = network.kernel(network.recorder.receive(27, "squares"), name + "conv", channels)
        network.end(network.activate(network.norm(x, name + "bn")))
        self.parts["stem"] = Part(network.plan(), CONVOLVED)
        self._stages: list[list[Block]] = []
        self._side = -(-self._size // 2)
        sides, counts = [], []
        for stage in range(STAGES):
            channels = self._record_stage(stage, channels)
            sides.append(self._side)
            counts.append(channels)
        if sides[2] % TOKENS or sides[2] % sides[3]:
            problem = f"stages of {sides[2]} and {sides[3]} rows do not give {TOKENS} rows of tokens"
            raise ModelError(f"clip.vision.image_size: with {self._size} pixels, {problem}")
        network, name = self._network(), "v.msfa.ffn."
        x = network.recorder.receive(counts[2] + counts[3], "rows")
        x = network.activate(self._product(network, x, name + "pw_exp.conv", name + "pw_exp.bn"))
        network.end(self._product(network, x, name + "pw_proj.conv", name + "pw_proj.bn", width))
        self.parts["fusion"] = Part(network.plan(), CONVOLVED)
        self._record_head(width, (sides[2] // TOKENS) ** 2)

    def _network(self) -> Network:
        return Network(self._tensors, EPS, "gelu", "rms")

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _record_head(self, width: int, cells: int) -> None:
        network = self._network()
        x = network.recorder.receive(cells * width, "cells")
        x = network.norm(network.mean(x, cells) if cells > 1 else x, "v.msfa.norm")
        x = network.norm(network.recorder.scale(x, width**0.5), "mm.soft_emb_norm")
        y = network.unit(network.linear(x, "mm.input_projection"))
        network.end(y)
        self.width, self.parts["head"] = y.width, Part(network.plan(), TOKENS**2)

    def _product(self, network: Network, x: Value, name: str, norm: str, rows: int = 0) -> Value:
        """Return a norm of the product with a kernel of one pixel."""
        rows = rows or max(1, self._tensors.values(f"{name}.weight") // x.width)
        return network.norm(network.kernel(x, name, rows, bias=False), norm)

    def _record_stage(self, stage: int, channels: int) -> int:
        """Record the blocks of a stage, and return its number of channels."""
        blocks: list[Block] = []
        while True:
            name = f"v.blk.{stage}.{len(blocks)}."
            stride = 1 if blocks else 2
            if self._has(name, "conv_exp", "conv_pwl"):
                block, channels = self._edge(name, channels, stride)
            elif self._has(name, "attn.query.proj", "attn.output.proj"):
                block = self._attention(name, channels)
            elif self._has(name, "pw_exp.conv", "pw_proj.conv"):
                block, channels = self._inverted(name, channels, stride)
            else:
                break
            blocks.append(block)
        if not blocks:
            raise ModelError(f"v.blk.{stage}.0: the tensors of this block are missing")
        self._stages.append(blocks)
        return channels

    def _has(self, name: str, *parts: str) -> bool:
        """Return whether the file has a part of this kind of block; then all parts are required."""
        return any(f"{name}{part}.weight" in self._tensors for part in parts)

    def _edge(self, name: str, channels: int, stride: int) -> tuple[Block, int]:
        """Record a block of a convolution and a product."""
        tensors, inner = self._tensors, max(1, self._tensors.values(f"{name}conv_exp.weight") // (9 * channels))
        made = max(1, tensors.values(f"{name}conv_pwl.weight") // inner)
        residual = stride == 1 and made == channels
        network = self._network()
        inputs = {"squares": 9 * channels} | ({"rows": channels} if residual else {})
        x, *rows = network.recorder.receive_all(inputs)
        x = network.activate(network.norm(network.kernel(x, name + "conv_exp", inner, bias=False), name + "bn1"))
        x = self._product(network, x, name + "conv_pwl", name + "bn2", made)
        network.end(network.recorder.add(x, rows[0]) if rows else x)
        self.parts[name] = Part(network.plan(), CONVOLVED)
        self._side = -(-self._side // stride)
        return Block(name, "edge", stride, residual), made

    def _inverted(self, name: str, channels: int, stride: int) -> tuple[Block, int]:
        """Record a block of products, with depthwise convolutions before or between them."""
        start, inner = self._kernel(f"{name}dw_start.conv", channels), 0
        inner = max(1, self._tensors.values(f"{name}pw_exp.conv.weight") // channels)
        middle = self._kernel(f"{name}dw_mid.conv", inner)
        stride = stride if middle else 1
        made = max(1, self._tensors.values(f"{name}pw_proj.conv.weight") // inner)
        residual = stride == 1 and made == channels
        network = self._network()
        first = {"first": max(1, start**2) * channels}
        x, *rows = network.recorder.receive_all(first | ({"rows": channels} if residual and not middle else {}))
        if start:
            x = network.norm(depthwise(network, x, f"{name}dw_start.conv", channels), f"{name}dw_start.bn")
        x = network.activate(self._product(network, x, f"{name}pw_exp.conv", f"{name}pw_exp.bn", inner))
        if middle:
            network.end(x)
            self.parts[f"{name}start"] = Part(network.plan(), self._rows(start, channels))
            network = self._network()
            own = {"middle": middle**2 * inner} | ({"rows": channels} if residual else {})
            x, *rows = network.recorder.receive_all(own)
            x = network.norm(depthwise(network, x, f"{name}dw_mid.conv", inner), f"{name}dw_mid.bn")
            x = network.activate(x)
        x = self._product(network, x, f"{name}pw_proj.conv", f"{name}pw_proj.bn", made)
        x = self._scaled(network, x, name)
        network.end(network.recorder.add(x, rows[0]) if rows else x)
        self.parts[name] = Part(network.plan(), self._rows(middle, inner) if middle else self._rows(start, channels))
        self._side = -(-self._side // stride)
        return Block(name, "inverted", stride, residual, start, middle), made

    @staticmethod
    def _rows(side: int, channels: int) -> int:
        return depthwise_rows(side * side * channels) if side else CONVOLVED

    def _kernel(self, name: str, channels: int) -> int:
        """Return the side of a depthwise kernel; 0 if it is missing."""
        width = self._tensors.width(f"{name}.weight")
        if width and (width not in (1, 3, 5, 7) or self._tensors.values(f"{name}.weight") != width * width * channels):
            raise ModelError(f"{name}.weight: expected a kernel of 3 or 5 values per side for {channels} channels")
        return width

    def _scaled(self, network: Network, x: Value, name: str) -> Value:
        own = f"{name}layer_scale.gamma"
        return network.recorder.mul(x, flat(self._tensors, own, (x.width,))) if own in self._tensors else x

    def _attention(self, name: str, channels: int) -> Block:
        """Record a block of attention, whose heads share keys and values."""
        tensors, own = self._tensors, f"{name}attn."
        halved = self._has(own, "key.down_conv", "value.down_conv")
        network = self._network()
        network.end(network.norm(network.recorder.receive(channels, "rows"), f"{name}norm"))
        self.parts[f"{name}norm"] = Part(network.plan(), CONVOLVED)
        for of in ("key", "value") if halved else ():
            network = self._network()
            x = network.recorder.receive(9 * channels, "windows")
            network.end(network.norm(depthwise(network, x, f"{own}{of}.down_conv", channels), f"{own}{of}.norm"))
            self.parts[f"{own}{of}"] = Part(network.plan(), depthwise_rows(9 * channels))
        sizes = {of: max(1, tensors.values(f"{own}{of}.proj.weight") // channels) for of in ("query", "key", "value")}
        if sizes["query"] % sizes["key"] or sizes["key"] % 2 or sizes["value"] % 2:
            raise ModelError(f"{own}query.proj.weight: expected heads of {sizes['key']} values, found {sizes['query']}")
        heads, network = sizes["query"] // sizes["key"], self._network()
        inputs = network.recorder.receive_all({"keys": channels, "values": channels})
        k, v = (
            network.kernel(x, f"{own}{of}.proj", sizes[of], bias=False)
            for of, x in zip(("key", "value"), inputs, strict=True)
        )
        layer = network.recorder.append(k, v, 1)
        network.end()
        y, x = network.recorder.receive_all({"queries": channels, "rows": channels})
        q = network.kernel(y, f"{own}query.proj", sizes["query"], bias=False)
        y = network.recorder.attention(q, layer, heads, sizes["key"] ** -0.5, causal=False)
        y = self._scaled(network, network.kernel(y, f"{own}output.proj", channels, bias=False), name)
        network.end(network.recorder.add(x, y))
        self.parts[name] = Part(network.plan(), self._side**2)
        return Block(name, "attention", 1, residual=True, halved=halved)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def encode(self, pictures: Sequence[F32], flags: Sequence[int] = ()) -> Encoding:
        """Yield the runs of a square picture (height, width, 3)."""
        picture, size = pictures[0], self._size
        if picture.shape != (size, size, 3):
            raise ModelError(f"picture: {picture.shape} is not {size} x {size} pixels")
        x = yield from convolved("stem", picture, 2, 3, (same(size, 3, 2),) * 2)
        ends = []
        for blocks in self._stages:
            for block in blocks:
                x = yield from getattr(self, f"_{block.kind}_runs")(block, x)
            ends.append(x)
        high, low = ends[2:]
        times = len(high) // len(low)
        both = np.concatenate([high, low.repeat(times, 0).repeat(times, 1)], axis=2)
        side = len(both)
        y = yield from rowwise("fusion", both.reshape(side * side, -1))
        return (yield from rowwise("head", grids.cells(y, side, side, side // TOKENS)))

    def _edge_runs(self, block: Block, x: F32) -> Encoding:
        pads = (same(len(x), 3, 2) if block.stride == 2 else (1, 1),) * 2
        more = (x.reshape(-1, x.shape[2]),) if block.residual else ()
        return (yield from convolved(block.name, x, block.stride, 3, pads, *more))

    def _inverted_runs(self, block: Block, x: F32) -> Encoding:
        side, more = len(x), (x.reshape(-1, x.shape[2]),) if block.residual else ()
        first, rest = (f"{block.name}start", ()) if block.middle else (block.name, more)
        if block.start:
            y = yield from depthwise_runs(first, x, block.start, 1, None, *rest)
        else:
            y = (yield from rowwise(first, x.reshape(-1, x.shape[2]), *rest)).reshape(side, side, -1)
        if not block.middle:
            return y
        pads = (same(side, block.middle, 2) if block.stride == 2 else (block.middle // 2,) * 2,) * 2
        return (yield from depthwise_runs(block.name, y, block.middle, block.stride, pads, *more))

    def _attention_runs(self, block: Block, x: F32) -> Encoding:
        rows = x.reshape(-1, x.shape[2])
        normed = yield from rowwise(f"{block.name}norm", rows)
        stored = [normed, normed]
        if block.halved:
            picture, pads = normed.reshape(x.shape), (same(len(x), 3, 2),) * 2
            for number, of in enumerate(("key", "value")):
                y = yield from depthwise_runs(f"{block.name}attn.{of}", picture, 3, 2, pads)
                stored[number] = y.reshape(-1, x.shape[2])
        return (yield from cross_runs(block.name, tuple(stored), (normed, rows))).reshape(x.shape)
