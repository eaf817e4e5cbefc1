"""The methods of quantize (its option `method`): they store a tensor based on its inputs in the model.

    with load(path, ctx_size=512, observe=True) as model:
        method = METHODS["gptq"](model, cut(model, text, 512), formats, progress)
        rows = method.store(name, values, formats[name])       # for every tensor, in the order of the file

`formats` holds the target format of every tensor. The model must stay open until the last tensor is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.backends.base import Progress
from localllm.evaluation import Windows
from localllm.model import Model
from localllm.plan import F32
from localllm.quant import gptq
from localllm.quantize.calibration.hessian import MEMORY, collect, portions
from localllm.quantize.calibration.imatrix import Imatrix, measure_imatrix
from localllm.quantize.calibration.scaling import NOT_ROUNDED, scale_model

U8 = NDArray[np.uint8]


class Method(Protocol):
    """Stores tensors. `store` converts a tensor float32 (values,), (rows, columns) or (experts, rows, columns) to
    bytes."""

    def store(self, name: str, values: F32, format_name: str) -> U8: ...


class Awq:
    """Activation-aware scaling, followed by the format's quantizer with the importance of the scaled inputs."""

    def __init__(
        self,
        model: Model,
        windows: Windows,
        formats: Mapping[str, str],
        progress: Progress | None = None,
        memory: int = MEMORY,
    ) -> None:
        self._imatrix: Imatrix = measure_imatrix(model, windows, output=True, progress=progress)
        self._scalings = scale_model(model, windows, formats, progress, memory)

    def store(self, name: str, values: F32, format_name: str) -> U8:
        """Store a tensor. Norms, biases and other vectors can change too, because factors may be folded into them."""
        columns, scaling = values.shape[-1], self._scalings.get(name)
        matrices = values if values.ndim == 3 else values.reshape(1, -1, columns)
        squares = self._imatrix.importance(name, len(matrices), columns)
        if scaling is not None:
            matrices = scaling.apply(values).astype(np.float32).reshape(matrices.shape)
            squares = scaling.importance(squares) if squares is not None else None
        return np.concatenate(
            [
                quant.quantize(matrix, format_name, np.ascontiguousarray(squares[i]) if squares is not None else None)
                for i, matrix in enumerate(matrices)
            ]
        )


class Gptq:
    """Second-order error feedback. The forward passes over the text are repeated for every `memory` bytes of second
    moments."""

    def __init__(
        self,
        model: Model,
        windows: Windows,
        formats: Mapping[str, str],
        progress: Progress | None = None,
        memory: int = MEMORY,
    ) -> None:
        self._model, self._windows, self._progress = model, windows, progress
        tensors = model.file.tensors
        names = [n for n in tensors if formats.get(n, "F32") not in NOT_ROUNDED and _has_feedback(n)]
        self._portions = {name: portion for portion in portions(tensors, names, memory) for name in portion}
        self._moments: dict[str, NDArray[np.float64]] = {}
        self._shared: tuple[NDArray[np.float64], int, gptq.GptqFeedback] | None = None  # moments, expert

    def store(self, name: str, values: F32, format_name: str) -> U8:
        columns = values.shape[-1]
        matrices = values if values.ndim == 3 else values.reshape(1, -1, columns)
        moments = self._moments_of(name) if format_name not in NOT_ROUNDED else None
        if moments is None:
            return quant.quantize(np.ascontiguousarray(matrices.reshape(-1, columns)), format_name)
        alike = np.ones(columns, np.float32)  # for an expert without inputs, as in an importance matrix
        return np.concatenate(
            [
                gptq.gptq_quantize(matrix, moments[i], format_name, self._feedback(moments, i))
                if moments[i].any()
                else quant.quantize(matrix, format_name, alike)
                for i, matrix in enumerate(matrices)
            ]
        )

    def _feedback(self, moments: NDArray[np.float64], expert: int) -> gptq.GptqFeedback:
        """Return the feedback for an expert's moments. It is cached for adjacent tensors such as gate and up."""
        if self._shared is None or self._shared[0] is not moments or self._shared[1] != expert:
            self._shared = moments, expert, gptq.feedback(moments[expert])
        return self._shared[2]

    def _moments_of(self, name: str) -> NDArray[np.float64] | None:
        if name in self._portions and name not in self._moments:
            self._moments, self._shared = {}, None  # free the moments before the next ones are allocated
            self._moments = collect(self._model, self._windows, self._portions[name], self._progress)
        return self._moments.get(name)


def _has_feedback(name: str) -> bool:
    """Return whether GPTQ applies to a tensor: to matrices of layers and the output matrix, but not to embeddings."""
    return name.startswith("blk.") or name == "output.weight"


METHODS: dict[str, type[Awq] | type[Gptq]] = {"awq": Awq, "gptq": Gptq}
