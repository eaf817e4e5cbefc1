"""Connects a format in the table to its compiled search (`quant.compiled`), which is imported at the first call.

Numba compiles a search in a few seconds on its first use, and caches it in the user's cache folder.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import numpy as np

from localllm.quant.format import F32, U8, QuantError


def search(
    module: str, function: str, block_values: int, block_bytes: int, *, book: str = "", weighted: bool = False
) -> Callable[[F32, F32 | None], U8]:
    """Return a format's `quantize` that runs `function` of quant/compiled/`module`.py on whole blocks.

    `book` names the codebook of the format. `weighted` formats require importance, because they lose too much accuracy
    without it.
    """

    def quantize(x: F32, importance: F32 | None) -> U8:
        if weighted and importance is None:
            raise QuantError(f"{function.upper()} requires an importance matrix")
        run = getattr(import_module(f"localllm.quant.compiled.{module}"), function)
        more = (import_module("localllm.quant.compiled.codebook").codebook(book),) if book else ()
        out = np.empty((x.size // block_values, block_bytes), np.uint8)
        weights = np.empty(0, np.float32) if importance is None else np.ascontiguousarray(importance)
        if len(out):
            check_scale(run(x.reshape(-1, block_values), weights.reshape(-1, block_values), out, *more))
        return out.reshape(len(x), -1)

    return quantize


def check_scale(largest: float) -> None:
    """Raise QuantError if the largest magnitude of a block scale, as returned by a search, exceeds half precision."""
    if not largest < 65520:  # rounds to infinity
        raise QuantError(
            f"a block scale of {largest:.4g} is above the largest half, 65504: the weights or importance are too big"
        )
