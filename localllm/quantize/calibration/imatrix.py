"""Importance matrices: the mean square of every input of every matrix, as in llama.cpp's imatrix files.

`measure_imatrix` measures a matrix with localllm's forward pass. `read_imatrix` and `write_imatrix` support both file
formats, GGUF and the older .dat. A quantizer asks `Imatrix.importance` for the weights of a tensor's columns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localllm.base.errors import LocalLLMError
from localllm.base.files.outputs import new_file
from localllm.base.files.regular import open_regular, read_regular
from localllm.base.printable import printable
from localllm.evaluation import Windows
from localllm.gguf import NewTensor, open_gguf, write_gguf
from localllm.gguf.strings import StringArray, decode, encode
from localllm.model import Model
from localllm.plan import F32
from localllm.quantize.calibration.observe import MatrixInputs, matrix_inputs

F64 = NDArray[np.float64]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNKS, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_MOST = (1 << 31) - 1  # maximum of a count, since the older format stores int32
_MOST_TOKENS = 2.0**62  # maximum count, which must fit in int64
_LIMIT = 1 << 28  # maximum number of values in a file of the older format; a larger count means damage
_MOST_BYTES = 4 * _LIMIT  # maximum bytes of a file of the older format


@dataclass(frozen=True, slots=True)
class ImatrixEntry:
    """One tensor: the sums of squared inputs, and the number of input vectors summed. Each expert has a row."""

    sums: F32  # (experts or 1, columns)
    counts: NDArray[np.int64]  # (experts or 1,)

    def importance(self) -> F32:
        """Return mean squares float32 (experts or 1, columns). An expert without inputs gets ones, as in llama.cpp."""
        counts = self.counts[:, None]
        return np.where(counts > 0, self.sums / np.maximum(counts, 1).astype(np.float32), np.float32(1))


@dataclass(frozen=True, slots=True)
class Imatrix:
    """Entries by tensor name, and their origin."""

    entries: Mapping[str, ImatrixEntry]
    chunks: int  # number of text windows measured
    chunk_size: int  # tokens per window; 0 if the file has no value
    datasets: tuple[str, ...] = ()

    def importance(self, name: str, experts: int, columns: int) -> F32 | None:
        """Return the column weights of a tensor, float32 (experts, columns), or None if the tensor has no entry.

        Raises LocalLLMError if the entry has another shape.
        """
        entry = self.entries.get(name)
        if entry is None:
            return None
        found = entry.importance()
        if found.shape[1] == experts * columns and len(found) == 1:  # the older format does not distinguish experts
            found = found.reshape(experts, columns)
        if found.shape != (experts, columns):
            raise LocalLLMError(
                f"the importance matrix has {found.shape[0]} x {found.shape[1]} numbers for {printable(name)}, which "
                f"needs {experts} x {columns}; it was made for another model"
            )
        return found


# -- measuring -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sums:
    sums: F64
    counts: NDArray[np.int64]


@dataclass(slots=True)
class Collector:
    """Accumulates inputs step by step. Tensors outside the layers are skipped, except the output matrix if `output` is
    set."""

    output: bool = False
    _found: dict[str, _Sums] = field(default_factory=dict)

    def add(self, inputs: Iterable[MatrixInputs], experts: Mapping[str, int]) -> None:
        """Add the inputs of one step. `experts` is the number of matrices per tensor of experts, by name."""
        for each in inputs:
            names = [n for n in each.names if n.startswith("blk.") or (self.output and n == "output.weight")]
            if not names:
                continue
            sums, counts = _squares(each, experts.get(names[0], 1))
            for name in names:
                held = self._found.get(name)
                if held is None:
                    self._found[name] = _Sums(sums.copy(), counts.copy())
                else:
                    held.sums += sums
                    held.counts += counts

    def finish(self, chunks: int, chunk_size: int, dataset: str) -> Imatrix:
        entries = {name: ImatrixEntry(s.sums.astype(np.float32), s.counts) for name, s in sorted(self._found.items())}
        for name, entry in entries.items():
            if not np.isfinite(entry.sums).all():
                raise LocalLLMError(f"{name}: its inputs are not finite numbers on this text; is the model damaged?")
        return Imatrix(entries, chunks, chunk_size, (dataset,) if dataset else ())


def _squares(inputs: MatrixInputs, experts: int) -> tuple[F64, NDArray[np.int64]]:
    """Return the sums of squares (experts, columns), and the number of input vectors per expert."""
    width = inputs.x.shape[-1]
    if inputs.choices is None:
        return np.square(inputs.x, dtype=np.float64).sum(axis=0)[None], np.array([len(inputs.x)], np.int64)
    rows, chosen = inputs.x.reshape(-1, width), inputs.choices.reshape(-1)
    sums, counts = np.zeros((experts, width)), np.bincount(chosen, minlength=experts).astype(np.int64)
    for expert in np.flatnonzero(counts):
        sums[expert] = np.square(rows[chosen == expert], dtype=np.float64).sum(axis=0)
    return sums, counts


def measure_imatrix(
    model: Model,
    windows: Windows,
    dataset: str = "",
    output: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    seen: Callable[[int, int, F32], None] | None = None,
) -> Imatrix:
    """Measure the importance matrix of a model loaded with `observe=True`, over windows of the text `dataset`.

    `stop` and `seen` are passed to `matrix_inputs`. If stopped after n windows, the result covers n windows.
    """
    experts = {name: tensor.shape[0] for name, tensor in model.file.tensors.items() if len(tensor.shape) == 3}
    collector, chunks = Collector(output), 0

    def count(what: str, done: int, total: int) -> None:
        nonlocal chunks
        chunks = done
        if progress is not None:
            progress(what, done, total)

    for inputs in matrix_inputs(model, windows, count, stop, seen):
        collector.add(inputs, experts)
    return collector.finish(chunks, windows.ctx_size, dataset)


# -- files ---------------------------------------------------------------------------------------------------------


def write_imatrix(path: Path, imatrix: Imatrix, overwrite: bool = False) -> None:
    """Write a file for llama-quantize and for localllm: the older format if the name ends in .dat, else GGUF.

    Raises OutputError for an existing file without `overwrite`, and if a write fails.
    """
    if path.suffix == ".dat":
        _write_dat(path, imatrix, overwrite)
        return
    tensors = []
    for name, entry in sorted(imatrix.entries.items()):
        counts = entry.counts.astype(np.float32)
        dense = len(counts) == 1
        for suffix, values in ((_SUMS, entry.sums), (_COUNTS, counts[:, None])):
            shape = values.shape[1:] if dense else values.shape
            tensors.append(NewTensor(name + suffix, "F32", shape, values.astype("<f4").tobytes()))
    metadata: dict[str, str | int | Sequence[str]] = {
        "general.type": "imatrix",
        _DATASETS: list(imatrix.datasets),
        _CHUNKS: imatrix.chunks,
        _CHUNK_SIZE: imatrix.chunk_size,
    }
    write_gguf(path, metadata, tensors, overwrite=overwrite)


def read_imatrix(path: Path) -> Imatrix:
    """Read an importance matrix of either format, from localllm or llama.cpp. The content determines the format."""
    with open_regular(path) as file:
        magic = file.read(4)
    found = _read_gguf(path) if magic == b"GGUF" else _read_dat(path)
    for name, entry in found.entries.items():
        if not np.isfinite(entry.sums).all() or (entry.sums < 0).any() or (entry.counts < 0).any():
            raise LocalLLMError(
                f"{path}: {printable(name)} contains negative numbers, NaN or infinity; create the file again"
            )
    return found


def _read_gguf(path: Path) -> Imatrix:
    with open_gguf(path) as file:
        entries = {}
        for name, tensor in file.tensors.items():
            if not name.endswith(_SUMS):
                continue
            base = name.removesuffix(_SUMS)
            counts = file.tensors.get(base + _COUNTS)
            if counts is None or {tensor.format, counts.format} != {"F32"}:
                raise LocalLLMError(
                    f"{path}: {printable(base)} needs {_SUMS[1:]} and {_COUNTS[1:]}, both F32; make the file again"
                )
            sums, numbers = (np.ascontiguousarray(t.read(0, t.rows)).view("<f4").ravel() for t in (tensor, counts))
            if not sums.size or not numbers.size or sums.size % numbers.size:
                raise LocalLLMError(
                    f"{path}: {printable(base)} has {sums.size} sums for {numbers.size} counts; make it again"
                )
            if not (abs(numbers) < _MOST_TOKENS).all():
                raise LocalLLMError(
                    f"{path}: {printable(base)} has a count that is not a number of tokens; make it again"
                )
            entries[base] = ImatrixEntry(
                sums.reshape(numbers.size, -1).astype(np.float32), np.rint(numbers).astype(np.int64)
            )
        if not entries:
            raise LocalLLMError(f"{path}: not an importance matrix; make one with localllm imatrix")
        metadata = file.metadata
        datasets = metadata.get(_DATASETS)
        numbers_of = [metadata.get(key) for key in (_CHUNKS, _CHUNK_SIZE)]
        chunks, size = (n if isinstance(n, int) and 0 <= n <= _MOST else 0 for n in numbers_of)
        return Imatrix(entries, chunks, size, tuple(datasets) if isinstance(datasets, StringArray) else ())


def _write_dat(path: Path, imatrix: Imatrix, overwrite: bool) -> None:
    """Write the older format: per tensor, the mean squares times the number of chunks, and the number of chunks."""
    parts = [struct.pack("<i", len(imatrix.entries))]
    for name, entry in sorted(imatrix.entries.items()):
        chunks = min(max(-(-int(entry.counts.max()) // max(imatrix.chunk_size, 1)), 1), _MOST)
        text, values = encode(name), entry.importance() * np.float32(chunks)
        parts += [struct.pack("<i", len(text)), text, struct.pack("<ii", chunks, values.size)]
        parts.append(values.astype("<f4").tobytes())
    dataset = encode(imatrix.datasets[-1] if imatrix.datasets else "")
    parts += [struct.pack("<ii", imatrix.chunks, len(dataset)), dataset]
    with new_file(path, overwrite) as file:
        file.write(b"".join(parts))


def _read_dat(path: Path) -> Imatrix:
    data, at = read_regular(path, _MOST_BYTES), 0

    def take(size: int) -> bytes:
        nonlocal at
        if not 0 <= size <= len(data) - at:
            raise LocalLLMError(f"{path}: not an importance matrix, or truncated at byte {at}")
        at += size
        return data[at - size : at]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    entries = {}
    for _ in range(number()):
        name = decode(take(number()))
        chunks, size = number(), number()
        if not 0 < size <= _LIMIT:
            raise LocalLLMError(f"{path}: says {size} numbers for {name[:80]!r}; it is damaged")
        sums = np.frombuffer(take(4 * size), "<f4").astype(np.float32)[None]
        entries[name] = ImatrixEntry(sums, np.array([max(chunks, 1)], np.int64))
    if not entries:
        raise LocalLLMError(f"{path}: not an importance matrix; make one with localllm imatrix")
    if at == len(data):  # the following fields are optional
        return Imatrix(entries, 0, 0)
    chunks = number()
    return Imatrix(entries, chunks, 0, (decode(take(number())),) if at < len(data) else ())
