"""Loads weights into panels.

Pieces of the GGUF are repacked in parallel, so memory never holds two copies of the model.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.jit import Library
from localllm.backends.cpu.kernels import wide
from localllm.backends.cpu.kernels.matrix import RepackArguments
from localllm.backends.cpu.memory import Arena, address, aligned
from localllm.backends.cpu.panels import FloatPanel, IntegerPanel, panel_count
from localllm.backends.cpu.simd import LANES
from localllm.backends.cpu.unpack import FORMATS, INTEGER_PANELS, panel_of
from localllm.base.notices import Notice, Setting
from localllm.plan import Tensor, Weight
from localllm.quant import dequantize, row_bytes

PIECE = 1 << 20  # bytes read from the GGUF at a time; they fit into L2 together with the resulting panels


PACKED_BYTES = 128 << 10  # maximum packed bytes per task; it bounds the time that a thread waits for another
L2_BYTES = 512 << 10  # bytes of unpacked weights that a task keeps in L2 for all rows


def _even(panels: int) -> int:
    return max(panels // 2 * 2, 2)


@dataclass(frozen=True, slots=True)
class RepackedWeight:
    """A matrix in panels: address and strides."""

    address: int
    format: str
    panels: int  # panels per expert
    panel_bytes: int
    blocks: int  # number of blocks along K
    tile_bytes: int  # bytes of one unpacked panel; 0 for float formats
    widened_bytes: int  # bytes of a tile's widened activations, which follow the unpacked panels
    experts: int = 1  # number of matrices of the same shape, stored one after the other

    @property
    def expert_bytes(self) -> int:
        return self.panels * self.panel_bytes

    @property
    def bytes(self) -> int:
        return self.experts * self.expert_bytes

    def chunk(self, threads: int) -> int:
        """Return the number of panels per task, so few that each thread has several tasks and a task fits into L2.

        The number is even, or 1 for a float format with too few tasks for the threads.
        """
        if self.format not in INTEGER_PANELS and self.panels // 2 < threads:
            return 1
        return _even(min(PACKED_BYTES // max(self.panel_bytes, 1), self.panels // (threads * 8)))

    def tile_chunk(self, threads: int) -> int:
        """Return the number of panels per task if panels are unpacked. The number is even."""
        return _even(min(L2_BYTES // max(self.tile_bytes, 1), self.panels // (threads * 8)))

    def scratch_bytes(self, threads: int) -> int:
        """Return the scratch bytes per thread for a product with unpacked panels."""
        return self.tile_chunk(threads) * self.tile_bytes + self.widened_bytes


def check_weight(weight: Weight) -> None:
    """Raise BackendError unless this backend has kernels for the format of the matrix."""
    if weight.format not in FORMATS:
        problem = f"{weight.name}: the cpu backend has no kernels for {weight.format} yet"
        other = (Setting("backend", "reference"), " runs every format slowly")
        raise BackendError(Notice(problem, f"; it runs {', '.join(FORMATS)}, ", *other))


def stored_bytes(weight: Weight) -> int:
    """Return the bytes of a weight in memory without padding: the file's, unless its panels have other fields."""
    panel = INTEGER_PANELS.get(weight.format)
    if panel is None or panel.conversion is None:
        return weight.bytes
    return math.prod(weight.shape) // panel.block_values * (panel.block_bytes // LANES)


def shapes(weights: Iterable[Weight], isa: Isa) -> dict[str, RepackedWeight]:
    """Return the panel layout of every matrix by name, still without addresses.

    Raises BackendError for a format without kernels.
    """
    found: dict[str, RepackedWeight] = {}
    for weight in weights:
        check_weight(weight)
        experts, rows, columns = _matrices(weight)
        panel = panel_of(weight.format)
        found[weight.name] = RepackedWeight(
            0,
            weight.format,
            panel_count(rows),
            panel.panel_bytes(columns),
            columns // panel.block_values,
            *_unpacked(panel, columns, isa),
            experts,
        )
    return found


def _unpacked(panel: IntegerPanel | FloatPanel, columns: int, isa: Isa) -> tuple[int, int]:
    """Return the maximum bytes of one unpacked panel, and of the widened activations after it."""
    if isinstance(panel, FloatPanel):
        return 0, 0
    if wide.used(isa, panel):
        return wide.panel_bytes(isa, panel, columns), wide.widened_bytes(columns)
    return panel.tile_bytes(columns), 0


