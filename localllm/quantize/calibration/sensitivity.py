"""Measure how each tensor's format changes the model's distributions, to choose a mix of formats.

    with Trial(path, text, ctx_size=512, windows=8, progress=...) as trial:
        effects = trial.effects({name: ("Q2_K", "Q4_K", "Q6_K", "Q8_0"), ...})   # measured, tensor by tensor
        formats = smallest(effects, max_kld)          # or best(effects, max_bytes): {name: format}
        kld = trial.kld(formats)                      # measured with all formats together

`fit_kld` repeats the last two calls until the measured divergence is within the limit. The model runs with its matrices
in half precision, and a tensor under trial has the values that it would have after quantization.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.backends.base import Progress
from localllm.base.closing import Closing
from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.evaluation import LogitsFile, ModelSource, Scores, Windows, cut_windows, evaluate, save_base
from localllm.gguf import open_gguf
from localllm.loading.resolve import resolve
from localllm.model import Model
from localllm.options import LoadOptions
from localllm.plan import Tensor
from localllm.quant.gptq import output_error
from localllm.quantize.calibration.hessian import MEMORY, collect, portions
from localllm.quantize.calibration.imatrix import Imatrix
from localllm.quantize.calibration.mix import Effect, Effects, finest, smallest

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

RUNS_AS = "F16"  # format of the matrices during trials: 11 significant bits, so its error is negligible
TRIES = 8  # attempts of `fit_kld` before it gives up


class _Swapped:
    """A `Tensor` that holds a matrix of the file in half precision, or replacement values."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.name, self.shape, self.format = tensor.name, tensor.shape, RUNS_AS
        self.other: NDArray[np.uint8] | None = None  # replacement rows

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        if self.other is not None:
            return self.other[start:stop]
        return quant.quantize(quant.dequantize(self._tensor.read(start, stop), self._tensor.format), RUNS_AS)

    def values(self) -> F32:
        """Return the values in the file, in the shape of the tensor."""
        rows = math.prod(self.shape[:-1])
        return quant.dequantize(self._tensor.read(0, rows), self._tensor.format).reshape(self.shape)


