"""Stream tensors through worker threads, which read, convert and quantize rows. Results arrive in order.

A few chunks of rows are in progress at any time. No tensor is completely in memory, unless a method requires it. NumPy
and the compiled quantizers release the GIL, so threads run in parallel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.backends.base import Progress
from localllm.base.errors import LocalLLMError
from localllm.gguf import NewTensor
from localllm.plan import F32, Tensor
from localllm.quant import FORMATS, QuantError
from localllm.quantize.calibration.imatrix import Imatrix
from localllm.quantize.calibration.method import Method
from localllm.quantize.jobs import Job, QuantizeError

U8 = NDArray[np.uint8]

CHUNK = 1 << 18  # values that one thread converts at a time: a megabyte of float32, which fits in a core's cache
COPIED = 1 << 22  # values copied at a time
AHEAD = 3  # chunks in progress per thread


@dataclass(slots=True)
class Error:
    """The error of a stored tensor, as sums over its values. The `weighted` sums use the importance of each column."""

    values: int = 0
    squares: float = 0.0  # sum of the squared values
    missed: float = 0.0  # sum of the squared errors
    weighted_squares: float = 0.0
    weighted_missed: float = 0.0
    largest: float = 0.0

    def add(self, other: Error) -> None:
        self.values += other.values
        self.squares += other.squares
        self.missed += other.missed
        self.weighted_squares += other.weighted_squares
        self.weighted_missed += other.weighted_missed
        self.largest = max(self.largest, other.largest)

    @property
    def rmse(self) -> float:
        return float(np.sqrt(self.missed / self.values)) if self.values else 0.0

    @property
    def relative(self) -> float:
        """Root of the relative squared error."""
        return float(np.sqrt(self.missed / self.squares)) if self.squares else 0.0

    @property
    def weighted(self) -> float | None:
        """Root of the relative squared error, weighted by the importance of each column, or None without importance."""
        return float(np.sqrt(self.weighted_missed / self.weighted_squares)) if self.weighted_squares else None


@dataclass(frozen=True, slots=True)
class ConversionSettings:
    """The settings of a conversion, besides its jobs."""

    threads: int
    imatrix: Imatrix | None = None
    method: Method | None = None  # stores whole tensors, on one thread
    errors: dict[str, Error] | None = field(default=None)  # receives each tensor's error by name, if given
    progress: Progress | None = None


class _Converted(NamedTuple):
    rows: U8
    error: Error | None
    values: int


@contextmanager
def conversion(
    jobs: Sequence[Job], tensors: Mapping[str, Tensor], how: ConversionSettings
) -> Iterator[list[NewTensor]]:
    """Return the new tensors for `write_gguf`, which must request their data once and in this order.

    Reading them raises QuantizeError, with the name of the tensor, for values that cannot be stored.
    """
    pool = ThreadPoolExecutor(how.threads, thread_name_prefix="quantize")
    try:
        chunks = _report(jobs, _chunks(pool, jobs, tensors, how), how)
        yield [NewTensor(job.name, job.after, job.shape, _taker(job, chunks)) for job in jobs]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _taker(job: Job, chunks: Iterator[U8]) -> Callable[[], Iterator[U8]]:
    def take() -> Iterator[U8]:
        missing = job.rows
        while missing:
            rows = next(chunks)
            missing -= len(rows)
            yield rows

    return take


def _report(jobs: Sequence[Job], chunks: Iterator[tuple[Job, _Converted]], how: ConversionSettings) -> Iterator[U8]:
    total, done = sum(job.values for job in jobs), 0
    for job, chunk in chunks:
        done += chunk.values
        if how.errors is not None and chunk.error is not None:
            how.errors.setdefault(job.name, Error()).add(chunk.error)
        if how.progress is not None:
            how.progress("quantizing", done, total)
        yield chunk.rows


def _chunks(
    pool: ThreadPoolExecutor, jobs: Sequence[Job], tensors: Mapping[str, Tensor], how: ConversionSettings
) -> Iterator[tuple[Job, _Converted]]:
    """Yield results in order, with a bounded number of tasks in progress."""
    under_way: deque[tuple[Job, Future[_Converted]]] = deque()
    for job in jobs:
        tensor = tensors[job.name]
        if how.method is not None:
            while under_way:
                first, future = under_way.popleft()
                yield first, future.result()
            yield job, _whole(job, tensor, how, how.method)
            continue
        for task in _tasks(job, tensor, how):
            under_way.append((job, pool.submit(task)))
            if len(under_way) >= AHEAD * how.threads:
                first, future = under_way.popleft()
                yield first, future.result()
    while under_way:
        first, future = under_way.popleft()
        yield first, future.result()


def _tasks(job: Job, tensor: Tensor, how: ConversionSettings) -> Iterator[Callable[[], _Converted]]:
    """Yield a task for each run of rows. No run crosses from one expert to the next."""
    columns = job.shape[-1]
    if not job.changes:
        size = max(COPIED // columns, 1)
        for start in range(0, job.rows, size):
            yield _copy(tensor, start, min(start + size, job.rows), columns)
        return
    weights = _importance(job, how.imatrix)
    each, size = job.rows // job.experts, max(CHUNK // columns, 1)
    for expert in range(job.experts):
        importance = weights[expert] if weights is not None else None
        for start in range(expert * each, (expert + 1) * each, size):
            stop = min(start + size, (expert + 1) * each)
            yield _convert(job, tensor, start, stop, importance, how.errors is not None)


def _importance(job: Job, imatrix: Imatrix | None) -> F32 | None:
    """Return the importance of each column, (experts, columns). As in llama-quantize, embeddings ignore an importance
    of the wrong size."""
    if imatrix is None:
        return None
    try:
        return imatrix.importance(job.name, job.experts, job.shape[-1])
    except LocalLLMError:
        if job.name in ("token_embd.weight", "per_layer_token_embd.weight"):
            return None
        raise


def _copy(tensor: Tensor, start: int, stop: int, columns: int) -> Callable[[], _Converted]:
    return lambda: _Converted(tensor.read(start, stop), None, (stop - start) * columns)


def _convert(
    job: Job, tensor: Tensor, start: int, stop: int, importance: F32 | None, measured: bool
) -> Callable[[], _Converted]:
    def task() -> _Converted:
        values = quant.dequantize(tensor.read(start, stop), job.before)
        try:
            rows = quant.quantize(values, job.after, importance)
        except QuantError as problem:
            raise QuantizeError(f"{job.name}, from row {start} on: {problem}") from None
        _check(job, rows, values, start)
        return _Converted(rows, _error(job, values, rows, importance) if measured else None, values.size)

    return task


def _whole(job: Job, tensor: Tensor, how: ConversionSettings, method: Method) -> _Converted:
    """Store a whole tensor by a method, which may fold factors even into tensors that keep their format."""
    stored = tensor.read(0, job.rows)
    if not job.changes and FORMATS[job.after].quantize is None:
        return _Converted(stored, None, job.values)
    values = quant.dequantize(stored, job.before)
    try:
        rows = method.store(job.name, values.reshape(job.shape), job.after)
    except QuantError as problem:
        raise QuantizeError(f"{job.name}: {problem}") from None
    _check(job, rows, values, 0)
    return _Converted(rows, None, job.values)


def _check(job: Job, rows: U8, values: F32, start: int) -> None:
    """Reject NaN and values beyond half precision. Quantized blocks reject them anyway; unquantized formats do not."""
    if FORMATS[job.after].block_values > 1:
        return
    kept = quant.dequantize(rows, job.after)
    if np.isfinite(kept).all():
        return
    row = start + int(np.argmin(np.isfinite(kept).all(axis=1)))
    at = "NaN or infinity" if not np.isfinite(values).all() else f"numbers above {job.after}'s range; use BF16 or F32"
    raise QuantizeError(f"{job.name}: row {row} holds {at}")


def _error(job: Job, values: F32, rows: U8, importance: F32 | None) -> Error:
    missed = quant.dequantize(rows, job.after) - values
    found = Error(values.size, _sum(values), _sum(missed), largest=float(np.abs(missed).max(initial=0)))
    if importance is not None:
        by_column = [np.einsum("ij,ij->j", x, x, dtype=np.float64) for x in (values, missed)]
        found.weighted_squares, found.weighted_missed = (float(s @ importance) for s in by_column)
    return found


def _sum(x: F32) -> float:
    return float(np.einsum("ij,ij->", x, x, dtype=np.float64))
