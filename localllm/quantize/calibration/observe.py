"""Run a text through a model loaded with `observe=True`, and yield the inputs of its matrices step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.evaluation import Windows
from localllm.model import Model
from localllm.plan import F32, Experts


@dataclass(frozen=True, slots=True)
class MatrixInputs:
    """The input rows of matrices in one step. The arrays are views that the next step overwrites."""

    names: tuple[str, ...]  # names of the GGUF tensors that read these inputs
    x: F32  # (rows, width); for expert matrices (rows, used, width)
    choices: NDArray[np.int32] | None = None  # (rows, used): the expert of each input


def matrix_inputs(
    model: Model,
    windows: Windows,
    progress: Callable[[str, int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    seen: Callable[[int, int, F32], None] | None = None,
) -> Iterator[list[MatrixInputs]]:
    """Yield the inputs of matrices for every step over the windows. Each window starts with an empty KV cache, and with
    BOS if the vocabulary requires it.

    `stop` is called after every window; if it returns true, the run ends. `seen` receives the logits of every step,
    with the number of the window and the position of the first row.
    """
    if progress is not None:
        progress("observing", 0, len(windows.tokens))
    tokenizer = model.maybe_tokenizer
    session, step = model.session(), min(model.batch_rows, model.executable.limits.logit_rows)
    try:
        for number, row in enumerate(windows.tokens):
            session.rewind(0)
            tokens = row.tolist()
            if tokenizer is not None and tokenizer.add_bos and tokenizer.bos is not None:
                tokens[0] = tokenizer.bos
            for start in range(0, len(tokens), step):
                # Logits are requested so that the last layer processes every row.
                logits = session.evaluate(tokens[start : start + step], logits=True)
                if seen is not None:
                    seen(number, start, logits)
                yield _inputs(model)
            if progress is not None:
                progress("observing", number + 1, len(windows.tokens))
            if stop is not None and stop():
                return
    finally:
        session.close()


def _inputs(model: Model) -> list[MatrixInputs]:
    """Return the inputs of matrices in the last step, one entry per distinct input."""
    assert model.plan is not None
    executable, found = model.executable, []
    readers: dict[int, dict[str, None]] = {}  # distinct names in order
    values = {}
    for op in model.plan.operations:
        if isinstance(op, Experts):
            routing = executable.routing(op.out)
            x = np.broadcast_to(executable.value(op.x)[:, None], (*routing.choices.shape, op.x.width))
            choices = routing.choices // op.down.shared  # expert numbers in the GGUF tensor
            found.append(MatrixInputs((op.gate.weight.tensor, op.up.weight.tensor), x, choices))
            found.append(MatrixInputs((op.down.weight.tensor,), routing.hidden, choices))
            continue
        for value, weight in op.products:
            values[value.index] = value
            readers.setdefault(value.index, {})[weight.tensor] = None
    found += [MatrixInputs(tuple(names), executable.value(values[index])) for index, names in readers.items()]
    return found
