"""Activation-aware scaling of a whole model: find factors for every tensor, group by group, on a text.

The factors are small vectors. `Scaling.apply` multiplies a tensor by them when the tensor is read. The scaled tensors
form an ordinary model with the same results until it is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.evaluation import Windows
from localllm.model import Model
from localllm.plan import F32, Tensor
from localllm.quant.awq import Matrix, search
from localllm.quantize.calibration.hessian import MEMORY, collect, portions
from localllm.quantize.calibration.smooth import FoldGroup, fold_groups

F64 = NDArray[np.float64]
NOT_ROUNDED = ("F32", "F16", "BF16", "F64")


@dataclass(slots=True)
class Scaling:
    """The factors of a tensor. `rows` and `columns` may have a leading dimension of experts."""

    rows: F32 | None = None  # (rows,) or (experts, rows); for a vector, one factor per value
    columns: F32 | None = None  # (columns,) or (experts, columns)

    def apply(self, values: F32) -> F32:
        """Return the scaled tensor. Its shape is (values,), (rows, columns) or (experts, rows, columns)."""
        if self.rows is not None:
            values = values * (self.rows if values.ndim == self.rows.ndim else self.rows[..., None])
        if self.columns is not None:
            values = values * (self.columns if values.ndim == self.columns.ndim else self.columns[..., None, :])
        return values

    def importance(self, mean_squares: F32) -> F32:
        """Return the mean squares (..., columns) of the inputs of the scaled tensor."""
        return mean_squares if self.columns is None else (mean_squares / self.columns**2).astype(np.float32)


def scale_model(
    model: Model,
    windows: Windows,
    formats: Mapping[str, str],
    progress: Callable[[str, int, int], None] | None = None,
    memory: int = MEMORY,
) -> dict[str, Scaling]:
    """Return the factors of the tensors that scaling improves. `formats` has the target format of every tensor.

    `model` must be loaded with `observe=True`. The forward passes over the windows are repeated for every `memory`
    bytes of moments.
    """
    assert model.plan is not None
    tensors = model.file.tensors
    todo = [g for g in fold_groups(model.plan) if any(formats.get(r, "F32") not in NOT_ROUNDED for r in g.readers)]
    found: dict[str, Scaling] = {}
    done = 0
    for portion in _portions(todo, tensors, memory):
        moments = collect(model, windows, {name for group in portion for name in group.readers}, progress)
        for group in portion:
            _add(found, group, _factors(group, tensors, formats, moments), tensors)
            done += 1
            if progress is not None:
                progress("scaling", done, len(todo))
    return found


def _portions(todo: list[FoldGroup], tensors: Mapping[str, Tensor], memory: int) -> list[list[FoldGroup]]:
    """Split groups into runs whose moments fit in `memory`. The readers of a group share moments, so only the first
    reader counts."""
    first = {group.readers[-1]: group for group in todo}
    return [[first[name] for name in names] for names in portions(tensors, list(first), memory)]


def _factors(
    group: FoldGroup, tensors: Mapping[str, Tensor], formats: Mapping[str, str], moments: Mapping[str, F64]
) -> F32:
    """Return the factors of a group, (made,) or (experts, made)."""
    readers: list[list[Matrix]] = [[] for _ in range(max(group.experts, 1))]
    for name in group.readers:
        format_name = formats.get(name, "F32")
        if format_name in NOT_ROUNDED:
            continue
        values, held = _values(tensors[name]), moments[name]
        matrices = values.reshape(-1, *values.shape[-2:])
        for expert, matrix in enumerate(matrices):
            own = readers[expert if group.experts else 0]
            own.append(Matrix(matrix, held[expert if len(held) > 1 else 0], _rounding(format_name)))
    squares = np.stack([_diagonals(own) for own in readers]) if group.experts else _diagonals(readers[0])
    if group.experts:
        return np.stack([search(own, s)[0] for own, s in zip(readers, squares, strict=True)])
    return search(readers[0], group.gather(squares), group.spread)[0]


def _diagonals(matrices: list[Matrix]) -> F32:
    total: F32 = np.sum([np.diagonal(matrix.hessian) for matrix in matrices], axis=0).astype(np.float32)
    return total


def _rounding(format_name: str) -> Callable[[F32, F32], F32]:
    return lambda matrix, squares: quant.dequantize(quant.quantize(matrix, format_name, squares), format_name)


def _values(tensor: Tensor) -> F32:
    shape = tensor.shape
    rows = int(np.prod(shape[:-1]))
    return quant.dequantize(tensor.read(0, rows), tensor.format).reshape(shape)


def _add(found: dict[str, Scaling], group: FoldGroup, scale: F32, tensors: Mapping[str, Tensor]) -> None:
    """Multiply the columns of the readers by the factors, and divide the makers by them."""
    if (scale == 1).all():
        return
    for name in group.readers:
        held = found.setdefault(name, Scaling())
        columns = group.spread(scale)
        held.columns = columns if held.columns is None else held.columns * columns
    for maker in group.makers:
        shape = tensors[maker.name].shape
        held = found.setdefault(maker.name, Scaling())
        if held.rows is None:
            held.rows = np.ones(shape if len(shape) == 1 else shape[:-1], np.float32)
        if group.experts and len(shape) == 2:  # biases of experts: (experts, values)
            held.rows = np.ones(shape, np.float32)
        held.rows[..., maker.start : maker.stop] /= scale
