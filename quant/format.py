"""Defines a block format: an immutable object with its name, sizes and NumPy conversions.

`quant.table` lists all formats; the rest of the package only uses these objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.base.printable import printable

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


class QuantError(Exception):
    """Raised for a format, shape or value that cannot be converted; the message states the requirement."""

    def __str__(self) -> str:
        return printable(super().__str__(), None)


@dataclass(frozen=True, slots=True)
class Format:
    """How a GGUF tensor type stores values: rows are whole blocks, blocks are `block_bytes` consecutive bytes.

    `dequantize` maps blocks uint8 (n, block_bytes) to float32 (n, block_values), both C-contiguous. `quantize` maps
    rows float32 (n, values), C-contiguous, and importance float32 (values,) or None to uint8 (n, bytes): whole rows,
    because the weighted searches use row statistics. `quantize` is None for formats that cannot be written. Callers use
    `quant.dequantize` and `quant.quantize`, which validate shapes, silence floating-point warnings and bound temporary
    memory.
    """

    name: str
    type_id: int  # ggml_type, as stored in GGUFs
    block_values: int
    block_bytes: int
    dequantize: Callable[[U8], F32]
    quantize: Callable[[F32, F32 | None], U8] | None
