"""Models of a real geometry whose weights exist only in memory: each matrix repeats a few random rows.

Speed depends only on sizes and types, and writing a GGUF of 16 GB takes longer than the measurement.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from make_model import GEOMETRIES, metadata, tensors

from localllm.backends.gpu.formats import PIECE
from localllm.models import architecture_of, read_config, record
from localllm.plan import Plan
from localllm.quant import FORMATS, quantize, row_bytes

SCALES = {  # bytes of a block that hold half-precision scales: set to SMALL, for activations of a usual size
    "Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
SMALL = np.array([0.0005], np.float16).view(np.uint8)


class Repeated:
    """A weight with any number of rows, which repeats a few rows."""

    def __init__(self, name: str, format: str, shape: tuple[int, ...], rows: NDArray[np.uint8]) -> None:
        self.name, self.format, self.shape, self._rows = name, format, shape, rows

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        while len(self._rows) < stop - start:
            self._rows = np.concatenate([self._rows, self._rows])
        return self._rows[: stop - start]


class Weights:
    """Random rows by format and width, generated once."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._made: dict[tuple[str, int], NDArray[np.uint8]] = {}

    def of(self, name: str, format: str, shape: tuple[int, ...]) -> Repeated:
        columns = shape[-1]
        key = format, columns
        if key not in self._made:
            self._made[key] = self._rows(format, columns)
        return Repeated(name, format, shape, self._made[key])

    def _rows(self, format: str, columns: int) -> NDArray[np.uint8]:
        fmt, size = FORMATS[format], row_bytes(format, columns)
        count = max(1, PIECE // size)
        if fmt.quantize is not None and fmt.block_values == 1:
            few = self._random.standard_normal((min(count, 64), columns), np.float32) / np.float32(np.sqrt(columns))
            return np.tile(quantize(few, format), (-(-count // len(few)), 1))
        blocks = self._random.integers(0, 256, (count * size // fmt.block_bytes, fmt.block_bytes), np.uint8)
        if format in SCALES:
            for at in SCALES[format]:
                blocks[:, at : at + 2] = SMALL
        else:
            blocks &= 0xBF  # keeps scales finite in every format
        return blocks.reshape(count, size)


def plan_of(geometry: str, type_name: str, weights: Weights, context: int) -> Plan:
    """Return the plan of a `make_model` geometry with every matrix in one type, or in the mix of that name."""
    g = GEOMETRIES[geometry]
    found = {}
    for tensor in tensors(g, type_name, 0):
        if isinstance(tensor.data, np.ndarray):  # weights of a norm
            found[tensor.name] = Repeated(tensor.name, tensor.format, tensor.shape, tensor.data.reshape(1, -1))
        else:
            found[tensor.name] = weights.of(tensor.name, tensor.format, tensor.shape)
    keys = metadata(geometry, g, None)
    architecture = architecture_of(keys)
    return record(read_config(keys, architecture.name), architecture, found, context)