def load_weight(
    weights: Iterable[Weight], shapes: dict[str, RepackedWeight], library: Library, threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Arena, dict[str, RepackedWeight]]:  # fmt: skip
    """Load every matrix once into panels of these shapes, by name. `progress(done, total)` counts bytes."""
    matrices = {weight.name: weight for weight in weights}
    arena = Arena(sum(aligned(panels.bytes) for panels in shapes.values()), "the weights")
    found = {name: replace(panels, address=arena.take(panels.bytes)) for name, panels in shapes.items()}
    fill([(weight, found[name]) for name, weight in matrices.items()], library, threads, progress)
    return arena, found


def fill(
    pairs: Sequence[tuple[Tensor, RepackedWeight]],
    library: Library,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Read each matrix and repack it into its panels."""
    pieces: list[tuple[Tensor, RepackedWeight, int, int, int]] = []
    for weight, stored in pairs:
        experts, rows, _ = _matrices(weight)
        step = max(PIECE // max(stored.panel_bytes, 1), 1) * LANES
        pieces += [
            (weight, stored, expert, row, min(row + step, rows))
            for expert in range(experts)
            for row in range(0, rows, step)
        ]

    word = ctypes.c_int64
    kind = ctypes.CFUNCTYPE(word, word, word, word)
    repack = {name: kind(library.address(f"repack_{name}")) for name in {w.format for w, _ in pairs}}

    def convert(piece: tuple[Tensor, RepackedWeight, int, int, int]) -> int:
        weight, stored, expert, start, stop = piece
        rows = weight.shape[-2]
        data = np.ascontiguousarray(weight.read(expert * rows + start, expert * rows + stop))
        arguments = RepackArguments(
            source=address(data),
            row_bytes=data.shape[1],
            rows=stop - start,
            target=stored.address + expert * stored.expert_bytes + start // LANES * stored.panel_bytes,
            blocks=stored.blocks,
            panel_bytes=stored.panel_bytes,
        ).pack()
        repack[weight.format](address(arguments), 0, 1)
        return data.nbytes

    everything = sum(math.prod(w.shape[:-1]) * row_bytes(w.format, w.shape[-1]) for w, _ in pairs)
    done = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="localllm-load") as workers:
        try:
            for size in workers.map(convert, pieces):
                done += size
                if progress is not None:
                    progress(done, everything)
        except BaseException:  # Ctrl-C must not wait for the rest of the GGUF
            workers.shutdown(cancel_futures=True)
            raise


def _matrices(weight: Tensor) -> tuple[int, int, int]:
    """Return (experts, rows, columns). A plain matrix counts as one expert."""
    rows, columns = weight.shape[-2:]
    return math.prod(weight.shape[:-2]), rows, columns


def padded(count: int, lanes: int) -> int:
    """Return `count` rounded up to whole runs of `lanes`, plus one run."""
    return -(-count // lanes) * lanes + lanes


def dense_vector(weight: Weight, lanes: int) -> NDArray[np.float32]:
    """Dequantize a small tensor to flat float32, zero-padded to the size that `padded` returns."""
    rows = math.prod(weight.shape[:-1])
    values = dequantize(weight.read(0, rows), weight.format).reshape(rows, -1)[:, : weight.shape[-1]].ravel()
    out = np.zeros(padded(values.size, lanes), np.float32)
    out[: values.size] = values
    return out


def column_bytes(weight: Weight, lanes: int) -> NDArray[np.float32]:
    """Transpose a small matrix (rows, columns) to float32 (columns, rows), zero-padded to whole runs of `lanes`."""
    rows, count = weight.shape
    out = np.zeros((count, -(-rows // lanes) * lanes), np.float32)
    out[:, :rows] = dequantize(weight.read(0, rows), weight.format)[:, :count].T
    return out.ravel()


def edged(weight: Weight, more: int) -> NDArray[np.float32]:
    """Return a small matrix as flat float32, with the first and the last value of each row repeated `more` times."""
    rows, count = weight.shape
    numbers = dequantize(weight.read(0, rows), weight.format)[:, :count].astype(np.float32)
    return np.pad(numbers, ((0, 0), (more, more)), "edge").ravel()


def expert_vectors(weight: Weight, width: int) -> NDArray[np.float32]:
    """Dequantize per-expert vectors (experts, rows) to float32, zero-pad each to `width`, and flatten."""
    experts, rows = weight.shape
    out = np.zeros((experts, width), np.float32)
    out[:, :rows] = dequantize(weight.read(0, experts), weight.format)[:, :rows]
    return out.ravel()
