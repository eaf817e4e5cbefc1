"""Streams tensors through worker threads, which read, convert and quantize rows; results come out in order.

A few chunks of rows are in progress at any time. No tensor is ever whole in memory, unless a method requires it. NumPy
and the compiled quantizers release the interpreter lock, so threads run in parallel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.calibration.imatrix import Imatrix
from localllm.calibration.method import Method
from localllm.errors import LocalLLMError
from localllm.gguf import NewTensor
from localllm.plan import F32, Tensor
from localllm.quant import FORMATS, QuantError
from localllm.quantize.plan import QuantizeError, Step

U8 = NDArray[np.uint8]

CHUNK = 1 << 18  # values that one thread converts at a time: a megabyte of float32, which fits a core's cache
COPIED = 1 << 22  # values copied at a time
AHEAD = 3  # chunks in progress per thread


class Progress(Protocol):
    def __call__(self, what: str, done: int, total: int) -> None: ...


@dataclass(slots=True)
class Error:
    """The error of a stored tensor, as sums over its values. The `weighted` ones use the importance of each column."""

    values: int = 0
    squares: float = 0.0  # squares of the values
    missed: float = 0.0  # squares of the errors
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
        """The same, weighted by the importance of each column; None without importance."""
        return float(np.sqrt(self.weighted_missed / self.weighted_squares)) if self.weighted_squares else None


@dataclass(frozen=True, slots=True)
class How:
    """What a conversion needs besides its steps."""

    threads: int
    imatrix: Imatrix | None = None
    method: Method | None = None  # stores whole tensors, on one thread
    errors: dict[str, Error] | None = field(default=None)  # filled per tensor, if given
    progress: Progress | None = None


class _Chunk(NamedTuple):
    rows: U8
    error: Error | None
    values: int


@contextmanager
def conversion(steps: Sequence[Step], tensors: Mapping[str, Tensor], how: How) -> Iterator[list[NewTensor]]:
    """The new tensors, for `write_gguf`, which must ask for their data in this order and once.

    Reading them raises QuantizeError for numbers that cannot be stored, with the name of the tensor.
    """
    pool = ThreadPoolExecutor(how.threads, thread_name_prefix="quantize")
    try:
        chunks = _report(steps, _chunks(pool, steps, tensors, how), how)
        yield [NewTensor(step.name, step.after, step.shape, _taker(step, chunks)) for step in steps]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _taker(step: Step, chunks: Iterator[U8]) -> Callable[[], Iterator[U8]]:
    def take() -> Iterator[U8]:
        missing = step.rows
        while missing:
            rows = next(chunks)
            missing -= len(rows)
            yield rows

    return take


def _report(steps: Sequence[Step], chunks: Iterator[tuple[Step, _Chunk]], how: How) -> Iterator[U8]:
    total, done = sum(step.values for step in steps), 0
    for step, chunk in chunks:
        done += chunk.values
        if how.errors is not None and chunk.error is not None:
            how.errors.setdefault(step.name, Error()).add(chunk.error)
        if how.progress is not None:
            how.progress("quantizing", done, total)
        yield chunk.rows


def _chunks(
    pool: ThreadPoolExecutor, steps: Sequence[Step], tensors: Mapping[str, Tensor], how: How
) -> Iterator[tuple[Step, _Chunk]]:
    """Results in order, with a bounded number of tasks in progress."""
    under_way: deque[tuple[Step, Future[_Chunk]]] = deque()
    for step in steps:
        tensor = tensors[step.name]
        if how.method is not None:
            while under_way:
                first, future = under_way.popleft()
                yield first, future.result()
            yield step, _whole(step, tensor, how, how.method)
            continue
        for task in _tasks(step, tensor, how):
            under_way.append((step, pool.submit(task)))
            if len(under_way) >= AHEAD * how.threads:
                first, future = under_way.popleft()
                yield first, future.result()
    while under_way:
        first, future = under_way.popleft()
        yield first, future.result()


def _tasks(step: Step, tensor: Tensor, how: How) -> Iterator[Callable[[], _Chunk]]:
    """Runs of rows, none of which crosses from one expert to the next."""
    columns = step.shape[-1]
    if not step.changes:
        size = max(COPIED // columns, 1)
        for start in range(0, step.rows, size):
            yield _copy(tensor, start, min(start + size, step.rows), columns)
        return
    weights = _importance(step, how.imatrix)
    each, size = step.rows // step.experts, max(CHUNK // columns, 1)
    for expert in range(step.experts):
        importance = weights[expert] if weights is not None else None
        for start in range(expert * each, (expert + 1) * each, size):
            stop = min(start + size, (expert + 1) * each)
            yield _convert(step, tensor, start, stop, importance, how.errors is not None)


def _importance(step: Step, imatrix: Imatrix | None) -> F32 | None:
    """Importance per column, (experts, columns). As in llama-quantize, embeddings ignore an importance that does not
    fit."""
    if imatrix is None:
        return None
    try:
        return imatrix.importance(step.name, step.experts, step.shape[-1])
    except LocalLLMError:
        if step.name in ("token_embd.weight", "per_layer_token_embd.weight"):
            return None
        raise


def _copy(tensor: Tensor, start: int, stop: int, columns: int) -> Callable[[], _Chunk]:
    return lambda: _Chunk(tensor.read(start, stop), None, (stop - start) * columns)


def _convert(
    step: Step, tensor: Tensor, start: int, stop: int, importance: F32 | None, measured: bool
) -> Callable[[], _Chunk]:
    def task() -> _Chunk:
        values = quant.dequantize(tensor.read(start, stop), step.before)
        try:
            rows = quant.quantize(values, step.after, importance)
        except QuantError as problem:
            raise QuantizeError(f"{step.name}, from row {start} on: {problem}") from None
        _check(step, rows, values, start)
        return _Chunk(rows, _error(step, values, rows, importance) if measured else None, values.size)

    return task


def _whole(step: Step, tensor: Tensor, how: How, method: Method) -> _Chunk:
    """A tensor by a method that wants all of it, and may change what keeps its format: what factors are folded into."""
    stored = tensor.read(0, step.rows)
    if not step.changes and FORMATS[step.after].quantize is None:
        return _Chunk(stored, None, step.values)
    values = quant.dequantize(stored, step.before)
    try:
        rows = method.store(step.name, values.reshape(step.shape), step.after)
    except QuantError as problem:
        raise QuantizeError(f"{step.name}: {problem}") from None
    _check(step, rows, values, 0)
    return _Chunk(rows, None, step.values)


def _check(step: Step, rows: U8, values: F32, start: int) -> None:
    """Refuse numbers beyond half precision, and NaN. Quantized blocks refuse them anyway; single-number formats would
    not."""
    if FORMATS[step.after].block_values > 1:
        return
    kept = quant.dequantize(rows, step.after)
    if np.isfinite(kept).all():
        return
    row = start + int(np.argmin(np.isfinite(kept).all(axis=1)))
    at = "NaN or infinity" if not np.isfinite(values).all() else f"numbers above {step.after}'s range; use BF16 or F32"
    raise QuantizeError(f"{step.name}: row {row} holds {at}")


def _error(step: Step, values: F32, rows: U8, importance: F32 | None) -> Error:
    missed = quant.dequantize(rows, step.after) - values
    found = Error(values.size, _sum(values), _sum(missed), largest=float(np.abs(missed).max(initial=0)))
    if importance is not None:
        by_column = [np.einsum("ij,ij->j", x, x, dtype=np.float64) for x in (values, missed)]
        found.weighted_squares, found.weighted_missed = (float(s @ importance) for s in by_column)
    return found


def _sum(x: F32) -> float:
    return float(np.einsum("ij,ij->", x, x, dtype=np.float64))
