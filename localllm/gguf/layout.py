"""The layout of GGUF: constants, value types, limits, the error, and rules shared by reader and writer.

The specification is ggml/docs/gguf.md. Where llama.cpp is stricter, this package follows it, because a GGUF that
llama.cpp refuses is useless.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from localllm import quant
from localllm.base.errors import LocalLLMError
from localllm.base.printable import printable

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # equal layouts if little-endian; version 3 only adds big-endian files
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"

# Limits on a file's declared sizes, in addition to the file size. Each is far above any real file. Together they limit
# the time for a malicious file of any size to seconds.
MAX_HEAD_BYTES = 1 << 28  # before tensor data; the largest seen (2^18 tokens, 2^19 merges, tokenizer.json) has 48 MB
MAX_STRINGS = 1 << 22  # maximum strings in all arrays together
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_KEY_BYTES = (1 << 16) - 1  # limit in gguf.md
MAX_NAME_BYTES = 63  # llama.cpp: GGML_MAX_NAME, including a terminating zero
MAX_DIMENSIONS = 4
MAX_ELEMENTS = (1 << 63) - 1

NUMBER_TYPES: dict[int, np.dtype[np.generic]] = {  # without bool, for which any nonzero byte is true
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
BOOL, STRING, ARRAY = 7, 8, 9
TYPE_NAMES = {**{k: t.name for k, t in NUMBER_TYPES.items()}, BOOL: "bool", STRING: "string", ARRAY: "array"}


class GGUFError(LocalLLMError):
    """The file is invalid. The one-line message gives the file, the field, the value found and the supported values."""

    def __init__(self, path: Path, field: str, problem: str) -> None:
        super().__init__(f"{printable(str(path), 1000)}: {field}: {problem}")
        self.path = path
        self.field = field


def alignment_problem(alignment: int) -> str | None:
    """Return why tensors cannot be aligned to `alignment` bytes; None if they can."""
    if alignment < 8 or alignment & (alignment - 1):
        return f"{alignment} found; supported: powers of two from 8 up"
    return None


def shape_problem(shape: tuple[int, ...], fmt: quant.Format) -> str | None:
    """Return why a tensor of this row-major shape cannot be stored in this format; None if it can."""
    if not 1 <= len(shape) <= MAX_DIMENSIONS:
        return f"{len(shape)} dimensions; supported: 1 to {MAX_DIMENSIONS}"
    elements = 1
    for size in shape:
        elements *= size
    if min(shape) < 1:
        return f"shape {shape} has no elements; every dimension must be at least 1"
    if elements > MAX_ELEMENTS:
        return f"shape {shape} has {elements} elements; supported: fewer than 2^63"
    if shape[-1] % fmt.block_values:
        return f"rows of {shape[-1]} values; {fmt.name} needs a multiple of its block of {fmt.block_values}"
    return None


def tensor_bytes(shape: tuple[int, ...], fmt: quant.Format) -> tuple[int, int]:
    """Return the size in bytes of one row, and of the whole tensor, for a valid shape."""
    row = shape[-1] // fmt.block_values * fmt.block_bytes
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return row, row * rows


def aligned(size: int, alignment: int) -> int:
    """Return `size` rounded up to the alignment."""
    return -(-size // alignment) * alignment
