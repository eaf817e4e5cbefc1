"""The memory of a program on a device: a buffer for every reference, and launches prepared with these buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from localllm.backends.base import CacheTypes, Limits, Progress
from localllm.backends.gpu import formats
from localllm.backends.gpu.cachetypes import part_bytes
from localllm.backends.gpu.device import Device
from localllm.backends.gpu.device import Grid as Groups
from localllm.backends.gpu.kernels.kernel import Grid, Kernel, Launch
from localllm.backends.gpu.program import Program
from localllm.backends.gpu.references import CacheOf, Fixed, MatrixOf, Reference, RopeTableOf, VectorOf
from localllm.backends.gpu.steps import step_words
from localllm.base.notices import Notice, Setting
from localllm.plan import BLOCK, F32, Plan, Tensor, Weight
from localllm.quant import dequantize

Bound = tuple[Callable[[Groups], None], Grid]
SPOILED = 16 << 20  # bytes of a buffer that `spoil` fills
Numbers = tuple[int, ...]  # values passed to a generic kernel at run time


class DeviceMemory:
    """Buffers by reference: empty before `allocate` and after `free`."""

    def __init__(self, device: Device, plan: Plan, limits: Limits) -> None:
        self._device, self._plan, self._limits = device, plan, limits
        self._buffers: dict[Reference | Numbers, Any] = {}
        self._computed: dict[Reference, int] = {}  # bytes of activations and other results of a step
        self.tables_size = 4 * max(limits.blocks, -(-limits.positions // BLOCK)) * limits.rows

    def __getitem__(self, reference: Reference) -> Any:
        return self._buffers[reference]

    def allocate(self, program: Program, cache: CacheTypes, report: Progress) -> None:
        """Allocate everything, and upload the weights."""
        limits = self._limits
        rows = {"batch": limits.rows, "logits": limits.logit_rows}
        self._computed = {own: size for own, size in program.scratch.items() if own not in (Fixed.PICKED, Fixed.WANTED)}
        for buffer in program.buffers:
            self._computed[buffer] = size = 4 * buffer.stride * rows[buffer.rows]
            self._alloc(buffer, size, "the activations")
        for reference, size in {
            **program.scratch,
            Fixed.NOTHING: 64,
            Fixed.STEP: 4 * step_words(limits, self._plan),
        }.items():
            self._alloc(reference, size, "the activations")
        for tables in (Fixed.TABLES, Fixed.WINDOW_TABLES):
            self._alloc(tables, self.tables_size, "block tables")
        for number, layer in enumerate(self._plan.layers):
            keys, values = part_bytes(layer, cache)
            for own, size in ((CacheOf(number, "keys"), keys), (CacheOf(number, "values"), values)):
                what = Notice("the cache (", Setting("ctx_size"), " makes it smaller)")
                if size:  # a convolution has no state
                    self._alloc(own, limits.blocks_of(layer) * size, what)
        for rope in program.ropes:
            self._alloc(RopeTableOf(rope), 4 * (len(rope.axes) + limits.positions * rope.n_rot), "the rope tables")
        for weight in program.vectors.values():
            numbers = _numbers(weight)
            self._device.upload(self._alloc(VectorOf(weight.name), numbers.nbytes, "the weights"), 0, numbers)
        done, total = 0, sum(formats.size_of(weight) for weight in program.matrices.values())
        for weight in program.matrices.values():
            self._alloc(MatrixOf(weight.name), formats.size_of(weight), "the weights")
            for size in self.fill(weight):
                done += size
                report("loading weights", min(done, total), total)
        report("loading weights", total, total)

    def _alloc(self, reference: Reference | Numbers, size: int, what: str) -> Any:
        self._buffers[reference] = buffer = self._device.alloc(size, what)
        return buffer

    def fill(self, weight: Tensor) -> list[int]:
        """Upload a matrix. Return the bytes of each piece."""
        sizes = []
        for offset, data in formats.pieces(weight):
            self._device.upload(self._buffers[MatrixOf(weight.name)], offset, data)
            sizes.append(data.nbytes)
        return sizes

    def spoil(self, bits: int) -> None:
        """Fill a step's activations and other results with this bit pattern, but not weights, cache and parameters."""
        for reference, size in self._computed.items():
            self._device.upload(self._buffers[reference], 0, np.full(min(size, SPOILED) // 4, bits, np.uint32))

    def prepare(self, compiled: Mapping[Kernel, Any], launch: Launch) -> Bound:
        """Return a launch of a compiled kernel with its buffers set."""
        buffers = [self._buffers[reference] for reference in launch.buffers]
        kernel = launch.kernel
        if self._device.generic:
            buffers.insert(0, self._shape(tuple(kernel.numbers().tolist())))
        return self._device.prepare(compiled[kernel], kernel.size, kernel.local_bytes, buffers), launch.grid

    def _shape(self, numbers: Numbers) -> Any:
        """Return the buffer of a generic kernel's run-time values, which is its first parameter."""
        if numbers not in self._buffers:
            array = np.array(numbers, np.int32)
            self._device.upload(self._alloc(numbers, array.nbytes, "the shapes"), 0, array)
        return self._buffers[numbers]

    def free(self) -> None:
        for buffer in self._buffers.values():
            self._device.free(buffer)
        self._buffers.clear()


def _numbers(weight: Weight) -> F32:
    """Return a small tensor as float32."""
    rows = int(np.prod(weight.shape[:-1], dtype=np.int64))
    return np.ascontiguousarray(
        dequantize(weight.read(0, rows), weight.format).reshape(rows, -1)[:, : weight.shape[-1]]
    )
