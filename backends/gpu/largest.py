"""The largest logits, found on the device: sampling mostly looks at some forty of them, and they are 128,000."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Largest
from localllm.backends.gpu.kernels import SORTED

MOST = 256  # that can be asked for
NUMBERS = 8  # words of what the kernel is told: how many to keep, and how many each pass reads


def passes(vocabulary: int, keep: int) -> list[int]:
    """How many keys of a row each pass reads."""
    found = [vocabulary]
    while found[-1] > SORTED:
        found.append(-(-found[-1] // SORTED) * keep)
    return found


def numbers(vocabulary: int, keep: int) -> NDArray[np.int32]:
    """int32 (NUMBERS,): what the kernel is told."""
    given = [keep, *passes(vocabulary, keep)]
    return np.array(given + [0] * (NUMBERS - len(given)), np.int32)


def decoded(keys: NDArray[np.uint32]) -> Largest:
    """The ids and logits of keys (L, keep, 2); a negative zero has become zero."""
    order = keys[:, :, 0]
    bits = np.where(order >> 31, order, ~order & np.uint32(0x7FFFFFFF))
    logits = np.where(order == 0, np.float32(np.nan), bits.view(np.float32))
    return Largest(keys[:, :, 1].view(np.int32), logits)
