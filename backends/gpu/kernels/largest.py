"""The top-k search over the logits on the device: sampling usually needs only about 40 of 128,000 logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import TopK
from localllm.backends.gpu.kernels.kernel import Kernel, Shape
from localllm.backends.gpu.references import Fixed

SORTED = 4096  # logits sorted per work-group
MOST = 256  # largest number of logits to keep
NUMBERS = 8  # words of the kernel's parameters: the count to keep, and the number of keys that each pass reads
KEYS = (Fixed.EVEN_KEYS, Fixed.ODD_KEYS)  # results of even and odd passes


class TopKLogits(Kernel):
    """One pass of the search: every work-group sorts SORTED logits, or keys of the previous pass."""

    name, parts = "largest", "largest"
    PASS: Shape
    SORTED: int
    STRIDE: Shape

    @property
    def local_floats(self) -> int:
        return 2 * self.SORTED


def passes(vocabulary: int, keep: int) -> list[int]:
    """Return the number of keys of a row that each pass reads."""
    found = [vocabulary]
    while found[-1] > SORTED:
        found.append(-(-found[-1] // SORTED) * keep)
    return found


def numbers(vocabulary: int, keep: int) -> NDArray[np.int32]:
    """Return the kernel's parameters, int32 (NUMBERS,)."""
    given = [keep, *passes(vocabulary, keep)]
    return np.array(given + [0] * (NUMBERS - len(given)), np.int32)


def decoded(keys: NDArray[np.uint32]) -> TopK:
    """Decode keys (L, keep, 2) to token ids and logits. Negative zero becomes zero."""
    order = keys[:, :, 0]
    bits = np.where(order >> 31, order, ~order & np.uint32(0x7FFFFFFF))
    logits = np.where(order == 0, np.float32(np.nan), bits.view(np.float32))
    return TopK(keys[:, :, 1].view(np.int32), logits)