class Trial(Closing):
    """A model whose tensors can be replaced by their quantized values. Use it as a context manager."""

    def __init__(
        self,
        path: str | Path,
        text: str | Windows,
        *,
        ctx_size: int = 512,
        windows: int = 8,
        imatrix: Imatrix | None = None,
        backend: str = "auto",
        threads: int | None = None,
        progress: Progress | None = None,
        force: bool = False,
    ) -> None:
        """Load a model. `text` is either windows, or a text of at least two windows of `ctx_size` tokens. At most
        `windows` windows are used.

        `imatrix` is the importance that the quantizers will use. `force` is as in LoadOptions.
        """
        self._progress, self._imatrix = progress, imatrix
        with ExitStack() as stack:
            file = stack.enter_context(open_gguf(resolve(path)))
            self._model = Model(file, force)
            self._swapped = {n: _Swapped(t) for n, t in file.tensors.items() if len(t.shape) > 1}
            weights: dict[str, Tensor] = {**file.tensors, **self._swapped}
            options = LoadOptions(ctx_size=ctx_size, backend=backend, threads=threads)
            self._model.bind(options, progress, observe=True, weights=weights)
            stack.callback(self._model.close)
            self._windows = cut_windows(self._model, text, ctx_size, windows) if isinstance(text, str) else text
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="localllm-")))
            self._base = self._run_base(folder / "base")
            stack.callback(self._base.close)
            self._open = stack.pop_all()

    def _run_base(self, path: Path) -> LogitsFile:
        source = ModelSource(self._model, self._windows)
        with save_base(path, self._windows, source.vocabulary) as keep:
            for _ in evaluate(self._windows, source, None, self._progress, keep):
                pass
        source.close()
        return LogitsFile(path)

    @property
    def names(self) -> list[str]:
        """The matrices whose format can be chosen."""
        return list(self._swapped)

    def effects(self, candidates: Mapping[str, Sequence[str]], memory: int = MEMORY) -> dict[str, list[Effect]]:
        """Return the effect of every listed format for every tensor, coarsest first.

        The divergence is measured for the format with the largest error, by running the model with only this tensor
        changed. The divergence is proportional to the squared error of the outputs (Malinovskii et al. 2024,
        arXiv:2411.17525), which gives the divergence of the other formats.
        """
        names = [name for name in candidates if self._tensor(name) is not None]
        found: dict[str, list[Effect]] = {}
        if self._progress is not None:
            self._progress("measuring tensors", 0, len(names))
        for portion in portions(self._swapped, names, memory):
            moments = collect(self._model, self._windows, portion, None)
            for name in portion:
                found[name] = self._effects_of(name, candidates[name], moments.get(name))
                if self._progress is not None:
                    self._progress("measuring tensors", len(found), len(names))
        return found

    def _effects_of(self, name: str, formats: Sequence[str], moments: F64 | None) -> list[Effect]:
        tensor = self._tensor(name)
        values = tensor.values()
        tried = {}
        for format_name in formats:
            stored = self._stored(name, values, format_name)
            tried[format_name] = (stored, _error(values, stored, moments))
        worst = max(tried, key=lambda f: tried[f][1])
        self._put({name: tried[worst][0]})
        kld = self._run()
        self._put({name: None})
        per_error = kld / tried[worst][1] if tried[worst][1] else 0.0
        rows = math.prod(tensor.shape[:-1])
        effects = [
            Effect(f, rows * quant.row_bytes(f, tensor.shape[-1]), e, per_error * e) for f, (_, e) in tried.items()
        ]
        return sorted(effects, key=lambda effect: effect.bytes)

    def kld(self, formats: Mapping[str, str]) -> float:
        """Measure the mean KL divergence with these tensors stored in the given formats, and all other tensors as in
        the file."""
        for name, format_name in formats.items():
            self._put({name: self._stored(name, self._tensor(name).values(), format_name)})
        kld = self._run()
        self._put(dict.fromkeys(formats))
        return kld

    def _tensor(self, name: str) -> _Swapped:
        if name not in self._swapped:
            raise LocalLLMError(f"{name}: not a matrix of this model; its format cannot be chosen")
        return self._swapped[name]

    def _stored(self, name: str, values: F32, format_name: str) -> F32:
        """Return the values of a tensor after storing it."""
        matrices = values.reshape(-1, *values.shape[-2:])
        importance = self._imatrix.importance(name, len(matrices), values.shape[-1]) if self._imatrix else None
        rows = [
            quant.quantize(matrix, format_name, np.ascontiguousarray(importance[i]) if importance is not None else None)
            for i, matrix in enumerate(matrices)
        ]
        return quant.dequantize(np.concatenate(rows), format_name).reshape(values.shape)

    def _put(self, others: Mapping[str, F32 | None]) -> None:
        """Replace the values of tensors. None restores the values in the file."""
        assert self._model.plan is not None
        for name, values in others.items():
            self._swapped[name].other = (
                quant.quantize(values.reshape(-1, values.shape[-1]), RUNS_AS) if values is not None else None
            )
        for weight in self._model.plan.matrices.values():
            if weight.tensor in others:
                self._model.executable.replace(weight)

    def _run(self) -> float:
        source = ModelSource(self._model, self._windows)
        scores = Scores.join(list(evaluate(self._windows, source, self._base)))
        source.close()
        return max(float(scores.kld.mean()), 0.0)

    def close(self) -> None:
        self._open.close()


def _error(values: F32, stored: F32, moments: F64 | None) -> float:
    """Return the squared error of the outputs relative to their squares. Without inputs, return the error of the
    values."""
    if moments is None:
        return float(np.square(values - stored, dtype=np.float64).sum() / np.square(values, dtype=np.float64).sum())
    missed = total = 0.0
    for i, (matrix, other) in enumerate(
        zip(values.reshape(-1, *values.shape[-2:]), stored.reshape(-1, *values.shape[-2:]), strict=True)
    ):
        held = moments[i if len(moments) > 1 else 0]
        missed += output_error(matrix, other, held)
        total += output_error(matrix, np.zeros_like(matrix), held)
    return missed / total if total else 0.0


def fit_kld(trial: Trial, effects: Effects, max_kld: float) -> tuple[dict[str, str], float]:
    """Return the smallest mix whose measured divergence is at most `max_kld`, and this divergence."""
    aim, found = max_kld, None
    for _ in range(TRIES):
        formats = smallest(effects, aim)
        measured = trial.kld(formats)
        if measured <= max_kld:
            found = formats, measured
            if measured >= 0.93 * max_kld:
                break
        factor = max_kld / measured if measured else 2.0
        aim *= min(max(0.98 * factor, 0.5), 2.0)
        if found is not None and sum(e.kld for e in finest(effects)) > aim:
            break
    if found is None:
        problem = f"no mix reached a divergence of {max_kld:g}; the last one had {measured:.3g}"
        raise LocalLLMError(Notice(f"{problem}; raise ", Setting("max_kld")))
    return found
