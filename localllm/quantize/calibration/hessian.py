"""Second moments of matrix inputs. The sum of x x^T over a text determines how column errors accumulate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.evaluation import Windows
from localllm.model import Model
from localllm.plan import Tensor
from localllm.quantize.calibration.observe import matrix_inputs

F64 = NDArray[np.float64]

MEMORY = 2 << 30  # maximum bytes of moments in memory


def collect(
    model: Model, windows: Windows, names: Collection[str], progress: Callable[[str, int, int], None] | None = None
) -> dict[str, F64]:
    """Return second moments float64 (experts or 1, columns, columns) by name. Tensors with the same input share one
    array.

    `model` must be loaded with `observe=True`. Tensors that the forward pass does not multiply by are skipped.
    """
    found: dict[str, F64] = {}
    for inputs in matrix_inputs(model, windows, progress):
        for each in inputs:
            wanted = [name for name in each.names if name in names]
            if not wanted:
                continue
            held = found.get(wanted[0])
            width = each.x.shape[-1]
            if held is None:
                experts = model.file.tensors[wanted[0]].shape[0] if each.choices is not None else 1
                held = np.zeros((experts, width, width))
                found |= dict.fromkeys(wanted, held)
            if each.choices is None:
                held[0] += each.x.T @ each.x
                continue
            rows, chosen = each.x.reshape(-1, width), each.choices.reshape(-1)
            for expert in np.unique(chosen):
                own = rows[chosen == expert]
                held[expert] += own.T @ own
    return found


def portions(tensors: Mapping[str, Tensor], names: Sequence[str], limit: int = MEMORY) -> Iterator[list[str]]:
    """Split `names`, in order, into portions whose moments fit in `limit` bytes. Each portion has at least one name."""
    portion: list[str] = []
    held = 0
    for name in names:
        shape = tensors[name].shape
        size = 8 * shape[-1] ** 2 * (shape[0] if len(shape) == 3 else 1)
        if portion and held + size > limit:
            yield portion
            portion, held = [], 0
        portion.append(name)
        held += size
    if portion:
        yield portion
