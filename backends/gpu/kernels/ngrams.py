"""The kernel that looks up n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from localllm.backends.gpu.kernels.kernel import Buffers, ByteIn, FloatOut, IntIn, Kernel, Macro, Shape
from localllm.backends.gpu.kernels.recurrence import Stored
from localllm.backends.gpu.references import Fixed


def by_number(numbers: Sequence[int]) -> str:
    """Return the expression of the n-th of these numbers."""
    *first, last = numbers
    return "".join(f"(n) < {n + 1} ? {number} : " for n, number in enumerate(first)) + str(last)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedNgramsBuffers(Buffers):
    w: ByteIn
    step: IntIn = Fixed.STEP
    tables: IntIn
    rows: FloatOut
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedNgrams(Kernel[EmbedNgramsBuffers]):
    """Expressions are those of `by_number`."""

    name, parts = "embed_ngrams", "ngrams"
    format: str
    stored: Stored
    K: Shape
    N: Shape
    HEADS: int
    EACH: int
    END: int
    ITEMS: Shape
    Y_STRIDE: Shape
    MULTIPLIERS: Annotated[str, Macro("MULTIPLIER_OF(n)", text="({})")]
    SIZES: Annotated[str, Macro("SIZE_OF(n)", text="({})")]
    FIRSTS: Annotated[str, Macro("FIRST_OF(n)", text="({})")]

    @property
    def size(self) -> int:
        return 64
